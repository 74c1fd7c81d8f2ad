"""Phases of a rank's steps, for traces and for reports of a stalled run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from torch.autograd.profiler import record_function

T = TypeVar("T")
BETWEEN = "between"
SAID = {  # name of a phase in traces -> what a rank does, in a sentence
    BETWEEN: "between two phases",
    "data": "waiting for data",
    "counts": "adding up the counts of all ranks",
    "reference": "running its reference",
    "forward": "running forward",
    "backward": "running backward",
    "grad_norm": "clipping gradients",
    "optimizer": "updating parameters",
    "evaluate": "evaluating",
    "save": "saving",
    "build": "building the model",
    "resume": "resuming",
    "last_save": "waiting for the last checkpoint",
}
_OF_NO_STEP = {"build", "resume", "last_save"}


class Phase(NamedTuple):
    """Phase of a rank since a moment of its monotonic clock.

    number: phases begun or left before. Ranks of a run go through the same phases in the same order: the rank with the
    lowest number is behind. step: finished steps.
    """

    name: str = BETWEEN
    step: int = 0
    number: int = 0
    since_s: float = 0.0

    @property
    def said(self) -> str:
        """Return the phase as part of a sentence.

        >>> Phase("save", step=3).said
        'saving in step 4'
        """
        said = SAID.get(self.name, self.name)
        return said if self.name in _OF_NO_STEP else f"{said} in step {self.step + 1}"


class Phases:
    """Current phase of this process, for watching threads. A phase that raises is not left."""

    def __init__(self) -> None:
        self.step = 0  # finished steps
        self.now = Phase(since_s=time.monotonic())

    @contextmanager
    def doing(self, name: str) -> Iterator[None]:
        """Be in the phase `name` (a key of SAID) inside the context."""
        before = self.now.name
        self._begin(name)
        with record_function(name):
            yield
        self._begin(before)

    def of_each(self, name: str, values: Iterable[T]) -> Iterator[T]:
        """Yield the values, waiting for each in this phase. No value is None."""
        waiting = iter(values)
        while True:
            with self.doing(name):
                value: T | None = next(waiting, None)
            if value is None:
                return
            yield value

    def _begin(self, name: str) -> None:
        self.now = Phase(name, self.step, self.now.number + 1, time.monotonic())
