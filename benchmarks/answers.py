"""Whether a model answers right: the answer of each held-out chat is one token, its first that is learnt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def share_right(network: Callable[..., Any], processor: Any, held_out: Path, count: int) -> float:
    """Of so many held-out chats, the share for which the right answer is more probable than any other token.

    network: called with input_ids and the tensors of media, by their names.
    """
    import torch
    from lmms_stream.mds.core import PackedDataset
    from lmms_stream.mds.streams import StreamConfig

    right = 0
    for sample in PackedDataset([StreamConfig(local=held_out)]).read(range(count)):
        made: Any = processor.process(sample)
        answer = int(np.flatnonzero(made["labels"] >= 0)[0])
        media = {name: torch.from_numpy(values) for name, values in made["media"].items()}
        with torch.no_grad():
            logits = network(input_ids=torch.from_numpy(made["input_ids"])[None, :answer], **media).logits
        right += int(logits[0, -1].argmax()) == int(made["input_ids"][answer])
    return right / count
