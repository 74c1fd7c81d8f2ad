"""Phases of a rank's work, for traces and for reports of a stalled run; votes to stop within long phases."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

import torch.distributed as dist
from torch.autograd.profiler import record_function

from ...errors import TrainingError
from .distributed import gather

T = TypeVar("T")
LINE_S = 60.0  # seconds between two lines about a long phase
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
    "prove": "proving that the model keeps samples apart",
    "measure": "measuring the reference",
    "resume": "resuming",
    "last_save": "waiting for the last checkpoint",
}
_OF_NO_STEP = {"build", "prove", "measure", "resume", "last_save"}
logger = logging.getLogger("lmms_stream")


class StoppedError(TrainingError):
    """The run was stopped by a signal; its finished steps are saved."""


class Stop(Protocol):
    """Whether this rank received a stop signal."""

    @property
    def is_received(self) -> bool: ...


class Phase(NamedTuple):
    """Phase of a rank since a moment of its monotonic clock.

    number: phases begun or left before, and their finished parts. Ranks of a run go through the same phases in the same
    order: the rank with the lowest number is behind. step: finished steps. part: finished parts of the phase.
    """

    name: str = BETWEEN
    step: int = 0
    number: int = 0
    since_s: float = 0.0
    part: int = 0

    @property
    def said(self) -> str:
        """Return the phase as part of a sentence.

        >>> Phase("save", step=3).said
        'saving in step 4'
        >>> Phase("evaluate", step=3, part=7).said
        'evaluating (part 8) in step 4'
        """
        said = SAID.get(self.name, self.name) + (f" (part {self.part + 1})" if self.part else "")
        return said if self.name in _OF_NO_STEP else f"{said} in step {self.step + 1}"


class Phases:
    """Current phase of this process, for watching threads. A phase that raises is not left."""

    def __init__(self) -> None:
        self.step = 0  # finished steps
        self.now = Phase(since_s=time.monotonic())
        self._stop: Stop | None = None

    @contextmanager
    def doing(self, name: str) -> Iterator[None]:
        """Be in the phase `name` (a key of SAID) inside the context."""
        before = self.now
        self._begin(name)
        with record_function(name):
            yield
        self._begin(before.name, part=before.part)

    def of_each(self, name: str, values: Iterable[T]) -> Iterator[T]:
        """Yield the values, waiting for each in this phase. No value is None."""
        waiting = iter(values)
        while True:
            with self.doing(name):
                value: T | None = next(waiting, None)
            if value is None:
                return
            yield value

    @contextmanager
    def until(self, stop: Stop) -> Iterator[None]:
        """Let each vote inside raise StoppedError if any rank has received the signal."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None

    def vote(self) -> None:
        """End a part of a long phase; all ranks call this. Inside `until`, all raise StoppedError together."""
        self._begin(self.now.name, part=self.now.part + 1)
        if self._stop is not None and gather([float(self._stop.is_received)], dist.get_world_size()).any():
            raise StoppedError(
                "told to stop by a signal before the first step of this start: nothing new is to be saved, and the "
                "same command starts again"
            )

    def each_pack(self, packs: Iterable[T], *, num_packs: int, name: str) -> Iterator[T]:
        """Yield the packs of a long phase, with a vote before each, and every LINE_S a line of rank 0 with the name."""
        told_s = time.monotonic()
        for number, pack in enumerate(packs):
            self.vote()
            if time.monotonic() - told_s >= LINE_S and dist.get_rank() == 0:
                told_s = time.monotonic()
                logger.info("%s: %d of %d packs of each rank are done", name, number, num_packs)
            yield pack

    def _begin(self, name: str, *, part: int = 0) -> None:
        self.now = Phase(name, self.step, self.now.number + 1, time.monotonic(), part)
