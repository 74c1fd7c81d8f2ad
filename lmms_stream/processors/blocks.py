"""Samples as blocks: runs of tokens that are seen in one way. Which token sees which, and where each stands. Pure.

Text sees all before it. An image sees itself whole and all before it. Nothing outside of an image that is to be made
sees it, and nothing outside of a block that was dropped sees that. Samples of a pack never see each other.

After BAGEL (Deng et al. 2025, "Emerging Properties in Unified Multimodal Pretraining").
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class BlockKind(IntEnum):
    """TEXT is causal. SEEN: an image as the vision encoder sees it. CONDITION: the clean latents of an image that a
    later one is made by. MADE: the latents of an image that is to be made, with noise on them.
    """

    TEXT = 0
    SEEN = 1
    CONDITION = 2
    MADE = 3


LATENTS = (BlockKind.CONDITION, BlockKind.MADE)


class Blocks(NamedTuple):
    """The blocks of a sequence of samples in order, which cover all of its tokens.

    kinds, starts, stops: int64[n], with tokens [start, stop). samples: int64[n], ascending numbers of their samples.
    dropped: bool[n].
    """

    kinds: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    samples: NDArray[np.int64]
    dropped: NDArray[np.bool_]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.stops - self.starts

    @property
    def num_tokens(self) -> int:
        return int(self.stops[-1]) if len(self.stops) else 0

    @property
    def is_hidden(self) -> NDArray[np.bool_]:
        """Blocks that nothing outside of them sees: bool[n]."""
        hidden: NDArray[np.bool_] = self.dropped | (self.kinds == BlockKind.MADE)
        return hidden

    @property
    def of_tokens(self) -> NDArray[np.int64]:
        """The number of the block of each token: int64[T]."""
        return np.repeat(np.arange(len(self.kinds)), self.lengths)

    def inside(self, kinds: Sequence[BlockKind]) -> NDArray[np.int64]:
        """The tokens of images of these kinds, without those at both ends of a block: int64[n], ascending."""
        tokens = np.arange(self.num_tokens)
        block = self.of_tokens
        is_inside = (tokens > self.starts[block]) & (tokens < self.stops[block] - 1)
        return np.flatnonzero(np.isin(self.kinds[block], kinds) & is_inside)


def blocks_of(
    kinds: NDArray[np.int64], lengths: NDArray[np.int64], samples: NDArray[np.int64], dropped: NDArray[np.bool_]
) -> Blocks:
    """Blocks that follow each other from token 0 on."""
    stops = np.cumsum(lengths, dtype=np.int64)
    return Blocks(kinds.astype(np.int64), stops - lengths, stops, samples.astype(np.int64), dropped.astype(bool))


def visible(blocks: Blocks) -> NDArray[np.bool_]:
    """Whether a token (row) sees another (column): bool[T, T]."""
    block, tokens = blocks.of_tokens, np.arange(blocks.num_tokens)
    one, other = block[:, None], block[None]
    is_causal = (blocks.kinds == BlockKind.TEXT)[one]
    inside = (one == other) & (~is_causal | (tokens[None] <= tokens[:, None]))
    before = (other < one) & ~blocks.is_hidden[other]
    mask: NDArray[np.bool_] = (blocks.samples[one] == blocks.samples[other]) & (inside | before)
    return mask


def positions(blocks: Blocks) -> NDArray[np.int64]:
    """Where each token stands in its sample: int64[T].

    Each token of a text stands one further. All of an image stand at one position, and what follows it one further;
    after an image that is to be made, and after a block that was dropped, what follows stands where that did.
    """
    lengths, is_text = blocks.lengths, blocks.kinds == BlockKind.TEXT
    advances = np.where(is_text, lengths, 1) * ~blocks.is_hidden
    ends = np.cumsum(advances)
    begins: NDArray[np.int64] = ends - advances
    is_first = np.diff(blocks.samples, prepend=-1) != 0
    of_sample = np.maximum.accumulate(np.where(is_first, begins, 0))  # begins never fall
    block, tokens = blocks.of_tokens, np.arange(blocks.num_tokens)
    found: NDArray[np.int64] = (begins - of_sample)[block] + np.where(is_text[block], tokens - blocks.starts[block], 0)
    return found
