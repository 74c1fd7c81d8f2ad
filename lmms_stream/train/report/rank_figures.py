"""Figures of this rank since its start: steps, tokens, waiting, and the counts of its loader."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from ...loader.counts import LoaderCounts
from ...loader.loader import PackedLoader

WAITS = 1000  # number of last steps for quantiles of waiting times
QUANTILES = (0.5, 0.95, 0.99)


class RankFigures(NamedTuple):
    """Figures of a rank since its start. waits_s: QUANTILES of the waiting times of the last WAITS steps."""

    num_steps: int
    num_tokens: int
    num_loss_tokens: int
    wait_s: float
    waits_s: tuple[float, ...]
    loader: LoaderCounts


class RankMeter:
    """Adds up the steps of this rank; `figures` may be called in any thread."""

    def __init__(self, loader: PackedLoader):
        self._loader = loader
        self._num_steps = 0
        self._num_tokens = self._num_loss_tokens = self._wait_s = 0.0
        self._waits: deque[float] = deque(maxlen=WAITS)

    def add(self, num_tokens: float, num_loss_tokens: float, *, wait_s: float) -> None:
        """Add the counts of a step of this rank."""
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._num_loss_tokens += num_loss_tokens
        self._wait_s += wait_s
        self._waits.append(wait_s)

    def figures(self) -> RankFigures:
        waits = [*self._waits] or [0.0]
        return RankFigures(
            self._num_steps,
            int(self._num_tokens),
            int(self._num_loss_tokens),
            self._wait_s,
            tuple(np.quantile(waits, QUANTILES).tolist()),
            self._loader.counts,
        )
