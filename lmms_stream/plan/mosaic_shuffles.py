"""The shuffles of MosaicML's orders: sizes of pieces of shards -> numbers 0 to n - 1 in another order.

Generators are called in the same way as MosaicML's code calls them, so that the orders are the same to the sample. A
run has one order of shards, laid end to end and cut into canonical nodes of equal samples. What an epoch shuffles stays
in its canonical node.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

ALGORITHMS = ("py1br", "py1e", "py1s", "py2s", "naive")

Numbers = NDArray[np.int64]
Span = tuple[int, int]  # the first number, and the one past the last


def shuffled(
    algorithm: str, sizes: Numbers, *, num_canonical_nodes: int, seed: int, epoch: int, block_size: int
) -> Numbers:
    """The numbers of all pieces, shuffled. sizes: int64[num_pieces], none 0. block_size: reach of py1br and py1e.

    ValueError for settings that MosaicML's orders refuse.
    """
    rng = np.random.default_rng(seed + epoch)
    total = int(sizes.sum())
    least = {"py1br": 2, "py1e": 1}.get(algorithm, block_size)
    if block_size < least:
        raise ValueError(f"shuffle_block_size must be at least {least} with {algorithm}, got {block_size}")
    if algorithm == "naive":
        return rng.permutation(total)
    run_rng = np.random.default_rng(seed)
    numbers, spans = (_mixed if algorithm == "py2s" else _in_order)(sizes, run_rng)
    nodes = _cut(spans, total, num_canonical_nodes)
    if algorithm == "py2s":
        return _concatenated([_mixed_node(numbers, node, rng) for node in nodes])
    for node in nodes:
        rng.shuffle(node)
    if algorithm == "py1s":
        return _concatenated([_mixed_spans(node, rng) for node in nodes])
    if algorithm == "py1br":
        staggers = rng.integers(0, int(0.75 * block_size), (num_canonical_nodes,)).tolist()
        return _concatenated([_in_blocks(node, s, rng, block_size) for node, s in zip(nodes, staggers, strict=True)])
    return _concatenated([_spread(node, rng, block_size) for node in nodes])


def _in_order(sizes: Numbers, rng: np.random.Generator) -> tuple[Numbers, list[Span]]:
    """The numbers, and the spans of the pieces among them in the order of the run."""
    stops = np.cumsum(sizes)
    spans = list(zip((stops - sizes).tolist(), stops.tolist(), strict=True))
    rng.shuffle(spans)
    return np.arange(sizes.sum()), spans


def _mixed(sizes: Numbers, rng: np.random.Generator) -> tuple[Numbers, list[Span]]:
    """The same with the pieces laid in the order of the run, and each of them shuffled for all of the run."""
    _, spans = _in_order(sizes, rng)
    pieces = [np.arange(start, stop) for start, stop in spans]
    for piece in pieces:
        rng.shuffle(piece)
    stops = np.cumsum([len(piece) for piece in pieces]).tolist()
    return _concatenated(pieces), list(zip([0, *stops[:-1]], stops, strict=True))


def _cut(spans: Sequence[Span], total: int, num_nodes: int) -> list[list[Span]]:
    """Spans laid end to end and cut into parts of equal samples."""
    left = list(reversed(spans))
    nodes: list[list[Span]] = []
    num_laid = 0
    for node in range(1, num_nodes + 1):
        nodes.append([])
        end = total * node // num_nodes
        while num_laid < end:
            start, stop = left.pop()
            middle = min(stop, start + end - num_laid)
            nodes[-1].append((start, middle))
            num_laid += middle - start
            if middle < stop:
                left.append((middle, stop))
    return nodes


def _mixed_node(numbers: Numbers, node: list[Span], rng: np.random.Generator) -> Numbers:
    rng.shuffle(node)
    pieces = [numbers[start:stop] for start, stop in node]
    for piece in pieces:
        rng.shuffle(piece)
    return _concatenated(pieces)


def _mixed_spans(node: Sequence[Span], rng: np.random.Generator) -> Numbers:
    """The numbers of each span, shuffled within it."""
    pieces = [np.arange(start, stop) for start, stop in node]
    for piece in pieces:
        rng.shuffle(piece)
    return _concatenated(pieces)


def _in_blocks(node: Sequence[Span], stagger: int, rng: np.random.Generator, block_size: int) -> Numbers:
    """The numbers of a canonical node, shuffled within blocks of random sizes, which overlap by the stagger."""
    numbers = _concatenated([np.arange(start, stop) for start, stop in node])
    for start, stop in list(_blocks(len(numbers), stagger, rng, block_size)):  # all are drawn before the first shuffle
        rng.shuffle(numbers[start:stop])
    return numbers


def _blocks(num_samples: int, stagger: int, rng: np.random.Generator, block_size: int) -> Iterator[Span]:
    end = 0
    while end < num_samples:
        size = int(rng.integers(int(0.75 * block_size), int(1.25 * block_size)))
        start, stop = max(end - stagger, 0), min(end + size - stagger, num_samples)
        yield start, stop
        end += stop - start


def _spread(node: Sequence[Span], rng: np.random.Generator, block_size: int) -> Numbers:
    """The numbers of a canonical node, each moved by a random distance within reach of its span."""
    numbers = _mixed_spans(node, rng)
    if not len(numbers):
        raise ValueError("a canonical node has no sample: choose fewer num_canonical_nodes than there are samples")
    places = np.arange(len(numbers)).astype(np.float64)
    first, is_short = 0, False
    for start, stop in node:
        size = stop - start
        reach = (int(rng.integers(int(0.75 * block_size), int(1.25 * block_size))) - size) / 2
        is_short |= reach < 0
        reach = max(reach, 0)
        low, high = max(-reach, -first), min(reach, len(numbers) - first - size)
        places[first : first + size] += rng.uniform(low=low, high=high, size=size)
        first += size
    if is_short:
        warnings.warn(
            f"shuffle_block_size {block_size} is smaller than some shards, whose samples are not mixed with those of "
            "others: raise it",
            stacklevel=2,
        )
    return numbers[np.argsort(places)]


def _concatenated(pieces: Sequence[Numbers]) -> Numbers:
    return np.concatenate([np.empty(0, np.int64), *pieces])
