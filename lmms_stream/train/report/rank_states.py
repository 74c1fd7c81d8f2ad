"""What the ranks of a run are doing, as each can know it of the others, and which of them the others wait for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from ...types import World
from ..run.phases import Phase

_KEY = "lmms_stream/phase"
_LOOKED_AT = 12  # innermost frames among which one of torch.distributed says that a rank waits in a collective
_MOST_NAMED = 8
_NOT_NAMED = ("/torch/", "<")  # parts of paths: torch's own functions, and those that have no file
_STANDARD_LIBRARY = str(Path(threading.__file__).parent)


class RankState(NamedTuple):
    """The phase that a rank is in, and where it is in it.

    beat: how often it told. at: the function that it is in, where it has been there for long. is_in_collective: whether
    it waits there for other ranks, as far as its stack tells. ended: the error that ended it.
    """

    number: int
    said: str
    stands_s: float
    at: str = ""
    is_in_collective: bool = False
    beat: int = 0
    ended: str = ""


class RankStates:
    """The states of all ranks in a store. A store that does not answer is an empty one."""

    def __init__(self, store: Any, world: World):  # a torch.distributed.Store, which has no types
        self._store, self._world = store, world
        self._beat = 0

    def publish(self, state: RankState) -> None:
        """Tell the others this rank's state."""
        self._beat += 1
        try:
            self._store.set(f"{_KEY}/{self._world.rank}", json.dumps(state._replace(beat=self._beat)))
        except RuntimeError:  # dist.DistError among them: the process that served it has ended
            return

    def read(self) -> list[RankState | None]:
        """Of each rank; None for one that has told nothing."""
        keys = [f"{_KEY}/{rank}" for rank in range(self._world.world_size)]
        try:
            told = [key for key in keys if self._store.check([key])]
            values = self._store.multi_get(told) if told else []
        except RuntimeError:
            return [None] * len(keys)
        found = {key: RankState(*json.loads(value)) for key, value in zip(told, values, strict=True)}
        return [found.get(key) for key in keys]


class Blame(NamedTuple):
    """Which ranks the others wait for. first_to_tell: the lowest rank that waits, which tells it for all."""

    sentence: str
    first_to_tell: int


def state_of(phase: Phase, *, frame: FrameType | None) -> RankState:
    """frame: the innermost of the main thread, where it is to be looked at."""
    at, is_in_collective = "", False
    depth = 0
    while frame is not None and not (at and depth >= _LOOKED_AT):
        file = frame.f_code.co_filename
        if depth < _LOOKED_AT:
            is_in_collective |= "/torch/distributed/" in file
        if not at and not _is_library(file):
            at = f"{frame.f_code.co_qualname} ({file}:{frame.f_lineno})"
        frame, depth = frame.f_back, depth + 1
    stands_s = time.monotonic() - phase.since_s
    return RankState(phase.number, phase.said, stands_s, at=at, is_in_collective=is_in_collective)


def _is_library(file: str) -> bool:
    of_python = file.startswith(_STANDARD_LIBRARY) and "-packages" not in file
    return of_python or any(part in file for part in _NOT_NAMED)


def verdict_of(states: Sequence[RankState | None], early: Sequence[RankState | None], *, rank: int) -> Blame:
    """early: the states some beats before; one whose state is the same since then does not answer."""
    silent = [other for other, state in enumerate(states) if _is_silent(state, early, other, rank)]
    answering = {other: state for other, state in enumerate(states) if state is not None and other not in silent}
    least = min((state.number for state in answering.values()), default=0)
    most = max((state.number for state in answering.values()), default=0)
    behind = [other for other, state in answering.items() if state.number == least]
    if least == most:
        behind = [other for other in behind if not answering[other].is_in_collective]
    if len(behind) == len(answering) and not silent:
        behind = []
    named = [_silent_sentence(other, states[other]) for other in silent]
    named += [_behind_sentence(other, answering[other]) for other in behind if not silent]
    unknown = "all ranks wait alike, and which of them the others wait for is in their stacks"
    waiting = [other for other in answering if other not in behind] or list(answering) or [rank]
    more = f" (and {len(named) - _MOST_NAMED} ranks more)" if len(named) > _MOST_NAMED else ""
    return Blame("; ".join(named[:_MOST_NAMED]) + more or unknown, min(waiting))


def _is_silent(state: RankState | None, early: Sequence[RankState | None], other: int, rank: int) -> bool:
    if other == rank or not early:
        return False
    before = early[other]
    return state is not None and before is not None and state.beat == before.beat and not state.ended


def _silent_sentence(rank: int, state: RankState | None) -> str:
    assert state is not None
    return (
        f"rank {rank} does not answer (it was stopped, is dead, or C code keeps Python's lock); when it was last heard "
        f"of, it was {state.said}"
    )


def _behind_sentence(rank: int, state: RankState) -> str:
    if state.ended:
        return f"rank {rank} ended with {state.ended}"
    where = f", in {state.at}" if state.at else ""
    return f"rank {rank} did not come: it has been {state.said} for {state.stands_s:.0f} s{where}"
