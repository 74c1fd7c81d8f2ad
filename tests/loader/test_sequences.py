"""A pair of answers is one sample of two sequences: segments that do not see each other, in one pack."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate, join
from lmms_stream.loader.media_memory import SharedBlocks
from lmms_stream.loader.wire import WireBatch, from_wire, to_wire
from lmms_stream.types import Batch, Processed, Role


def pair(*lengths: int, first: int = 10) -> Processed:
    """The first token of each answer is not learnt by its label, though its processor says so."""
    tokens = np.arange(first, first + sum(lengths))
    roles = [Role.CHOSEN, Role.REJECTED][: len(lengths)]
    return {"input_ids": tokens, "labels": tokens, "sequences": np.array(list(zip(lengths, roles, strict=True)))}


def same(one: Batch, two: Batch) -> bool:
    values = [(getattr(one, each.name), getattr(two, each.name)) for each in fields(Batch)]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in values)


def test_each_answer_of_a_pair_is_a_segment_of_its_own() -> None:
    batch = collate([pair(3, 2), pair(2, 4)], [7, 3])
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 7, 11]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 0, 1, 2, 3]]
    assert (batch.labels[0] == -100).nonzero()[:, 0].tolist() == [0, 3, 5, 7]
    assert batch.max_seqlen == 4
    assert batch.sample_ids.tolist() == [7, 3]
    assert batch.sequences is not None
    assert batch.sequences.tolist() == [[0, 0, 3, 1], [0, 3, 5, 0], [1, 5, 7, 1], [1, 7, 11, 0]]
    assert (batch.num_segments, batch.sample_bounds) == (4, [(0, 5), (5, 11)])
    assert [batch.sample_of(segment) for segment in range(4)] == [7, 7, 3, 3]


def test_padding_is_never_an_answer() -> None:
    """Neither behind one pack nor between packs that are joined, nor as a pack without samples."""
    padded = collate([pair(3, 2)], [7], pad_to=9)
    assert padded.sequences is not None
    assert padded.sequences.tolist() == [[0, 0, 3, 1], [0, 3, 5, 0]]
    assert padded.cu_seqlens.tolist() == [0, 3, 5, 9]
    assert (padded.num_segments, padded.num_loss_tokens) == (2, 3)
    empty = collate([], [], pad_to=4)
    assert (empty.sequences, empty.num_segments) == (None, 0)
    joined = join([padded, empty, collate([pair(1, 2)], [3], pad_to=6)])
    assert joined.sequences is not None
    assert joined.sequences.tolist() == [[0, 0, 3, 1], [0, 3, 5, 0], [1, 13, 14, 1], [1, 14, 16, 0]]
    assert joined.cu_seqlens.tolist() == [0, 3, 5, 9, 13, 14, 16, 19]


def test_sequences_travel_with_their_batch() -> None:
    batch = collate([pair(3, 2), pair(2, 4)], [7, 3], pad_to=16)
    sent = to_wire(batch, SharedBlocks())
    assert isinstance(sent, WireBatch)
    assert same(from_wire(sent), batch)
    assert same(batch.to(torch.device("cpu")), batch)


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        (
            [[3, 1], [1, 0]],
            r"gives sequences \[\[3, 1\], \[1, 0\]\] for a sample of 5 tokens: .* must make up the sample",
        ),
        ([[3, 1], [2, 3]], r"their roles be 0 or 1 or 2"),
        ([[5, 1], [0, 0]], r"1 or more each"),
        ([3, 2], r"gives sequences int64\[2\]: give int64\[k, 2\]"),
        ([[2.5, 1.0]], r"gives sequences float64\[1, 2\]"),
    ],
)
def test_sequences_that_are_not_those_of_their_sample_are_refused(sequences: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        collate([{**pair(3, 2), "sequences": np.array(sequences)}], [0])


def test_samples_with_and_without_sequences_are_not_mixed() -> None:
    plain = {name: value for name, value in pair(3, 2).items() if name != "sequences"}
    with pytest.raises(ConfigError, match=r"for all samples or for none"):
        collate([pair(3, 2), plain], [0, 1])
    with pytest.raises(ConfigError, match=r"packs of chats have no sequences, and others have: train on datasets of"):
        join([collate([pair(3, 2)], [0]), collate([plain], [1], source="chats")])
