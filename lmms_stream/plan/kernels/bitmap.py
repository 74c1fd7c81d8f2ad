"""A set of small integers that finds the least one from a number up: a bitmap in two levels, for packing_kernels.py.

Bit w of the summary says whether word w has a bit. After a change here delete the folder __pycache__: numba sees that
a compiled function has changed, but not that one it calls in another file has.
"""

# mypy: allow-untyped-decorators, disable-error-code="return-value, no-any-return"

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

_LOW_BIT_TABLE = np.zeros(64, dtype=np.int64)
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
for _bit in range(64):
    _LOW_BIT_TABLE[((1 << _bit) * int(_DE_BRUIJN) & (1 << 64) - 1) >> 58] = _bit


@njit(cache=True, nogil=True, inline="always")
def _low_bit(word: np.uint64) -> int:
    """Index of the lowest set bit of a word that is not 0 (de Bruijn multiplication)."""
    isolated = word & (~word + np.uint64(1))
    return _LOW_BIT_TABLE[(isolated * _DE_BRUIJN) >> np.uint64(58)]


@njit(cache=True, nogil=True)
def least_bit(words: NDArray[np.uint64], summary: NDArray[np.uint64], bit: int) -> int:
    """The least set bit that is `bit` or more; -1 when there is none."""
    at = bit >> 6
    word = words[at] >> np.uint64(bit & 63)
    if word != np.uint64(0):
        return bit + _low_bit(word)
    at += 1
    block_at = at >> 6
    if block_at >= len(summary):
        return -1
    block = (summary[block_at] >> np.uint64(at & 63)) << np.uint64(at & 63)
    while block == np.uint64(0):
        block_at += 1
        if block_at == len(summary):
            return -1
        block = summary[block_at]
    at = (block_at << 6) + _low_bit(block)
    return (at << 6) + _low_bit(words[at])


@njit(cache=True, nogil=True)
def set_bit(words: NDArray[np.uint64], summary: NDArray[np.uint64], bit: int) -> None:
    words[bit >> 6] |= np.uint64(1) << np.uint64(bit & 63)
    summary[bit >> 12] |= np.uint64(1) << np.uint64((bit >> 6) & 63)


@njit(cache=True, nogil=True)
def clear_bit(words: NDArray[np.uint64], summary: NDArray[np.uint64], bit: int) -> None:
    words[bit >> 6] &= ~(np.uint64(1) << np.uint64(bit & 63))
    if words[bit >> 6] == np.uint64(0):
        summary[bit >> 12] &= ~(np.uint64(1) << np.uint64((bit >> 6) & 63))
