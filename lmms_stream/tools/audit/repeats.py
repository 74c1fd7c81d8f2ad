"""Hashes and sketches of samples -> samples equal or similar to an earlier sample. Pure.

A sketch is a MinHash signature (Broder, 1997): the share of equal values of two sketches estimates the Jaccard
similarity of two sets of pieces, here of all runs of a few characters or tokens. Sketches are compared if all values of
a band are equal (locality-sensitive hashing): 99.8 % of pairs with similarity 0.8, 1.4 % of pairs with 0.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_BANDS, BAND_VALUES = 20, 6
NUM_HASHES = NUM_BANDS * BAND_VALUES  # values of a sketch, uint16 each: 240 bytes per sample
LEAST_SIMILARITY = 0.8
CHARACTERS, TOKENS = 8, 3  # of a piece
_ROWS = 512  # pieces, or sketches, at a time
_generator = np.random.default_rng(0)
_FACTORS = _generator.integers(0, 1 << 31, NUM_HASHES, np.uint32) * np.uint32(2) + np.uint32(1)
_SHIFTS = _generator.integers(0, 1 << 32, NUM_HASHES, np.uint32)


class Codes(NamedTuple):
    """A sample as a sequence to sketch. codes: uint32[n], characters or tokens; [] for none. size: of a piece. salt:
    samples with other salts have nothing in common.
    """

    codes: NDArray[np.uint32]
    size: int
    salt: int = 0

    @staticmethod
    def of_text(text: str, *, salt: int = 0) -> Codes:
        """Return the code points of a text in small letters, with single spaces."""
        data = " ".join(text.lower().split()).encode("utf-32-le", "surrogatepass")
        return Codes(np.frombuffer(data, np.uint32), CHARACTERS, salt)


def sketches_of(samples: Sequence[Codes]) -> NDArray[np.uint16]:
    """Return the sketches of samples, uint16[n, NUM_HASHES]; zeros for a sample without codes."""
    sketches = np.zeros((len(samples), NUM_HASHES), np.uint16)
    for sketch, sample in zip(sketches, samples, strict=True):
        if len(sample.codes):
            least, hashes = np.full(NUM_HASHES, 0xFFFFFFFF, np.uint32), _hashes(sample)
            for begin in range(0, len(hashes), _ROWS):
                values = _FACTORS[:, None] * hashes[begin : begin + _ROWS]
                values += _SHIFTS[:, None]
                np.minimum(least, values.min(axis=1), out=least)
            sketch[:] = least ^ (least >> 16)
    return sketches


def _hashes(sample: Codes) -> NDArray[np.uint32]:
    """Return the hash of each piece of a sample; a sample shorter than a piece is one piece."""
    codes, size = sample.codes.astype(np.uint64), min(sample.size, len(sample.codes))
    pieces = np.full(len(codes) - size + 1, 0xCBF29CE484222325 ^ sample.salt, np.uint64)
    for at in range(size):
        pieces ^= codes[at : at + len(pieces)]
        pieces *= np.uint64(0x100000001B3)
    pieces = (pieces ^ (pieces >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return (pieces >> np.uint64(32)).astype(np.uint32)


def repeated_of(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of repeated values, ascending, and the index of the first equal value of each.

    >>> repeated_of(np.array([7, 5, 7, 7], np.uint64))[1].tolist()
    [0, 0]
    """
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    firsts: NDArray[np.int64] = first[inverse.reshape(-1)]
    later = np.flatnonzero(firsts != np.arange(len(hashes)))
    return later, firsts[later]


def similar_of(sketches: NDArray[np.uint16]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of sketches similar to an earlier sketch, ascending, and the earlier index of each.

    Sketches of zeros are similar to nothing. Of the sketches with equal values of a band, each is compared with the
    first and with the one before: time and memory do not grow with the number of similar pairs.
    """
    known = np.flatnonzero(sketches.any(axis=1))
    earlier = np.full(len(sketches), -1)
    for band in range(NUM_BANDS):
        keys = np.zeros(len(known), np.uint64)
        for number in range(band * BAND_VALUES, (band + 1) * BAND_VALUES):
            keys = (keys ^ sketches[known, number]) * np.uint64(0x9E3779B97F4A7C15)
            keys ^= keys >> np.uint64(29)
        order = np.argsort(keys, kind="stable")
        _compare(sketches, known[order], keys[order], earlier)
    later = np.flatnonzero(earlier >= 0)
    return later, earlier[later]


def similarity(one: NDArray[np.uint16], other: NDArray[np.uint16]) -> float:
    """Return the estimated similarity of two sketched samples, 0 to 1; its standard deviation is at most 0.05."""
    return float((one == other).mean())


def _compare(
    sketches: NDArray[np.uint16], indices: NDArray[np.int64], keys: NDArray[np.uint64], earlier: NDArray[np.int64]
) -> None:
    """Compare neighbours of equal keys, and write the earliest similar sketch of each."""
    is_first = np.diff(keys, prepend=~keys[:1]) != 0
    later, firsts = np.flatnonzero(~is_first), np.flatnonzero(is_first)
    for before in (firsts[np.cumsum(is_first)[later] - 1], later - 1):
        for begin in range(0, len(later), _ROWS):
            of_rows, others = indices[later[begin : begin + _ROWS]], indices[before[begin : begin + _ROWS]]
            is_earlier = (earlier[of_rows] < 0) | (others < earlier[of_rows])
            of_rows, others = of_rows[is_earlier], others[is_earlier]
            counts = np.count_nonzero(sketches[of_rows] == sketches[others], axis=1)
            is_similar = counts >= round(LEAST_SIMILARITY * NUM_HASHES)
            earlier[of_rows[is_similar]] = others[is_similar]
