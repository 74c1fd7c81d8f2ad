"""Sample lengths that resemble real datasets, the same on every machine. seed -> [data] -> lengths.

Lengths are made in blocks with a random stream each, so that a billion of them can be written to a file without
being held, and so that the first N are the same whatever the total.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["chat", "vision"]
Lengths = NDArray[np.uint32]

SHORTEST = 8  # tokens
BLOCK = 5_000_000  # lengths made at a time


def sample_lengths(kind: Kind, count: int, *, limit: int, seed: int = 0) -> Lengths:
    """`count` lengths of a kind, clipped to [8, limit]: uint32[count], tokens."""
    return np.concatenate([*length_blocks(kind, count, limit=limit, seed=seed)])


def length_blocks(kind: Kind, count: int, *, limit: int, seed: int = 0) -> Iterator[Lengths]:
    """What `sample_lengths` returns, in blocks.

    chat: lognormal, median 350, sigma 0.9. vision: 60 % uniform from 700 to 1500 (an image and a question), 40 %
    lognormal, median 300, sigma 0.9 (text alone).
    """
    for number, start in enumerate(range(0, count, BLOCK)):
        rng = np.random.default_rng([seed, number])
        median = np.float32(350 if kind == "chat" else 300)
        lengths = np.exp(rng.standard_normal(BLOCK, dtype=np.float32) * np.float32(0.9)) * median
        if kind == "vision":
            with_image = rng.random(BLOCK, dtype=np.float32) < 0.6
            lengths[with_image] = rng.integers(700, 1501, int(with_image.sum()))
        yield np.clip(lengths[: count - start], SHORTEST, limit).astype(np.uint32)


def write_lengths(path: Path, kind: Kind, count: int, *, limit: int, seed: int = 0) -> None:
    """Write `sample_lengths` as a .npy file that can be memory-mapped, block by block."""
    lengths = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint32, shape=(count,))  # type: ignore[no-untyped-call]
    start = 0
    for block in length_blocks(kind, count, limit=limit, seed=seed):
        lengths[start : start + len(block)] = block
        start += len(block)
    lengths.flush()


def fewest_packs(lengths: Lengths, *, limit: int) -> int:
    """A number of packs below which no packing of these lengths can go (the bound L2 of Martello and Toth, 1990).

    For a size k up to half a pack: samples longer than limit - k take a pack each and leave no room for k or more;
    those longer than half a pack take one each as well; tokens of samples from k to half a pack that do not fit
    beside the latter need packs of their own. The bound is the best over all k; k = 0 counts tokens.
    """
    counts = np.bincount(lengths, minlength=limit + 1).astype(np.int64)
    samples_up_to = np.cumsum(counts)
    tokens_up_to = np.cumsum(counts * np.arange(limit + 1))
    half = limit // 2
    sizes = np.arange(half + 1)
    alone = samples_up_to[limit] - samples_up_to[limit - sizes]
    large = samples_up_to[limit - sizes] - samples_up_to[half]
    room_beside_large = large * limit - (tokens_up_to[limit - sizes] - tokens_up_to[half])
    below = np.where(sizes > 0, tokens_up_to[sizes - 1], 0)
    needed = np.maximum(0, -(-(tokens_up_to[half] - below - room_beside_large) // limit))
    return int((alone + large + needed).max())
