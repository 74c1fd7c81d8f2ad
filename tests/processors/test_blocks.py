"""The mask and the positions of blocks are what the written rules say, cell by cell and token by token."""

from __future__ import annotations

import numpy as np
import pytest
from lmms_stream.processors.bagel import BlockKind, Blocks, blocks_of, positions, visible

from tests.rounds import rounds


def random_blocks(seed: int, *, longest: int = 5) -> Blocks:
    """Up to four samples of up to seven blocks each."""
    rng = np.random.default_rng(seed)
    samples = np.repeat(np.arange(4), rng.integers(0, 7, 4))
    if not len(samples):
        samples = np.zeros(1, int)
    kinds = rng.integers(0, len(BlockKind), len(samples))
    lengths = np.where(
        kinds == BlockKind.TEXT, rng.integers(1, longest, len(samples)), rng.integers(3, 3 + longest, len(samples))
    )
    dropped = (rng.random(len(samples)) < 0.2) & (kinds != BlockKind.MADE)
    return blocks_of(kinds, lengths, samples, dropped)


def sees(blocks: Blocks, token: int, other: int) -> bool:
    """The rules, as they are written."""

    def block_of(number: int) -> int:
        return next(i for i, stop in enumerate(blocks.stops) if number < stop)

    mine, theirs = block_of(token), block_of(other)
    if blocks.samples[mine] != blocks.samples[theirs]:
        return False  # samples of a pack never see each other
    if mine == theirs:
        if blocks.kinds[mine] == BlockKind.TEXT:
            return other <= token  # text is causal
        return True  # an image sees itself whole
    if blocks.kinds[theirs] == BlockKind.MADE or blocks.dropped[theirs]:
        return False  # nothing outside sees it
    return other < token  # all see what is before them


@pytest.mark.parametrize("seed", range(rounds(20, 300)))
def test_the_mask_is_what_the_rules_say_cell_by_cell(seed: int) -> None:
    blocks = random_blocks(seed)
    mask = visible(blocks)
    size = blocks.num_tokens
    assert mask.shape == (size, size)
    for token in range(size):
        for other in range(size):
            assert mask[token, other] == sees(blocks, token, other), (token, other, blocks)


@pytest.mark.parametrize("seed", range(rounds(20, 300)))
def test_positions_are_what_the_rules_say_token_by_token(seed: int) -> None:
    blocks = random_blocks(seed)
    expected: list[int] = []
    position, sample = 0, -1
    for kind, start, stop, of, dropped in zip(*blocks, strict=True):
        if of != sample:
            position, sample = 0, of
        length = int(stop - start)
        expected += list(range(position, position + length)) if kind == BlockKind.TEXT else [position] * length
        if not dropped and kind != BlockKind.MADE:
            position += length if kind == BlockKind.TEXT else 1
    assert positions(blocks).tolist() == expected


def test_what_was_dropped_changes_nothing_for_the_others() -> None:
    """They see the same tokens at the same positions as if it were not there."""
    for seed in range(rounds(20, 200)):
        blocks = random_blocks(seed)
        kept = ~blocks.dropped
        if not kept.any():
            continue
        left = blocks_of(blocks.kinds[kept], blocks.lengths[kept], blocks.samples[kept], blocks.dropped[kept])
        tokens = np.flatnonzero(kept[blocks.of_tokens])
        assert np.array_equal(visible(blocks)[np.ix_(tokens, tokens)], visible(left))
        assert not visible(blocks)[np.ix_(tokens, np.flatnonzero(blocks.dropped[blocks.of_tokens]))].any()
        assert np.array_equal(positions(blocks)[tokens], positions(left))


def test_the_tokens_inside_of_images_are_those_between_their_ends() -> None:
    blocks = blocks_of(np.array([0, 1, 3]), np.array([2, 4, 3]), np.zeros(3, int), np.zeros(3, bool))
    assert blocks.inside([BlockKind.SEEN]).tolist() == [3, 4]
    assert blocks.inside([BlockKind.CONDITION, BlockKind.MADE]).tolist() == [7]
