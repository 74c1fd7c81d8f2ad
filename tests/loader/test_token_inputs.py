"""Values of tokens beside their ids lie along the sequence of a batch, and are 0 where a sample has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate, join
from lmms_stream.loader.media_memory import SharedBlocks
from lmms_stream.loader.wire import WireBatch, from_wire, to_wire


def sample(length: int, *kinds: int) -> dict[str, Any]:
    ids = np.arange(length)
    return {"input_ids": ids, "labels": ids, **({"token_inputs": {"kinds": np.array(kinds)}} if kinds else {})}


def test_token_inputs_lie_beside_the_tokens_of_their_samples_and_are_zero_elsewhere() -> None:
    batch = collate([sample(3, 1, 0, 2), sample(2), sample(1, 5)], range(3), pad_to=8)
    assert batch.token_inputs["kinds"].tolist() == [[1, 0, 2, 0, 0, 5, 0, 0]]
    both = join([collate([sample(2)], [0]), batch])
    assert both.token_inputs["kinds"].tolist() == [[0, 0, 1, 0, 2, 0, 0, 5, 0, 0]]
    wire = to_wire(batch, SharedBlocks())
    assert isinstance(wire, WireBatch)
    assert from_wire(wire).token_inputs["kinds"].tolist() == batch.token_inputs["kinds"].tolist()
    assert collate([sample(2)], [0]).token_inputs == {}


def test_token_inputs_of_another_length_than_their_sample_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"token_inputs 'kinds' of shape \[2\] for a sample of 3 tokens: give one"):
        collate([sample(3, 1, 2)], [0])
