"""Reports of a run that stands still: stacks of the ranks, and the ranks that block the rest.

A thread of each rank regularly writes the rank's phase to the store of the process group. Steps only set an attribute,
without a collective.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, NamedTuple

import torch.distributed as dist

from ...processes.family import catches, descendants
from ...signals import STACKS_SIGNAL
from ...storage.retry import start_thread
from ...types import World
from ..run.distributed import STACKS, flight_recorder_files, is_lost_rank
from ..run.phases import Phase, Phases

SHARE = 0.75  # share of timeout_s without progress after which a rank stands still, and its stacks are written
BEATS = 20  # reports within timeout_s
LONGEST_BEAT_S = 10.0
READ_S = 5.0  # limit to read other ranks' states: their store may be gone
logger = logging.getLogger("lmms_stream")
_READS = {"data", "evaluate", "measure"}  # phases that wait for loader workers
_armed: list[Standstill] = []  # at most one: its stacks are written even if Python does not run


class Standstill:
    """Context to watch whether this rank moves from phase to phase.

    After SHARE of timeout_s, writes the stacks of all threads to output_dir/stacks/rank-N.txt, and reports ranks that
    are behind or do not answer. Stacks are also written while C code holds Python's lock. An error of torch about
    a missing rank gets this report, or the end of the other rank, as a note. A run of a single rank is not watched.
    """

    def __init__(self, phases: Phases, *, output_dir: Path, world: World, timeout_s: float):
        self._phases, self._world = phases, world
        self._limit_s, self._beat_s = SHARE * timeout_s, min(timeout_s / BEATS, LONGEST_BEAT_S)
        self._path = output_dir / STACKS / f"rank-{world.rank}.txt"
        self._file: IO[str] | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._moved = -1  # number of the last seen phase
        self._early: list[RankState | None] = []  # states of all ranks after half of the time
        self._told_at = -1  # number of the reported phase
        self._text = ""  # its report

    def __enter__(self) -> Standstill:
        if self._world.world_size > 1:
            self._states = RankStates(own_store(self._beat_s), self._world)
            self._main = threading.get_ident()
            self._open()
            self._states.publish(state_of(self._phases.now, frame=None))
            self._arm()
            self._thread = start_thread(self._watch, name="lmms-standstill")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._thread is None:
            return
        self._ended.set()
        self._disarm()
        self._thread.join(READ_S)  # the store may not answer
        is_lost = isinstance(error, RuntimeError) and is_lost_rank(error)
        if error is not None and is_lost:
            if self._told_at != self._phases.now.number:
                self._text = ""
            within(READ_S, self._add_ended)
            if self._text:
                error.add_note(self._text)
        else:
            within(READ_S, partial(self._publish_end, error))
        if self._file is not None:
            self._file.close()
            with suppress(OSError):  # other ranks have files in the folder
                if not self._path.stat().st_size:
                    self._path.unlink()
                    self._path.parent.rmdir()

    def _open(self) -> None:
        """Open the file of stacks ahead of time: opening is impossible while Python does not run."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a")  # keep stacks of earlier runs
        except OSError as error:
            logger.warning("%s: stacks of a rank that stands still go to standard error (%s)", self._path, error)

    def _arm(self) -> None:
        """Let a C thread write the stacks, unless this method is called again in time."""
        _armed[:] = [self]
        # Two beats later than the Python thread.
        faulthandler.dump_traceback_later(self._limit_s + 2 * self._beat_s, file=self._file or sys.stderr)

    def _disarm(self) -> None:
        _armed.clear()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._ended.wait(self._beat_s):
            phase = self._phases.now
            stands_s = time.monotonic() - phase.since_s
            if phase.number != self._moved:
                self._moved, self._early = phase.number, []
                self._arm()
            is_slow = stands_s >= self._limit_s / 2
            frame = sys._current_frames().get(self._main) if is_slow else None
            self._states.publish(state_of(phase, frame=frame))
            if is_slow and not self._early:
                self._early = self._states.read()
            if stands_s >= self._limit_s and self._told_at != phase.number:
                self._told_at = phase.number
                self._write_stacks()
                self._tell(stands_s)

    def _write_stacks(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        file = self._file or sys.stderr
        phase = self._phases.now
        stands_s = time.monotonic() - phase.since_s
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        file.write(f"rank {self._world.rank}, {phase.said}, for {stands_s:.0f} s, at {now} UTC\n")
        workers = [pid for pid in descendants(os.getpid()) if phase.name in _READS and catches(pid, STACKS_SIGNAL)]
        if workers:
            file.write(f"its loader workers write their stacks to standard error: {', '.join(map(str, workers))}\n")
        file.flush()
        faulthandler.dump_traceback(file)
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)

    def _tell(self, stands_s: float) -> None:
        states = self._states.read()
        found = verdict_of(states, self._early, rank=self._world.rank)
        self._text = (
            f"rank {self._world.rank} has not moved for {stands_s:.0f} s, {self._phases.now.said}: {found.sentence}. "
            f"The stacks of each rank are in {self._path.parent}{flight_recorder_files()}"
        )
        if found.first_to_tell == self._world.rank:
            logger.error("%s", self._text)

    def _add_ended(self) -> None:
        """Add the errors of ended ranks to the report."""
        ended = [
            f"rank {rank} ended with {state.ended}"
            for rank, state in enumerate(self._states.read())
            if state is not None and state.ended
        ]
        self._text = ". ".join([*ended, *([self._text] if self._text else [])])

    def _publish_end(self, error: BaseException | None) -> None:
        ended = "" if error is None else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self._states.publish(state_of(self._phases.now, frame=None)._replace(ended=ended))


