"""All reports of a run: records, progress, traces."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch.profiler import profile, schedule

from ...errors import ConfigError, DataError, ObjectMissingError, StorageError
from ...storage.failures import disk_errors
from ...storage.storage import Storage, open_storage
from ...types import World
from ..run.phases import Phases
from ..run.schedules import Schedule
from ..run.settings import Reporter, TrainConfig
from .alerts import ALERTS
from .exporter import check_exporters, exported
from .rank_figures import RankMeter, SlowParts
from .standstill import Standstill
from .train_log import ALERTS_NAME, LOG_NAME, ROOM, RecordFile, history, line_of, read_log, record_of


class RunLog:
    """Takes the steps and records of a run inside `running`: rank 0 writes and shows, every rank traces."""

    def __init__(self, args: TrainConfig, *, world: World):
        check_reporters(args.report_to)
        self._args = args
        self._world = world
        self._reports: list[Report] = []
        self._is_running = False
        self._looked_s, self._requested_ns = time.monotonic(), self._request()  # for traces
        self._alerts: RecordFile | None = None  # of slow parts, opened by the first
        self._unrecorded: deque[Mapping[str, Any]] = deque()  # alerts since the last record
        # Checkpoints elsewhere outlive the output_dir: the log is kept next to them.
        self._kept = KeptLog() if args.checkpoint_dir is not None and world.rank == 0 else None

    def begin(self, step: int, *, url: str) -> None:
        """Continue after a checkpoint (step 0: begin), and restore records kept next to the checkpoints at `url`."""
        if self._kept is not None:
            self._kept.begin(step)
            if step:
                restore_log(open_storage(url), step, Path(self._args.output_dir) / LOG_NAME)

    def part(self, step: int) -> dict[str, bytes]:
        """Return the part of the log to keep next to the checkpoint of a step, by key."""
        return {} if self._kept is None else self._kept.part(step)

    @contextmanager
    def running(
        self,
        schedule: Schedule,
        *,
        step: int,
        position: int,
        rank: RankMeter | None = None,
        phases: Phases | None = None,
    ) -> Iterator[None]:
        """Report the steps inside. step: finished steps. position: in the schedule.

        rank, phases: this rank's figures and activity, to export, and to find slow parts.
        """
        is_first = self._world.rank == 0
        output_dir = Path(self._args.output_dir)
        unit = "tokens" if schedule.counts_tokens else "step"
        settings = dataclasses.asdict(self._args)
        with ExitStack() as stack:
            stack.callback(self._end)
            if rank is not None:
                stack.enter_context(exported(rank.figures, self._args.report_to, world=self._world))
            if is_first:
                for report in open_reports(output_dir, self._args.report_to, first_step=step + 1, settings=settings):
                    stack.callback(report.close)
                    self._reports.append(report)
            self._progress = stack.enter_context(RunProgress(schedule.length, unit=unit, done=position, shown=is_first))
            self._profiler = stack.enter_context(
                StepProfiler(self._args.profile_steps, output_dir=output_dir, rank=self._world.rank, step=step)
            )
            if rank is not None and phases is not None:
                stack.enter_context(SlowParts(rank, phases, world=self._world, tell=self._add_alert))
            self._is_running = True
            yield

    def takes_trace(self) -> bool:
        """Return whether a trace was requested since the last call; on rank 0, and looking once a second."""
        now = time.monotonic()
        if self._world.rank or now - self._looked_s < _LOOK_S:
            return False
        self._looked_s, before = now, self._requested_ns
        self._requested_ns = self._request()
        return self._requested_ns > before

    def trace_next_step(self) -> None:
        self._profiler.trace_next()

    def _request(self) -> int:
        """Return the time of the last request, the time of a file, in nanoseconds; 0 without a request."""
        try:
            return (Path(self._args.output_dir) / TRACE_NAME).stat().st_mtime_ns
        except OSError:  # no such file
            return 0

    def _end(self) -> None:
        self._is_running = False
        self._reports.clear()
        if self._alerts is not None:
            self._alerts.close()
            self._alerts = None

    def _add_alert(self, alert: Mapping[str, Any]) -> None:
        """Write an alert between records, in another thread than the run's."""
        self._unrecorded.append(alert)
        try:
            if self._alerts is None:
                self._alerts = RecordFile(Path(self._args.output_dir) / ALERTS_NAME)
            self._alerts.write({"step": alert["first_step"], ALERTS: [alert]})
        except StorageError as error:
            logger.warning("an alert is not in the output_dir: %s", error)

    def take_alerts(self) -> list[Mapping[str, Any]]:
        """Return the alerts of slow parts since the last call, for a record; [] on ranks other than 0."""
        return [self._unrecorded.popleft() for _ in range(len(self._unrecorded))]

    def watched(self, phases: Phases) -> Standstill:
        """Return a context for watching this rank's phases."""
        args = self._args
        return Standstill(phases, output_dir=Path(args.output_dir), world=self._world, timeout_s=args.timeout_s)

    def end_step(self, position: int) -> None:
        self._profiler.step()
        self._progress.move(position)

    def write(self, record: Mapping[str, Any], *, position: int) -> None:
        """Report a record of all ranks, with "step". Nothing is written outside `running`."""
        if not self._is_running:
            return
        for report in self._reports:
            report.write(record)
        if self._kept is not None:
            self._kept.add(record)
        self._progress.tell(record, position)


