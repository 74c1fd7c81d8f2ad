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

from ..._core import loops

NUM_BANDS, BAND_VALUES = 20, 6
NUM_HASHES = NUM_BANDS * BAND_VALUES  # values of a sketch, uint16 each: 240 bytes per sample
LEAST_SIMILARITY = 0.8
CHARACTERS, TOKENS = 8, 3  # of a piece
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
    if samples:
        codes = np.concatenate([each.codes for each in samples]).astype(np.uint32, copy=False)
        stops = np.cumsum([len(each.codes) for each in samples])
        sizes = np.array([each.size for each in samples])
        salts = np.array([each.salt for each in samples], np.uint64)
        loops.sketch(codes, stops, sizes, salts, _FACTORS, _SHIFTS, sketches)
    return sketches


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
        least = round(LEAST_SIMILARITY * NUM_HASHES)
        loops.compare(sketches, NUM_HASHES, known[order], keys[order], least, earlier)
    later = np.flatnonzero(earlier >= 0)
    return later, earlier[later]


def similarity(one: NDArray[np.uint16], other: NDArray[np.uint16]) -> float:
    """Return the estimated similarity of two sketched samples, 0 to 1; its standard deviation is at most 0.05."""
    return float((one == other).mean())
