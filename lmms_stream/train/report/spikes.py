"""Figures of records -> whether one is out of the ordinary, and for how long; arithmetic only."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import median

FEWEST = 20  # records before the first that can be a spike
_NORMAL = 1.4826 / math.sqrt(2)  # the deviation of normal noise over the median difference between two values of it
_LEAST_NOISE = 0.02  # of the median: a loss that hardly varies may still rise by a little


class Spikes:
    """Tells which values lie far above those before them.

    A spike is a value of more than `deviations` deviations above the median of the last `window` values. The deviation
    is that of normal noise whose values differ from the next as these do, in the median: so neither a spike among them
    changes it, nor a loss that falls. Values that stay high become the ordinary ones after half a window.
    """

    def __init__(self, *, deviations: float, window: int):
        self._deviations = deviations
        self._values: deque[float] = deque(maxlen=window)

    def limit(self) -> float:
        """The value above which the next one is a spike; infinity before FEWEST values."""
        if len(self._values) < FEWEST or not self._deviations:
            return math.inf
        middle = median(self._values)
        noise = _NORMAL * median(abs(value - next_one) for value, next_one in pairwise(self._values))
        return middle + self._deviations * max(noise, _LEAST_NOISE * abs(middle))

    def take(self, value: float) -> bool:
        """Whether this value is a spike; one that is not finite is none, and is forgotten."""
        if not math.isfinite(value):
            return False
        is_spike = value > self.limit()
        self._values.append(value)
        return is_spike


class Episode:
    """Which records in a row are told of: the 1st, 2nd, 4th, 8th, … that is out of the ordinary, and the end.

    So what lasts is told of in full, in few alerts.
    """

    def __init__(self) -> None:
        self.length = 0  # records so far
        self._told = 0

    def go_on(self) -> bool:
        """One more record is out of the ordinary; whether to tell."""
        self.length += 1
        is_due = self.length & (self.length - 1) == 0
        self._told = self.length if is_due else self._told
        return is_due

    def end(self) -> bool:
        """The record is an ordinary one; whether some before it have not been told of."""
        is_due = self._told < self.length
        self.length = self._told = 0
        return is_due