# Progress of a run: a bar on a terminal, otherwise a line every LINE_S.

LINE_S = 60.0  # seconds between lines without a terminal
_REFRESH_S = 0.2
_SHOWN = (
    ("epoch", "epoch {:.2f}"),
    ("loss", "loss {:.4f}"),
    ("eval_loss", "eval loss {:.4f}"),
    ("perf/tokens_per_s", "{:,.0f} tokens/s"),
    ("perf/mfu", "MFU {:.1%}"),
)


class RunProgress:
    """Context to show the position of a run of `length`, in `unit` (steps or tokens), with the latest figures.

    Draws only in calls, without a thread.
    """

    def __init__(self, length: int, *, unit: str, done: int, shown: bool, console: Console | None = None):
        self._console = console or Console(stderr=True)
        self._shown = shown
        self._length = length
        self._unit = unit
        self._figures: dict[str, str] = {}
        self._drawn = self._line_at = -float("inf")
        self._begun_at, self._begun = time.monotonic(), done
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            auto_refresh=False,
            disable=not (shown and self._console.is_terminal),
        )
        self._task = self._bar.add_task(self._where(done), total=length, completed=done, figures="")

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def move(self, position: int) -> None:
        """Show the current position of the run."""
        if not self._bar.disable:
            self._bar.update(self._task, completed=position, description=self._where(position))
            if time.monotonic() - self._drawn >= _REFRESH_S or position >= self._length:
                self._drawn = time.monotonic()
                self._bar.refresh()

    def tell(self, record: Mapping[str, Any], position: int) -> None:
        """Show the figures of a record."""
        if not self._shown:
            return
        self._figures |= {name: form.format(record[name]) for name, form in _SHOWN if name in record}
        figures = "  ".join(self._figures[name] for name, _ in _SHOWN if name in self._figures)
        if not self._bar.disable:
            self._bar.update(self._task, figures=figures)
            return
        if time.monotonic() - self._line_at >= LINE_S or position >= self._length:
            self._line_at = time.monotonic()
            left_s = (self._length - position) * (self._line_at - self._begun_at) / max(1, position - self._begun)
            line = f"{self._where(position)}  {figures}  {timedelta(seconds=round(left_s))} left"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _where(self, position: int) -> str:
        return f"{self._unit} {position:,} of {self._length:,}"


# Traces of some steps by torch's profiler, a file per rank, for Perfetto and chrome://tracing.

TRACE_NAME = "trace"  # a file in the output_dir: when its time changes, the next step is traced
_LOOK_S = 1.0  # between two looks at the file
_ROOM = "free some, name another folder in train.profile_steps, or leave it out"
_END_BYTES = 1 << 13  # bytes to read at the end of a trace, with the trace's path


