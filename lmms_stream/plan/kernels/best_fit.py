"""Packs by all strategies: int32 lengths, each from 1 to `limit`, in; order and offsets out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._core import loops

FILLER_SHARE = 0.2  # of a window's tokens: its shortest samples, kept back to fill gaps

_Packs = tuple[NDArray[np.int32], NDArray[np.int64]]
_Stretch = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]


def _packed(loop: Callable[..., Any], lengths: NDArray[np.int32], *arguments: Any) -> _Stretch:
    """Return the order and offsets that a loop writes, and the positions of what waits for the next window."""
    count = len(lengths)
    order, offsets, still = np.empty(count, np.int32), np.empty(count + 1, np.int64), np.empty(count, np.int64)
    num_packs, num_still = loop(lengths, *arguments, order, offsets, still)
    return order, offsets[: num_packs + 1].copy(), still[:num_still].copy()


def best_fit(
    lengths: NDArray[np.int32],
    carried: NDArray[np.int64],
    firsts: NDArray[np.int64],
    position: int,
    last: bool,
    *rules: Any,
    evens: bool = False,
) -> _Stretch:
    """Return packs by best fit over windows of a sequence, or of a stretch; see packing.pack for the rules.

    A stretch begins with a window. carried: offsets of the packs that are open before the stretch; `lengths` begins
    with the lengths of their samples. firsts: positions in the sequence of the first samples of these packs. position:
    position of the stretch's first sample. last: the sequence ends with the stretch. rules: limit, maximum samples of a
    pack, window, share of the fillers, seed. evens: exchange samples between the packs that a window closes, for
    similar work. Returns order and offsets over `lengths`, and firsts of the packs that are still open, at the end of
    the order.
    """
    return _packed(loops.even_fit if evens else loops.best_fit, lengths, carried, firsts, position, last, *rules)


def window_fit(
    lengths: NDArray[np.int32], firsts: NDArray[np.int64], position: int, last: bool, *rules: Any
) -> _Stretch:
    """Return packs of windows of a sequence, or of a stretch of a sequence; see packing.pack for the rules.

    A stretch begins with a window. firsts: positions in the sequence of the waiting samples; `lengths` begins with the
    lengths of these samples. position, last: see best_fit. rules: limit, maximum samples of a pack, window, seed.
    Returns order and offsets over `lengths`, and positions of the samples that wait afterwards: each is a pack of a
    single sample at the end of the order.
    """
    return _packed(loops.window_fit, lengths, firsts, position, last, *rules)


def _all_packed(loop: Callable[..., int], lengths: NDArray[np.int32], limit: int, max_samples: int) -> _Packs:
    order, offsets = np.empty(len(lengths), np.int32), np.empty(len(lengths) + 1, np.int64)
    num_packs = loop(lengths, limit, max_samples, order, offsets)
    return order, offsets[: num_packs + 1].copy()


def next_fit(lengths: NDArray[np.int32], limit: int, max_samples: int) -> _Packs:
    """Return packs that are closed by the first sample without room."""
    return _all_packed(loops.next_fit, lengths, limit, max_samples)


def first_fit(lengths: NDArray[np.int32], limit: int, max_samples: int) -> _Packs:
    """Return packs with each sample in the first opened pack with room."""
    return _all_packed(loops.first_fit, lengths, limit, max_samples)
