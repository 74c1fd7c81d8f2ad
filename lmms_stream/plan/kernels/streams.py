"""NumPy's random streams in compiled loops: `default_rng(words)` and its `shuffle`, number for number.

An epoch of a few samples needs a generator of its own, and making one takes NumPy longer than packing the samples. The
seed is mixed as SeedSequence does it (O'Neill, "Developing a seed_seq Alternative", 2015), numbers come from PCG64
(O'Neill, 2014); one that is too large is drawn again.
"""

# mypy: allow-untyped-decorators, disable-error-code="assignment, return-value, no-any-return"

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Words = NDArray[np.uint64]
STATE_WORDS = (
    6  # of a generator: the state, high and low; the increment, high and low; half a number, and if it is there
)

_LOW = np.uint64(0xFFFFFFFF)
_32, _16, _1 = np.uint64(32), np.uint64(16), np.uint64(1)
_INIT_A, _MULT_A = np.uint64(0x43B0D7E5), np.uint64(0x931E8875)
_INIT_B, _MULT_B = np.uint64(0x8B51F9DD), np.uint64(0x58F38DED)
_MIX_L, _MIX_R = np.uint64(0xCA01F9DD), np.uint64(0x4973F715)
_PCG_HIGH, _PCG_LOW = np.uint64(0x2360ED051FC65DA4), np.uint64(0x4385DF649FCCF645)


@njit(cache=True, nogil=True, inline="always")
def _xor_high(value: np.uint64) -> np.uint64:
    return value ^ (value >> _16)


@njit(cache=True, nogil=True)
def seeded_words(entropy: Words, num_words: int) -> Words:
    """`SeedSequence(entropy).generate_state(num_words, uint64)`. entropy: uint64[1 or more], each below 2**32."""
    pool = np.zeros(4, np.uint64)
    constant = _INIT_A
    for at in range(max(4, len(entropy))):
        if at < 4:
            value = entropy[at] if at < len(entropy) else np.uint64(0)
            value ^= constant
            constant = (constant * _MULT_A) & _LOW
            pool[at] = _xor_high((value * constant) & _LOW)
        if at == 3:
            for source in range(4):
                for target in range(4):
                    if source != target:
                        constant = _mix_into(pool, target, pool[source], constant)
        if at >= 4:
            for target in range(4):
                constant = _mix_into(pool, target, entropy[at], constant)
    constant = _INIT_B
    words = np.zeros(num_words, np.uint64)
    for at in range(2 * num_words):
        value = pool[at % 4] ^ constant
        constant = (constant * _MULT_B) & _LOW
        value = _xor_high((value * constant) & _LOW)
        words[at // 2] |= value << (_32 if at % 2 else np.uint64(0))
    return words


@njit(cache=True, nogil=True)
def _mix_into(pool: Words, target: int, value: np.uint64, constant: np.uint64) -> np.uint64:
    """Mix a word into the pool's; the next constant of the hash."""
    value ^= constant
    constant = (constant * _MULT_A) & _LOW
    value = _xor_high((value * constant) & _LOW)
    pool[target] = _xor_high((_MIX_L * pool[target] - _MIX_R * value) & _LOW)
    return constant


@njit(cache=True, nogil=True)
def begin_stream(entropy: Words, state: Words) -> None:
    """Make `state`, uint64[STATE_WORDS], that of `default_rng(entropy)`."""
    seed = seeded_words(entropy, 4)
    state[2] = (seed[2] << _1) | (seed[3] >> np.uint64(63))
    state[3] = (seed[3] << _1) | _1
    state[0], state[1], state[4], state[5] = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    _advance(state)
    low = state[1] + seed[1]
    state[0] += seed[0] + np.uint64(low < seed[1])
    state[1] = low
    _advance(state)


@njit(cache=True, nogil=True, inline="always")
def _advance(state: Words) -> None:
    """The next state: the last one times PCG's multiplier plus the increment, modulo 2**128."""
    low, other = state[1], _PCG_LOW
    a, b, c, d = low >> _32, low & _LOW, other >> _32, other & _LOW
    middle = (b * d >> _32) + (a * d & _LOW) + (b * c & _LOW)
    high = a * c + (a * d >> _32) + (b * c >> _32) + (middle >> _32)
    high += state[0] * _PCG_LOW + low * _PCG_HIGH
    product = low * other
    total = product + state[3]
    state[0] = high + state[2] + np.uint64(total < product)
    state[1] = total


@njit(cache=True, nogil=True, inline="always")
def _next_32(state: Words) -> np.uint64:
    if state[5]:
        state[5] = np.uint64(0)
        return state[4]
    _advance(state)
    value = state[0] ^ state[1]
    turn = state[0] >> np.uint64(58)
    value = (value >> turn) | (value << ((np.uint64(64) - turn) & np.uint64(63)))
    state[4], state[5] = value >> _32, _1
    return value & _LOW


@njit(cache=True, nogil=True)
def shuffle(state: Words, values: NDArray[np.int64]) -> None:
    """Shuffle at most 2**32 values as the generator's `shuffle` does, from the last to the first."""
    mask = np.uint64((1 << 32) - 1)
    for last in range(len(values) - 1, 0, -1):
        while mask >> _1 >= np.uint64(last):
            mask >>= _1
        chosen = _next_32(state) & mask
        while chosen > np.uint64(last):
            chosen = _next_32(state) & mask
        values[last], values[chosen] = values[chosen], values[last]
