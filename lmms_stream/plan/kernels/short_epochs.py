"""Many short epochs at once: order, packing and interleaving, as for one long epoch.

In Python an epoch of a few samples would take far longer; the loops take a few microseconds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..._core import loops

STRATEGIES = "best_fit", "even_fit", "window_N", "first_fit", "next_fit"  # in the order of the loop's numbers

_Numbers = NDArray[np.int64]


class SourceFacts(NamedTuple):
    """Inputs of a source's epochs; see OrderConfig and EpochOrder.

    sizes, first_ids: int64[num_shards], samples of each shard, and the id of its first sample. lengths:
    int32[num_samples]. num_pieces: int32[num_samples], number of segments of each sample, 0 for a dropped sample.
    """

    seed: int
    shuffles: bool
    reshuffles: bool
    num_nodes: int
    block_size: int
    sizes: _Numbers
    first_ids: _Numbers
    lengths: NDArray[np.int32]
    num_pieces: NDArray[np.int32]


class Rules(NamedTuple):
    """Settings of packing; see best_fit. keeps: whether samples longer than the limit are kept whole."""

    strategy: str
    limit: int
    max_samples: int
    window: int
    filler_share: float
    keeps: bool


class Segments(NamedTuple):
    """Segments of a block, or of an epoch: int32[num_segments] each, as in PackRange."""

    sample_ids: NDArray[np.int32]
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]


class EpochPacks(NamedTuple):
    """Packs of consecutive epochs; offsets[p]: the first segment of pack p.

    nodes, turns: int32[num_packs], canonical node of each pack, and turn of the pack's block in this node. first_packs:
    int64[num_epochs + 1], the first pack of each epoch.
    """

    segments: Segments
    offsets: _Numbers
    nodes: NDArray[np.int32]
    turns: NDArray[np.int32]
    first_packs: _Numbers


def pack_epochs(facts: SourceFacts, rules: Rules, first: int, count: int) -> EpochPacks:
    """Return the packs of the epochs [first, first + count), in the order of their numbers."""
    most = count * int(facts.num_pieces.sum(dtype=np.int64))
    sample_ids, starts, lengths, nodes, turns = (np.empty(most, np.int32) for _ in range(5))
    offsets, first_packs = np.empty(most + 1, np.int64), np.empty(count + 1, np.int64)
    num_packs = loops.pack_epochs(
        *facts, STRATEGIES.index(rules.strategy), *rules[1:], first, count, sample_ids, starts, lengths, offsets, nodes,
        turns, first_packs,
    )  # fmt: skip
    segments = Segments(sample_ids, starts, lengths)
    return EpochPacks(segments, offsets[: num_packs + 1], nodes[:num_packs], turns[:num_packs], first_packs)
