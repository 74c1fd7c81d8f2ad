"""The processed samples of a pack -> one Batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .processors.base import IGNORED_LABEL
from .types import Batch, Processed

PAD_TOKEN_ID = 0
MIN_PAD_TOKENS = 2  # a pad pack must have a next token to predict, or a model's shapes degenerate


def collate(
    samples: Sequence[Processed],
    sample_ids: Sequence[int],
    *,
    pad_to: int | None = None,
    source: str = "",
    step: int = 0,
    micro_batch: int = 0,
) -> Batch:
    """One sequence of all samples of a pack; see Batch for the shapes.

    pad_to: at least this many tokens; what is added is a segment of its own, without labels. No samples at all
    give a pad pack: only such a segment.
    """
    lengths = [len(sample["input_ids"]) for sample in samples]
    padding = max((pad_to or 0) - sum(lengths), 0 if samples else MIN_PAD_TOKENS)
    input_ids = [np.asarray(sample["input_ids"], np.int64) for sample in samples]
    labels = [np.asarray(sample["labels"], np.int64) for sample in samples]
    if padding:
        lengths.append(padding)
        input_ids.append(np.full(padding, PAD_TOKEN_ID, np.int64))
        labels.append(np.full(padding, IGNORED_LABEL, np.int64))
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    all_labels = np.concatenate(labels)
    all_labels[bounds[:-1]] = IGNORED_LABEL
    return Batch(
        input_ids=torch.from_numpy(np.concatenate(input_ids))[None],
        labels=torch.from_numpy(all_labels)[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))[None],
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=max(lengths),
        num_loss_tokens=int(np.count_nonzero(all_labels != IGNORED_LABEL)),
        sample_ids=torch.tensor(list(sample_ids), dtype=torch.int64),
        source=source,
        step=step,
        micro_batch=micro_batch,
    )
