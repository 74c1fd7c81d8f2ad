"""Warnings of a run: spikes of the loss, gradients that are not finite, ranks waiting for data.

Steps and records -> [alerts] -> entries of a record, each with packs, samples, and the setting to skip the packs.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from ...errors import LmmsStreamError
from ...loader.loader import PackedLoader
from ...plan.cursor import Cursor
from ...plan.source_ranges import SourceRange
from ...types import Batch
from ..run.distributed import from_rank_0
from ..run.settings import TrainConfig

ALERTS = "alerts"  # the key of a record
WINDOW = 100  # records to compare a loss with
MAX_SAMPLES = 1000  # maximum samples of an alert per rank
_SHOWN = 10  # samples, and ranges of packs, in the message
Kind = Literal["loss_spike", "gradient_not_finite", "waiting_for_data"]
SampleIds = Callable[[Sequence[tuple[str, int]]], list[Any]]  # this rank's (source, sample id) -> those of all ranks

logger = logging.getLogger("lmms_stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRange:
    """Steps [first, last] of a run, with this rank's samples.

    read: [first, stop) in the loader's count of steps, skipped steps included. before: the loader's cursor at or before
    the first step, None in lanes. samples: at most MAX_SAMPLES of num_samples.
    """

    first: int
    last: int
    read: tuple[int, int]
    before: Cursor | None
    samples: tuple[tuple[str, int], ...]
    num_samples: int

    def joined(self, later: StepRange) -> StepRange:
        """Return these steps joined with later steps."""
        return dataclasses.replace(
            self,
            last=later.last,
            read=(self.read[0], later.read[1]),
            samples=self.samples + later.samples[: MAX_SAMPLES - len(self.samples)],
            num_samples=self.num_samples + later.num_samples,
        )


def ids_on_host(batches: Sequence[Batch], *, most: int | None = None) -> list[tuple[str, int]]:
    """Return the sources and ids of the samples of batches on the CPU. most: of the first samples only."""
    return [(batch.source, number) for batch in batches for number in batch.sample_ids[:most].tolist()][:most]


class Alerts:
    """Collects the steps between records, and returns the alerts of a record; all ranks make the same calls.

    sample_ids: gathers sample ids of all ranks; called only for an alert.
    """

    def __init__(self, config: TrainConfig, loader: PackedLoader, *, sample_ids: SampleIds):
        self._config, self._loader, self._sample_ids = config, loader, sample_ids
        self._spikes = Spikes(deviations=config.alerts.spike, window=WINDOW)
        self._waits: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # seconds waited, and of records
        self._window: StepRange | None = None  # steps after the last record
        self._latest: StepRange | None = None  # the latest step
        self._not_finite: StepRange | None = None  # from the first to the last of these steps without an update
        self._episodes: dict[Kind, Episode] = {}
        self._told: dict[Kind, StepRange] = {}  # of open episodes
        self._cursor = self._cursor_now()

    def end_step(self, batches: Sequence[Batch], *, step: int) -> None:
        """Add a finished step with this rank's batches. step: number from 1."""
        read = self._loader.step
        samples = tuple(ids_on_host(batches, most=MAX_SAMPLES))
        done = StepRange(
            first=step, last=step, read=(read - 1, read), before=self._cursor, samples=samples,
            num_samples=sum(len(batch.sample_ids) for batch in batches),
        )  # fmt: skip
        self._cursor = self._cursor_now()
        self._window = done if self._window is None else self._window.joined(done)
        self._latest = done

    def end_reading(self, grad_norm: float) -> None:
        """Add the gradient norm of the latest step."""
        if (latest := self._latest) is not None and not math.isfinite(grad_norm):
            self._not_finite = latest if self._not_finite is None else self._not_finite.joined(latest)

    def of(self, record: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
        """Return the alerts of a record, to add to the record; {} without alerts.

        All ranks get the same alerts, except for waiting: each rank measures waiting with its own clock.
        """
        window, not_finite, self._window, self._not_finite = self._window, self._not_finite, None, None
        limit = self._spikes.limit()
        is_spike = self._spikes.take(record["loss"])
        found = [
            self._of_steps("gradient_not_finite", not_finite, "no update was made: the gradients are not finite"),
            self._of_steps(
                "loss_spike",
                window if is_spike else None,
                f"the loss is a spike: {record['loss']:.4g}, and up to {limit:.4g} was expected"
                f" (alerts.spike {self._config.alerts.spike:g})",
            ),
            self._of_waiting(record),
        ]
        alerts = [alert for alert in found if alert is not None]
        return {ALERTS: alerts} if alerts else {}

    def _of_steps(self, kind: Kind, steps: StepRange | None, what: str) -> dict[str, Any] | None:
        """Return the alert of some steps, or, for None, the end of an earlier alert."""
        episode = self._episodes.setdefault(kind, Episode())
        if steps is None:
            told = self._told.pop(kind, None)
            if not episode.end():
                return None
            steps, what = told, f"{_NAMES[kind]}, now over"
        else:
            steps = self._told[kind].joined(steps) if kind in self._told else steps
            self._told[kind] = steps
            if not episode.go_on():
                return None
        assert steps is not None
        return self._alert(kind, steps, what)

    def _alert(self, kind: Kind, steps: StepRange, what: str) -> dict[str, Any]:
        ids = self._sample_ids(steps.samples)
        rows = rows_of(ids[:_SHOWN], self._loader)
        packs = self._packs(steps)
        at = f"step {steps.first}" if steps.first == steps.last else f"steps {steps.first} to {steps.last}"
        message = f"{at}: {what}. {_packs_and_samples(packs, ids)}"
        message += f", which were made of {', '.join(rows)}{', …' if len(ids) > _SHOWN else ''}" if rows else ""
        alert: dict[str, Any] = {"kind": kind, "first_step": steps.first, "last_step": steps.last}
        if packs:
            skipped = [*map(list, self._config.skip_steps), list(steps.read)]
            message += (
                f". To pass these packs over, resume from a checkpoint before step {steps.first} with "
                f"train: {{skip_steps: {skipped}}}"
            )
            alert |= {"packs": packs, "skip_steps": skipped}
        if rows:
            alert["rows"] = rows
        return alert | {"sample_ids": ids, "message": message}

    def _packs(self, steps: StepRange) -> list[dict[str, Any]]:
        """Return the packs of steps, by source and epoch; [] in lanes: packs of lanes have no numbers."""
        if steps.before is None:
            return []
        mixture, global_batch = self._loader.mixture, self._loader.global_batch
        at = mixture.skip(steps.before, steps.read[0] - steps.before.step, global_batch=global_batch)
        read: list[SourceRange] = []
        while at.step < steps.read[1]:
            step = mixture.step(at, global_batch=global_batch)
            read += step.ranges
            at = step.after
        found: list[dict[str, Any]] = []
        for each in sorted(read):
            before = found[-1] if found else {}
            if (before.get("source"), before.get("epoch"), before.get("stop")) == each[:3]:
                before["stop"] = each.stop
            else:
                found.append(each._asdict())
        return found

    def _of_waiting(self, record: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the alert of waiting for data over the last records, without the slowest, often the first."""
        self._waits.append((record["data/wait_share"] * record["seconds"], record["seconds"]))
        waited, seconds = map(sum, zip(*sorted(self._waits)[:-1], strict=True)) if len(self._waits) > 1 else (0.0, 1.0)
        episode = self._episodes.setdefault("waiting_for_data", Episode())
        if len(self._waits) < FEWEST or waited <= self._config.alerts.wait_share * seconds:
            episode.end()
            return None
        if not episode.go_on():
            return None
        message = (
            f"step {record['step']}: ranks waited for data {waited / seconds:.0%} of the time of the last "
            f"{len(self._waits)} records (alerts.wait_share {self._config.alerts.wait_share:g}): raise "
            f"train.num_workers (now {self._config.num_workers}), or see data/downloaded_mb_per_s"
        )
        return {
            "kind": "waiting_for_data", "first_step": record["step"], "last_step": record["step"], "message": message
        }  # fmt: skip

    def _cursor_now(self) -> Cursor | None:
        return None if self._loader.state_is_per_rank else self._loader.cursor


_NAMES: dict[Kind, str] = {"loss_spike": "a spike of the loss", "gradient_not_finite": "gradients that were not finite"}


def tell(alerts: Sequence[Mapping[str, Any]]) -> None:
    """Log the alerts of a record as warnings."""
    for alert in alerts:
        logger.warning("%s", alert["message"])


def _packs_and_samples(packs: Sequence[Mapping[str, Any]], ids: Sequence[Any]) -> str:
    """Return packs and samples in words.

    >>> _packs_and_samples([{"source": "chats", "epoch": 0, "first": 8, "stop": 16}], [3, 5])
    'It read packs 8 to 15 of epoch 0 of chats; samples 3, 5'
    >>> apart = [{"source": "chats", "epoch": 0, "first": 2 * at, "stop": 2 * at + 1} for at in range(512)]
    >>> _packs_and_samples(apart, [3]).endswith("18 to 18 of epoch 0 of chats and 502 other ranges; samples 3")
    True
    """
    read = [
        f"{each['first']} to {each['stop'] - 1} of epoch {each['epoch']} of {each['source']}" for each in packs[:_SHOWN]
    ]
    more = f" and {len(packs) - _SHOWN} other ranges" if len(packs) > _SHOWN else ""  # of windows, see balance
    named = ", ".join(map(str, ids[:_SHOWN])) + (", …" if len(ids) > _SHOWN else "")
    return f"It read packs {' and '.join(read)}{more}; samples {named}" if read else f"It read samples {named}"


# Detection of unusual figures in records; arithmetic only.

FEWEST = 20  # records before the first possible spike
_NORMAL = 1.4826 / math.sqrt(2)  # deviation of normal noise over the median difference between two values
_LEAST_NOISE = 0.02  # share of the median: a nearly constant loss may rise by a little


class Spikes:
    """Finds values far above the previous values.

    A spike is a value more than `deviations` deviations above the median of the last `window` values. The deviation is
    estimated from the median difference of neighbours, as of normal noise: neither a spike nor a falling loss changes
    this estimate. Values that stay high become normal after half a window.
    """

    def __init__(self, *, deviations: float, window: int):
        self._deviations = deviations
        self._values: deque[float] = deque(maxlen=window)

    def limit(self) -> float:
        """Return the value above which the next value is a spike; infinity before FEWEST values."""
        if len(self._values) < FEWEST or not self._deviations:
            return math.inf
        middle = median(self._values)
        noise = _NORMAL * median(abs(value - next_one) for value, next_one in pairwise(self._values))
        return middle + self._deviations * max(noise, _LEAST_NOISE * abs(middle))

    def take(self, value: float) -> bool:
        """Add a value; return whether the value is a spike. Values that are not finite are ignored."""
        if not math.isfinite(value):
            return False
        is_spike = value > self.limit()
        self._values.append(value)
        return is_spike


class Episode:
    """Consecutive unusual records: alerts come at the 1st, 2nd, 4th, 8th, … record, and at the end.

    A long episode is reported whole, in few alerts.
    """

    def __init__(self) -> None:
        self.length = 0  # records so far
        self._told = 0

    def go_on(self) -> bool:
        """Add an unusual record; return whether an alert is due."""
        self.length += 1
        is_due = self.length & (self.length - 1) == 0
        self._told = self.length if is_due else self._told
        return is_due

    def end(self) -> bool:
        """Add an ordinary record; return whether earlier records are not reported yet."""
        is_due = self._told < self.length
        self.length = self._told = 0
        return is_due


# Ids of samples -> source rows of the user's files, for alerts.


def rows_of(ids: Sequence[Any], loader: PackedLoader) -> list[str]:
    """Return `file:row` of each sample with a known source row; all ranks call this, and rank 0 reads a few bytes.

    ids: in the form of records, with the source if a run has several sources.
    """
    return from_rank_0(_read(ids, loader) if loader.world.rank == 0 else [])


def _read(ids: Sequence[Any], loader: PackedLoader) -> list[str]:
    try:
        found = [_origin(str(each), loader) for each in ids]
    except (LmmsStreamError, IndexError) as error:
        logger.warning("the rows that samples were made of cannot be told: %s", error)
        return []
    return [row for row in found if row is not None]


def _origin(sample: str, loader: PackedLoader) -> str | None:
    source, _, number = sample.rpartition(":")
    row = loader.origin_of(source or loader.sources[0], int(number))
    return None if row is None else str(row)