class StepProfiler:
    """Context to trace steps [first, stop) of this run, counted from the start of the process after `step` steps.

    The file is `folder`/rank-N-step-S.json, S the first traced step by the log's count: a resumed run keeps the traces
    of the run before. A run with an earlier end writes the steps until then. Without steps nothing is traced before
    trace_next. Raises StorageError if the file cannot be written.
    """

    def __init__(self, steps: tuple[int, int] | tuple[int, int, str] | None, *, output_dir: Path, rank: int, step: int):
        self._profile: profile | None = None
        self._rank, self._step, self._folder = rank, step, output_dir / "profile"
        if steps is not None:
            first, stop, *folders = steps
            # The profiler's step n is the nth step of this run; step 0, before the first step, is empty.
            folder = Path(*folders) if folders else self._folder
            self._profile = self._planned(step + first + 1, stop - first, folder, skipped=first)

    def _planned(self, step: int, num_steps: int, folder: Path, *, skipped: int = 0) -> profile:
        """Return the profiler of a trace from a step on, after skipped steps and one for the profiler's own start."""
        self._is_written = False
        self._path = folder / f"rank-{self._rank}-step-{step}.json"
        traced = schedule(skip_first=skipped, wait=0, warmup=1, active=num_steps, repeat=1)
        # acc_events: keep the events of the only cycle; otherwise torch warns of dropped events of other cycles.
        return profile(schedule=traced, on_trace_ready=self._write, acc_events=True)

    def __enter__(self) -> StepProfiler:
        if self._profile is not None:
            self._profile.start()
            self._profile.step()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._profile is not None:
            self._profile.stop()

    def step(self) -> None:
        """Take the end of a step."""
        self._step += 1
        if self._profile is not None:
            self._profile.step()
            if self._is_written:
                self._profile.stop()
                self._profile = None

    def trace_next(self) -> None:
        """Trace the next step, from within a step. While another trace is planned or under way, nothing is added."""
        if self._profile is None:
            self._profile = self._planned(self._step + 2, 1, self._folder)
            self._profile.start()

    def _write(self, traced: profile) -> None:
        self._is_written = True
        with disk_errors(str(self._path), room=_ROOM):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(b"")  # torch reports no disk errors; Python raises errors of the path here
            traced.export_chrome_trace(str(self._path))
            if not _is_whole(self._path):
                for part in self._path.parent.glob(f"{self._path.name}*"):  # also torch's .tmp file, written first
                    part.unlink()
                raise StorageError(f"{self._path}: the trace could not be written whole, as on a full disk: {_ROOM}")


def _is_whole(path: Path) -> bool:
    """Whether a trace has the end, written last by torch."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
        end = file.read(_END_BYTES)
    return b'"traceName"' in end and end.rstrip().endswith(b"}")


# Reporters of records: always train_log.jsonl, with report_to also TensorBoard and Weights & Biases.

logger = logging.getLogger("lmms_stream")


class Report(Protocol):
    """Takes the records of a run, with steps, in order; after a resume some steps come again."""

    def write(self, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Writes numbers and alerts of records to event files. Steps of an earlier run from `first_step` on are hidden."""

    def __init__(self, folder: Path, *, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        purged = first_step if first_step > 1 else None
        self._folder = str(folder)
        with disk_errors(self._folder, room=ROOM):
            self._writer = SummaryWriter(self._folder, purge_step=purged)

    def write(self, record: Mapping[str, Any]) -> None:
        with disk_errors(self._folder, room=ROOM):
            for name, value in _numbers(record).items():
                self._writer.add_scalar(name, value, record["step"])
            for alert in record.get(ALERTS, []):
                self._writer.add_text(f"{ALERTS}/{alert['kind']}", alert["message"], record["step"])
            self._writer.flush()

    def close(self) -> None:
        with disk_errors(self._folder, room=ROOM):
            self._writer.close()


class WeightsAndBiases:
    """Logs numbers and alerts of records, and the settings, to a run of W&B; a resumed run keeps the id.

    WANDB_PROJECT, WANDB_MODE (offline: only to files in the output folder) and other variables of W&B set the target.
    """

    def __init__(self, output_dir: Path, *, settings: Mapping[str, Any]):
        import wandb

        id_path = output_dir / "wandb" / "run-id.txt"
        with disk_errors(str(id_path), room=ROOM):
            if not id_path.exists():
                id_path.parent.mkdir(parents=True, exist_ok=True)
                id_path.write_text(uuid.uuid4().hex)
            run_id = id_path.read_text()
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "lmms_stream"),
                name=os.environ.get("WANDB_NAME", output_dir.name),
                id=run_id,
                resume="allow",
                dir=str(output_dir),
                config=dict(settings),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"Weights & Biases takes no records ({' '.join(str(error).split())}): run `wandb login`, set "
                "WANDB_MODE=offline, or leave wandb out of report_to"
            ) from error
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log({"step": record["step"], **_numbers(record)})
        for alert in record.get(ALERTS, []):
            self._run.alert(title=alert["kind"], text=alert["message"], level="WARN")

    def close(self) -> None:
        self._run.finish()