def within(seconds: float, do: Any) -> None:
    """Call a function, and return after some seconds even if the function has not returned."""
    start_thread(do, name="lmms-standstill-end").join(seconds)


def own_store(timeout_s: float) -> Any:
    """Return this thread's own connection to the store of the process group."""
    store: Any = dist.distributed_c10d._get_default_store()
    own = store.clone() if hasattr(store, "clone") else store
    own.set_timeout(timedelta(seconds=max(1.0, timeout_s)))
    return own


def _disarm_before_fork() -> None:
    """Cancel the C thread before a fork: at exit, the child would wait for a thread missing in the child."""
    if _armed:
        faulthandler.cancel_dump_traceback_later()


def _arm_again() -> None:
    for each in _armed:
        each._arm()


os.register_at_fork(before=_disarm_before_fork, after_in_parent=_arm_again, after_in_child=_armed.clear)


# The reported work of each rank, and the ranks that others wait for.

_KEY = "lmms_stream/phase"
_LOOKED_AT = 12  # innermost frames to search for torch.distributed, the sign of a collective
_MOST_NAMED = 8
_NOT_NAMED = ("/torch/", "<")  # parts of paths: functions of torch, and functions without a file
_STANDARD_LIBRARY = str(Path(threading.__file__).parent)


class RankState(NamedTuple):
    """The phase and the function of a rank.

    beat: number of the report. at: the function, for a slow phase. is_in_collective: whether the stack shows a wait for
    other ranks. ended: error at the end of the rank.
    """

    number: int
    said: str
    stands_s: float
    at: str = ""
    is_in_collective: bool = False
    beat: int = 0
    ended: str = ""


class RankStates:
    """The states of all ranks in a store. A store without an answer counts as empty."""

    def __init__(self, store: Any, world: World):  # a torch.distributed.Store, which has no types
        self._store, self._world = store, world
        self._beat = 0

    def publish(self, state: RankState) -> None:
        """Write this rank's state for the other ranks."""
        self._beat += 1
        try:
            self._store.set(f"{_KEY}/{self._world.rank}", json.dumps(state._replace(beat=self._beat)))
        except RuntimeError:  # also dist.DistError: the serving process has ended
            return

    def read(self) -> list[RankState | None]:
        """Return the state of each rank; None for a rank without a report."""
        keys = [f"{_KEY}/{rank}" for rank in range(self._world.world_size)]
        try:
            told = [key for key in keys if self._store.check([key])]
            values = self._store.multi_get(told) if told else []
        except RuntimeError:
            return [None] * len(keys)
        found = {key: RankState(*json.loads(value)) for key, value in zip(told, values, strict=True)}
        return [found.get(key) for key in keys]


class Blame(NamedTuple):
    """Ranks that block the rest. first_to_tell: the lowest waiting rank; it reports for all ranks."""

    sentence: str
    first_to_tell: int


def state_of(phase: Phase, *, frame: FrameType | None) -> RankState:
    """Return the state of a phase. frame: innermost frame of the main thread; None to leave out the function."""
    at, is_in_collective = "", False
    depth = 0
    while frame is not None and not (at and depth >= _LOOKED_AT):
        file = frame.f_code.co_filename
        if depth < _LOOKED_AT:
            is_in_collective |= "/torch/distributed/" in file
        of_python = file.startswith(_STANDARD_LIBRARY) and "-packages" not in file
        if not at and not of_python and not any(part in file for part in _NOT_NAMED):
            at = f"{frame.f_code.co_qualname} ({file}:{frame.f_lineno})"
        frame, depth = frame.f_back, depth + 1
    stands_s = time.monotonic() - phase.since_s
    return RankState(phase.number, phase.said, stands_s, at=at, is_in_collective=is_in_collective)


def verdict_of(states: Sequence[RankState | None], early: Sequence[RankState | None], *, rank: int) -> Blame:
    """Return the ranks that block the rest. early: states some beats earlier; a rank with an equal state is silent."""
    silent = [other for other, state in enumerate(states) if _is_silent(state, early, other, rank)]
    answering = {other: state for other, state in enumerate(states) if state is not None and other not in silent}
    least = min((state.number for state in answering.values()), default=0)
    most = max((state.number for state in answering.values()), default=0)
    behind = [other for other, state in answering.items() if state.number == least]
    if least == most:
        behind = [other for other in behind if not answering[other].is_in_collective]
    if len(behind) == len(answering) and not silent:
        behind = []
    named = [
        f"rank {other} does not answer (it was stopped, is dead, or C code keeps Python's lock); when it was last "
        f"heard of, it was {state.said}"
        for other in silent
        if (state := states[other]) is not None
    ]
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


def _behind_sentence(rank: int, state: RankState) -> str:
    if state.ended:
        return f"rank {rank} ended with {state.ended}"
    where = f", in {state.at}" if state.at else ""
    return f"rank {rank} did not come: it has been {state.said} for {state.stands_s:.0f} s{where}"
