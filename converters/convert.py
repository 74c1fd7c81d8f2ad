"""Sources -> a dataset: units of rows are read, mapped and encoded by processes, and their samples laid into shards.

What is written follows from the sources and the options alone, whatever the number of processes and however often the
work was ended and begun again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError
from ..processors.base import Processor
from ..processors.text import TokensProcessor
from ..storage.storage import LocalStorage, Storage, open_storage
from ..version import VERSION
from .engines.engine import RAY_TIMEOUT_S, open_engine
from .engines.processes import Pool
from .options import ConvertOptions
from .report import ConvertReport, CountedBytes, SplitReport
from .rows.kinds import STORED_COLUMNS
from .rows.mapper import Mapper
from .sources.sources import open_sources
from .sources.units import Source
from .writing.commit import commit, measured_lengths, other_files
from .writing.encoded_units import PartMaker, UnitTask, about_path
from .writing.encoding import ShardFormat, compression_extension
from .writing.layout import Laying
from .writing.outputs import Output
from .writing.reading import Reading
from .writing.shards import ShardMaker, ShardTask, entry_bytes
from .writing.work import Work, open_work, work_folder

_AHEAD = 4  # units a worker that may be done before the one that comes next


@dataclass(slots=True)
class Progress:
    """Where a caller is told how far a conversion is: bytes of the sources in all (0: unknown) and done, and rows."""

    begin: Callable[[int], None] = lambda num_bytes: None
    advance: Callable[[int], None] = lambda num_bytes: None
    rows: Callable[[int], None] = lambda num_rows: None
    say: Callable[[str], None] = lambda text: None


def convert(
    sources: Sequence[str | Path],
    target: str,
    *,
    num_workers: int | None = None,
    overwrite: bool = False,
    work: Path | None = None,
    progress: Progress | None = None,
    engine: str = "processes",
    ray_address: str | None = None,
    ray_timeout_s: float = RAY_TIMEOUT_S,
    options: ConvertOptions | None = None,
    **changes: Any,
) -> ConvertReport:
    """Write the rows of `sources`, in order, as MDS shards below `target` (a folder or a URL).

    sources: what open_sources knows. options, changes: see ConvertOptions. num_workers: processes (default: the cores
    this one may use, or fewer for little data); more than one are spawned, so a script calls this below
    `if __name__ == "__main__":`. work: folder for what a run that is ended leaves for the next (default: in the
    system's temporary folder). overwrite: replace the dataset, or what is left of one, that lies at the target.
    engine: "processes" of this machine, or "ray": workers on the cluster at ray_address (a connection that this process
    has, RAY_ADDRESS, or a cluster of its own), by default as many as it has CPUs; it must answer, and the first of them
    start, within ray_timeout_s each. All nodes must see `work`, local sources and a local target under the same paths.

    Raises DataError, StorageError, ConfigError, WorkerError; the same call goes on afterwards where that makes sense.
    """
    started = time.monotonic()
    if not target:
        raise ConfigError("the target is empty: name a folder or a URL")
    options = replace(options or ConvertOptions(), **changes)
    progress = progress or Progress()
    folders = [target] if options.splits is None else [f"{target.rstrip('/')}/{name}" for name in options.splits]
    targets = [open_storage(folder) for folder in folders]
    scratch = work_folder(targets[0].url, work) / "sources"
    named = [str(source) for source in sources]
    look = partial(open_sources, named, format=options.format, scratch=scratch, unit_bytes=options.unit_bytes)
    opened = look()
    with (
        open_engine(engine, ray_address=ray_address, ray_timeout_s=ray_timeout_s, num_workers=num_workers) as workers,
        open_work(
            targets,
            _asked(opened, options),
            files=other_files(options.measured_by),
            extension=f".{compression_extension(options.compression)}" if options.compression else "",
            base=work,
            overwrite=overwrite,
        ) as begun,
    ):
        total = sum(source.num_bytes for source in opened)
        progress.begin(total)
        counted = CountedBytes(total, tell=progress.advance)
        progress = replace(progress, advance=counted.advance)
        reading = Reading(opened, options.schema, say=progress.say)
        _check_processor(options.processor, reading.mapper)
        columns = STORED_COLUMNS["tokens"] if options.tokenize else reading.mapper.columns
        format = ShardFormat(columns, shard_bytes=options.shard_bytes, compression=options.compression)
        laying = Laying(format, options, begun)
        num_workers = num_workers or min(workers.num_cpus, total // options.unit_bytes + 1)
        job = _job(begun, format, options)
        with (
            closing(reading),
            workers.open_pool(job, num_workers, name=_name, on_progress=progress.advance, marks=begun.marks) as pool,
        ):
            _Run(pool, reading, laying, begun, ahead=_AHEAD * num_workers, progress=progress).go()
        counted.finish()
        _check_unchanged(opened, look())
        for output in laying.outputs:
            _commit(begun, output, laying, reading, options, opened)
    return _report(reading, laying, begun, splits=options.splits or (), seconds=time.monotonic() - started)


def _check_processor(processor: Processor | None, mapper: Mapper) -> None:
    if processor is not None and processor.schema != mapper.schema:
        raise ConfigError(
            f"the rows are {mapper.schema!r}, and {type(processor).__name__} reads {processor.schema!r}: choose the "
            "other with --processor, or say what the rows are with --schema and --columns"
        )


def _check_unchanged(sources: Sequence[Source], now: Sequence[Source]) -> None:
    """DataError for a source that was written to while it was read: some rows may be of before, some of after."""
    then = _described(sources)
    changed = [each for each in then if each not in _described(now)] or _described(now)[len(then) :]
    if changed:
        raise DataError(f"{changed[0]['name']} was changed while it was read: start again once nobody writes to it")


def _asked(sources: Sequence[Source], options: ConvertOptions) -> dict[str, Any]:
    """All that what is written follows from, as JSON values."""
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    values["schema"] = asdict(options.schema)
    values["processor"] = options.processor and dict(options.processor.description)
    return {**values, "sources": _described(sources), "version of lmms_stream": VERSION}


def _described(sources: Sequence[Source]) -> list[dict[str, Any]]:
    return [{**source.identity, "name": source.name} for source in sources]


@dataclass(frozen=True, slots=True)
class _Job:
    """What a worker does: parts of units, and shards of parts."""

    parts: PartMaker
    shards: Sequence[ShardMaker]

    def __call__(self, task: UnitTask | ShardTask, on_bytes: Callable[[int], None]) -> dict[str, Any]:
        if isinstance(task, ShardTask):
            return self.shards[task.output].make(task)
        self.parts.make(task, on_bytes)
        return {}


def _job(work: Work, format: ShardFormat, options: ConvertOptions) -> _Job:
    parts = PartMaker(
        folder=work.units,
        format=format,
        processor=options.processor,
        tokenize=options.tokenize,
        on_error=options.on_error,
        shortest=options.shortest,
        longest=options.longest,
    )
    shards = [
        ShardMaker(folder=work.units, staging=work.staging, format=format, storage=_wherever(target))
        for target in work.targets
    ]
    return _Job(parts, shards)


def _wherever(target: Storage) -> Storage:
    """The same for a worker in another folder."""
    return LocalStorage(target.folder.absolute()) if isinstance(target, LocalStorage) else target


def _name(task: UnitTask | ShardTask) -> str:
    return task.name if isinstance(task, ShardTask) else f"unit {task.number}, of {task.source_name}"


class _Run:
    """Has all units made into parts, and the parts, in the order of the sources, into shards."""

    def __init__(
        self,
        pool: Pool[UnitTask | ShardTask, dict[str, Any]],
        reading: Reading,
        laying: Laying,
        work: Work,
        *,
        ahead: int,
        progress: Progress,
    ):
        self._pool = pool
        self._reading = reading
        self._laying = laying
        self._work = work
        self._ahead = ahead
        self._progress = progress
        self._units = reading.units()
        self._next_unit: UnitTask | None = next(self._units, None)
        self._made: dict[int, UnitTask] = {}  # units whose parts wait for those before them
        self._shards: deque[ShardTask] = deque()  # to be made
        self._num_given = 0
        self._made_before = {path.name for path in work.units.iterdir()}  # asked for one by one, a shared folder's
        # cache would say "not there" of those that other machines make meanwhile

    def go(self) -> None:
        while True:
            self._lay()
            task = self._next_task() if self._pool.num_idle else None
            if task is not None:
                self._pool.give(task)
                self._num_given += 1
            elif self._num_given:
                for done, entry in self._pool.wait():
                    self._num_given -= 1
                    self._has_done(done, entry)
            elif self._laying.is_finished and not self._shards:
                return

    def _lay(self) -> None:
        """Lay the parts that come next, as far as they are made."""
        while (task := self._made.pop(self._laying.next_part, None)) is not None:
            before = self._laying.num_samples
            self._shards.extend(self._laying.lay(task, self._reading))
            self._progress.rows(self._laying.num_samples - before)
        if self._laying.is_full:
            self._next_unit = None
        if self._next_unit is None and not self._num_given and not self._shards and not self._laying.is_finished:
            self._shards.extend(self._laying.finish())

    def _next_task(self) -> UnitTask | ShardTask | None:
        """A shard before a unit, so that parts go as soon as they may."""
        if self._shards:
            shard = self._shards.popleft()
            self._work.announce(shard.output, shard.number)
            return shard
        while (unit := self._next_unit) is not None and unit.number - self._laying.next_part < self._ahead:
            self._next_unit = next(self._units, None)
            if about_path(self._work.units, unit.number).name not in self._made_before:
                return unit
            self._made[unit.number] = unit  # by an earlier run
            self._reading.has_read(unit)
            self._progress.advance(unit.unit.num_bytes)
            self._lay()
            if self._shards:
                return self._next_task()
        return None

    def _has_done(self, task: UnitTask | ShardTask, entry: dict[str, Any]) -> None:
        if isinstance(task, ShardTask):
            self._work.keep_shard(task.output, task.number, entry)
            self._laying.has_made(task)
        else:
            self._made[task.number] = task
            self._reading.has_read(task)


def _commit(
    work: Work, output: Output, laying: Laying, reading: Reading, options: ConvertOptions, sources: Sequence[Source]
) -> None:
    measured_by = options.measured_by
    is_first = output.number == 0  # what is left out is in no split: it is counted with the first, once
    rejects = laying.rejects if is_first else []
    description = {
        "schema": reading.mapper.schema if not options.tokenize else TokensProcessor.schema,
        "columns": output.format.columns,
        "num_samples": output.num_samples,
        "num_rejected": len(rejects),
        "num_filtered": laying.num_filtered if is_first else 0,
        "source": _described(sources),
        "converter": f"lmms_stream {VERSION}",
    }
    commit(
        work.targets[output.number],
        [work.done[output.number, number] for number in range(output.num_shards)],
        description,
        lengths=measured_lengths(output.lengths, measured_by) if measured_by and output.lengths else None,
        rejects=rejects,
        staging=work.staging,
    )
    work.release(output.number)


def _report(reading: Reading, laying: Laying, work: Work, *, splits: Iterable[str], seconds: float) -> ConvertReport:
    reports = [SplitReport.of(output) for output in laying.outputs]
    tokens = [report.num_tokens for report in reports if report.num_tokens is not None]
    return ConvertReport(
        schema=reading.mapper.description,
        num_rows=sum(report.num_rows for report in reports),
        num_rejected=len(laying.rejects),
        num_filtered=laying.num_filtered,
        num_tokens=sum(tokens) if tokens else None,
        num_shards=sum(report.num_shards for report in reports),
        num_bytes=sum(entry_bytes(entry) for entry in work.done.values()),
        seconds=seconds,
        splits=dict(zip(splits, reports, strict=False)),
    )