def check_reporters(report_to: Sequence[Reporter]) -> None:
    """Raise ConfigError for a reporter without an installed package."""
    check_exporters(report_to)
    for name in {"tensorboard", "wandb"} & {*report_to}:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # not a package, but a folder of the same name, for example W&B's
            raise ConfigError(f"train.report_to {name} needs the package {name}: pip install 'lmms-stream[{name}]'")


def open_reports(
    output_dir: Path, report_to: Sequence[Reporter], *, first_step: int, settings: Mapping[str, Any]
) -> Iterator[Report]:
    """Yield the reports for the records of a run from first_step on; each is opened just before."""
    log = RecordFile(output_dir / LOG_NAME)
    if log.is_shared:
        logger.warning(
            "another run writes %s: two runs in one output_dir mix their logs and remove each other's checkpoints; end "
            "one of them, or name another output_dir",
            output_dir / LOG_NAME,
        )
    yield log
    if "tensorboard" in report_to:
        yield TensorBoard(output_dir / "tensorboard", first_step=first_step)
    if "wandb" in report_to:
        yield WeightsAndBiases(output_dir, settings=settings)


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}


# A run's log next to the checkpoints: it outlives the disk of the writing node.
#
# Rank 0 writes the log, and may be on another node after a restart. Therefore each checkpoint has the records since
# the previous checkpoint as `log/step-NNNNNNNN.jsonl`, and a resumed run adds missing records to the run's own log. The
# first line of each file has the step after which the records begin.

AFTER = "after_step"


def part_name(step: int, *, is_later: bool = False) -> str:
    """Return the key of the records up to a checkpoint, next to the checkpoints; is_later: of its evaluation after."""
    return f"log/step-{step:08d}{'-evaluation' if is_later else ''}.jsonl"


class KeptLog:
    """Records of a run since the last checkpoint."""

    def __init__(self) -> None:
        self._after = 0  # the step of the last checkpoint
        self._lines: list[bytes] = []

    def begin(self, step: int) -> None:
        """Begin after a checkpoint."""
        self._after, self._lines = step, []

    def add(self, record: Mapping[str, Any]) -> None:
        self._lines.append(line_of(record))

    def part(self, step: int) -> dict[str, bytes]:
        """Return the part of the log for the checkpoint of a step, by key; the next part begins after this step.

        After the checkpoint of the step is saved: the part of its evaluation.
        """
        key, data = part_name(step, is_later=step == self._after), line_of({AFTER: self._after}) + b"".join(self._lines)
        self.begin(step)
        return {key: data}


def restore_log(storage: Storage, step: int, path: Path) -> int:
    """Add missing records up to a checkpoint to the log at `path`; return the number of added records.

    Parts are read backwards from the last part, until the log has all records of a part, or no part is stored (earlier
    releases stored no parts). Raises DataError, StorageError.
    """
    log = history(read_log(path))
    known = {_key(record): record for record in (*log.steps, *log.evaluations)}
    lacking: list[list[dict[str, Any]]] = []
    while step > 0:
        try:
            step, records = _read_part(storage, step)
        except ObjectMissingError:
            break
        if records and all(known.get(_key(record)) == record for record in records):
            break  # a part without records does not show that the log has earlier records
        lacking.append(records)
    records = [record for part in reversed(lacking) for record in part]
    while records and known.get(_key(records[0])) == records[0]:
        records.pop(0)
    if records:
        lines = RecordFile(path)
        for record in records:
            lines.write(record)
        lines.close()
    return len(records)


def _key(record: Mapping[str, Any]) -> tuple[int, bool]:
    """Return the key of a valid record: step, and whether the record is from an evaluation."""
    return record["step"], "eval_loss" in record


def _read_part(storage: Storage, step: int) -> tuple[int, list[dict[str, Any]]]:
    """Return the step before a part, and the records of the part."""
    where = f"{storage.url}/{part_name(step)}"
    head, *lines = storage.read(part_name(step)).splitlines() or [b""]
    with suppress(ObjectMissingError):
        lines += storage.read(part_name(step, is_later=True)).splitlines()[1:]
    try:
        after = int(json.loads(head)[AFTER])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where}: its first line has no start of the log ({error}): remove it") from None
    if not 0 <= after < step:
        raise DataError(f"{where} begins after step {after}, which is not before step {step}: remove it")
    return after, [record_of(line, where=f"{where}:{number}") for number, line in enumerate(lines, start=2)]
