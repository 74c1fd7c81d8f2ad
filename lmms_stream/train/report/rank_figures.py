"""Figures of this rank since its start, and the slow parts of a run: workers, disks, stores and ranks."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from types import FrameType, TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from ...loader.counts import LoaderCounts, MakeCounts
from ...loader.loader import PackedLoader
from ...storage.retry import start_thread
from ...types import World
from ..run.phases import Phase, Phases
from .standstill import own_store

WINDOW_STEPS = 1000  # number of last steps for quantiles of waiting times
QUANTILES = (0.5, 0.95, 0.99)
Key = TypeVar("Key")
Number = TypeVar("Number", int, float)


class RankFigures(NamedTuple):
    """Figures of a rank since its start. waits_s: QUANTILES of the waiting times of the last WINDOW_STEPS steps.

    doing_s: sampled seconds of waiting for data, waiting for other ranks, and working. slow: kind and name of the slow
    parts of the run now, on rank 0.
    """

    num_steps: int
    num_tokens: int
    num_loss_tokens: int
    wait_s: float
    waits_s: tuple[float, ...]
    loader: LoaderCounts
    doing_s: Mapping[str, float]
    slow: tuple[tuple[str, str], ...]


class RankMeter:
    """Adds up the steps of this rank; `figures` may be called in any thread."""

    def __init__(self, loader: PackedLoader):
        self._loader = loader
        self._num_steps = 0
        self._num_tokens = self._num_loss_tokens = self._wait_s = 0.0
        self._waits: deque[float] = deque(maxlen=WINDOW_STEPS)
        self.doing_s: dict[str, float] = {"data": 0.0, "ranks": 0.0, "work": 0.0}
        self.slow: tuple[tuple[str, str], ...] = ()

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
            dict(self.doing_s),
            self.slow,
        )

    def parts(self, at_s: float) -> PartFigures:
        """Return the figures to compare with other ranks' figures. at_s: of this rank's clock."""
        counts, urls = self._loader.counts, self._loader.urls
        made = [{source: each.with_begun for source, each in by_source.items()} for by_source in counts.made]
        stores: dict[str, list[int]] = {}
        for source, fetched in counts.fetched.items():
            if "://" in urls[source]:
                more = fetched.num_requests, fetched.num_retries, fetched.throttled_ms
                _add(stores, "/".join(urls[source].split("/")[:3]), more)
        return PartFigures(
            node=os.uname().nodename,
            at_s=at_s,
            num_steps=self._num_steps,
            doing_s=dict(self.doing_s),
            workers=[_worker(by_source, self._loader) for by_source in made[:-1]],
            reads={
                source: _sums([each[source] for each in made], "num_samples", "reading_us", "making_us")
                for source in (made[-1] if made else ())
            },
            stores=stores,
        )


def _worker(by_source: Mapping[str, MakeCounts], loader: PackedLoader) -> list[Any]:
    """Return the packs of a worker, the time of making them, and time and name of its slowest sample."""
    source, slowest = max(by_source.items(), key=lambda each: each[1].slowest_us)
    sums = _sums(by_source.values(), "num_packs", "making_us")
    return [*sums, slowest.slowest_us, loader.name_of(source, slowest.slowest_id)]


def _sums(counts: Iterable[MakeCounts], *names: str) -> list[int]:
    """Return the sums of some counts, by name."""
    rows = [[getattr(each, name) for name in names] for each in counts]
    return [sum(column) for column in zip(*rows, strict=True)] or [0] * len(names)


def _add(totals: dict[Key, list[Number]], key: Key, more: Sequence[Number]) -> None:
    """Add to the sums of a key, which begin at 0."""
    before = totals.get(key)
    totals[key] = list(more) if before is None else [total + each for total, each in zip(before, more, strict=True)]


def _growth(now: Sequence[int], before: Sequence[int] | None) -> Sequence[int]:
    """Return the increase of each sum. before: None for sums that were 0."""
    return now if before is None else [after - each for after, each in zip(now, before, strict=True)]


# Slow parts of a run: workers, disks, stores and ranks that the rest waits for. Figures of ranks -> [slow] -> alerts.

BEAT_S = 1.5  # between two comparisons of the ranks' figures
WINDOW = 3  # beats of a comparison
SAMPLE_S = 0.1  # between two looks at what this rank does
LEAST_WAIT = 0.1  # share of the time that a rank waits, below which nothing is slow
TIMES = 3.0  # a slow worker takes this many times the others' time, a straggling rank waits this many times less
_LEAST_READ_US = 1000  # a sample; reads from a disk that keeps up are shorter
_AGAIN_BEATS, _FORGOTTEN_BEATS = 40, 40  # a lasting slow part is named again after as many, then twice as many
_INNERMOST = 3  # frames to search for a collective
_READS_DEVICE = "/train/run/counts.py"  # where a rank waits for its device, and the device for other ranks
_ASIDE = {"evaluate", "save", "build", "prove", "measure", "resume", "last_save"}  # phases outside of steps
_KEY = "lmms_stream/parts"
SlowKind = Literal["slow_worker", "slow_disk", "throttling_store", "straggling_rank"]
Doing = Literal["data", "ranks", "work"]  # waiting for data, waiting for other ranks, working
logger = logging.getLogger("lmms_stream")


class PartFigures(NamedTuple):
    """Figures of a rank's parts since its start, as JSON values.

    at_s: the rank's clock. doing_s: sampled seconds. workers: of each worker, packs, microseconds of making them, then
    microseconds and name of its slowest sample of the last minute. reads: by source, samples, and microseconds of
    reading and of making. stores: by URL, requests, retries, throttled milliseconds.
    """

    node: str
    at_s: float
    num_steps: int
    doing_s: dict[str, float]
    workers: list[list[Any]]
    reads: dict[str, list[int]]
    stores: dict[str, list[int]]


class SlowPart(NamedTuple):
    kind: SlowKind
    part: str
    message: str


Span = tuple[PartFigures, PartFigures]  # of a rank, at the begin and the end of a window


def slow_parts(spans: Sequence[Span]) -> list[SlowPart]:
    """Return the slow parts among the figures of all ranks, in order of ranks."""
    return [*_slow_workers(spans), *_slow_disks(spans), *_throttling_stores(spans), *_straggling_ranks(spans)]


def _share(span: Span, doing: Doing) -> float:
    first, last = span
    return (last.doing_s[doing] - first.doing_s[doing]) / max(1e-9, last.at_s - first.at_s)


def _slow_workers(spans: Sequence[Span]) -> Iterator[SlowPart]:
    found = []
    for rank, (first, last) in enumerate(spans):
        for worker, (was, now) in enumerate(zip(first.workers, last.workers, strict=False)):
            num_packs, making_us = now[0] - was[0], now[1] - was[1]
            since_start = now[1] / max(1, now[0])
            recent = making_us / max(1, num_packs)
            is_busy = making_us >= 0.5e6 * (last.at_s - first.at_s)
            found.append((rank, worker, recent if is_busy else 0.0, since_start))
    for rank, worker, recent, _ in found:
        others = [mean for r, w, _, mean in found if (r, w) != (rank, worker) and mean]
        if others and recent > TIMES * median(others) and _share(spans[rank], "data") >= LEAST_WAIT:
            *_, slowest, name = spans[rank][1].workers[worker]
            yield SlowPart(
                "slow_worker",
                f"worker {worker} of rank {rank}",
                f"worker {worker} of rank {rank} ({spans[rank][1].node}) takes {recent / 1e6:.2g} s a pack, and the "
                f"median of the other workers is {median(others) / 1e6:.2g} s: the rank waits for data "
                f"{_share(spans[rank], 'data'):.0%} of the time. Its slowest sample, {name}, took {slowest / 1e6:.2g} "
                "s: look at it with lmms-stream inspect, or for other processes on the node's CPUs",
            )


def _slow_disks(spans: Sequence[Span]) -> Iterator[SlowPart]:
    totals: dict[tuple[str, str], list[float]] = {}
    waits: dict[tuple[str, str], float] = {}
    for first, last in spans:
        for source, now in last.reads.items():
            key = last.node, source
            _add(totals, key, [*_growth(now, first.reads.get(source)), last.at_s - first.at_s])
            waits[key] = max(waits.get(key, 0.0), _share((first, last), "data"))
    per_sample = {key: reading / max(1, num) for key, (num, reading, _, _) in totals.items()}
    for (node, source), (num, reading, making, seconds) in totals.items():
        here = per_sample[node, source]
        is_slow = reading >= max(0.5 * making, 0.25e6 * seconds) and here >= _LEAST_READ_US
        if is_slow and waits[node, source] >= LEAST_WAIT:
            others = [each for key, each in per_sample.items() if key != (node, source)]
            beside = f"the median of other sources and nodes is {median(others) / 1e3:.2g} ms" if others else (
                f"the rest of the work on a sample is {(making - reading) / max(1, num) / 1e3:.2g} ms"
            )  # fmt: skip
            yield SlowPart(
                "slow_disk",
                f"{source} on {node}",
                f"the disk of {source} on {node} takes {here / 1e3:.2g} ms to read a sample, and {beside}: ranks wait "
                f"for data {waits[node, source]:.0%} of the time. Put the dataset's local folder on a faster disk, or "
                "raise train.num_workers if the disk takes more reads at once",
            )


def _throttling_stores(spans: Sequence[Span]) -> Iterator[SlowPart]:
    totals: dict[str, list[float]] = {}
    for first, last in spans:
        for url, now in last.stores.items():
            _add(totals, url, [*_growth(now, first.stores.get(url)), last.at_s - first.at_s])
    for url, (requests, retries, throttled_ms, seconds) in totals.items():
        if throttled_ms / 1000 >= LEAST_WAIT * seconds:
            yield SlowPart(
                "throttling_store",
                url,
                f"the store of {url} throttles: {retries:.0f} of {requests:.0f} requests were repeated, with "
                f"{throttled_ms / 1000:.2g} s of pauses in {seconds / len(spans):.2g} s. Lower the dataset's "
                "fetch.threads, let nodes share their downloads (fetch: {peers: true}), or have the store's limit "
                "raised",
            )


def _straggling_ranks(spans: Sequence[Span]) -> Iterator[SlowPart]:
    waits = [_share(span, "ranks") for span in spans]
    works = [_share(span, "work") for span in spans]
    for rank, (first, last) in enumerate(spans):
        others = [number for number in range(len(spans)) if number != rank]
        if not others or first.num_steps < 1 or works[rank] < _share((first, last), "data"):
            continue
        wait, num_steps = median(waits[each] for each in others), max(1, last.num_steps - first.num_steps)
        if wait < 2 * LEAST_WAIT or waits[rank] > wait / TIMES:
            continue
        seconds = last.at_s - first.at_s
        work = median(works[each] for each in others)
        yield SlowPart(
            "straggling_rank",
            f"rank {rank}",
            f"rank {rank} ({last.node}) works {works[rank] * seconds / num_steps:.2g} s a step, and the median of the "
            f"other ranks is {work * seconds / num_steps:.2g} s: they wait for other ranks {wait:.0%} of the time. "
            "Look for other processes, heat and clocks of its node; a part of the data with more work than others is "
            "in perf/cost_imbalance",
        )


class SlowParts:
    """Context to name slow parts within some seconds, by a thread of each rank that compares the figures of all ranks.

    The thread samples what this rank does, and publishes its figures in the store of the process group. Rank 0 compares
    them, logs, and passes alerts to `tell`. A part is named when it is slow in two comparisons in a row, then again
    after a minute, two minutes, four, ….
    """

    def __init__(self, rank: RankMeter, phases: Phases, *, world: World, tell: Callable[[Mapping[str, Any]], None]):
        self._rank, self._phases, self._world, self._tell = rank, phases, world, tell
        self._ended = threading.Event()
        self._main = threading.get_ident()
        self._begun_s = time.monotonic()
        self._windows: deque[list[PartFigures]] = deque(maxlen=WINDOW + 1)
        self._named: dict[tuple[str, str], _Naming] = {}
        self._store: Any = None
        self._num_beats = 0

    def __enter__(self) -> SlowParts:
        if self._world.world_size > 1:
            self._store = own_store(BEAT_S)
        self._thread = start_thread(self._watch, name="lmms-slow")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(2 * BEAT_S)  # the store may not answer

    def _watch(self) -> None:
        last = beat = time.monotonic()
        while not self._ended.wait(SAMPLE_S):
            now = time.monotonic()
            doing = doing_of(self._phases.now, sys._current_frames().get(self._main))
            if doing is not None:
                self._rank.doing_s[doing] += now - last
            last = now
            if now - beat >= BEAT_S:
                beat = now
                self._compare()

    def _compare(self) -> None:
        self._num_beats += 1
        everyone = self._exchange(self._rank.parts(time.monotonic() - self._begun_s))
        if everyone is None:
            return
        self._windows.append(everyone)
        if len(self._windows) <= WINDOW:
            return
        found = slow_parts([*zip(self._windows[0], everyone, strict=True)])
        self._rank.slow = tuple((each.kind, each.part) for each in found)
        for each in found:
            naming = self._named.setdefault((each.kind, each.part), _Naming())
            if naming.is_due(self._num_beats):
                step = self._phases.step
                logger.warning("step %d: %s", step, each.message)
                message = f"step {step}: {each.message}"
                self._tell({"kind": each.kind, "first_step": step, "last_step": step, "message": message})

    def _exchange(self, mine: PartFigures) -> list[PartFigures] | None:
        """Publish this rank's figures; return those of all ranks on rank 0, when each has published."""
        if self._store is None:
            return [mine]
        try:
            if self._world.rank:
                self._store.set(f"{_KEY}/{self._world.rank}", json.dumps(mine))
                return None
            keys = [f"{_KEY}/{rank}" for rank in range(1, self._world.world_size)]
            if not self._windows and not self._store.check(keys):
                return None
            return [mine, *(PartFigures(*json.loads(each)) for each in self._store.multi_get(keys))]
        except RuntimeError:  # also dist.DistError: the serving process has ended
            return None


class _Naming:
    """When a slow part is named: at the second beat in a row, then at doubling times."""

    def __init__(self) -> None:
        self._seen, self._due, self._pause = -_FORGOTTEN_BEATS, 0, 0

    def is_due(self, beat: int) -> bool:
        is_next, is_new = beat == self._seen + 1, beat - self._seen > _FORGOTTEN_BEATS
        self._seen = beat
        if is_new:
            self._due, self._pause = beat + 1, _AGAIN_BEATS
            return False
        if beat < self._due or not is_next:
            return False
        self._due, self._pause = beat + self._pause, 2 * self._pause
        return True


def doing_of(phase: Phase, frame: FrameType | None) -> Doing | None:
    """Return what a rank does; None outside of steps. frame: innermost frame of the main thread."""
    if phase.name == "data":
        return "data"
    if phase.name in _ASIDE:
        return None
    for _ in range(_INNERMOST):
        if frame is None:
            break
        file = frame.f_code.co_filename
        if ("/torch/distributed/" in file and "/tensor/" not in file) or file.endswith(_READS_DEVICE):
            return "ranks"
        frame = frame.f_back
    return "work"
