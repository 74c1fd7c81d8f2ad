"""Sources -> a dataset: units of rows are read, mapped and encoded by processes, and their samples laid into shards.

What is written follows from the sources and the options alone, whatever the number of processes and however often the
work was ended and begun again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError
from ..processors.base import Processor, cut_media
from ..processors.text import TokensProcessor
from ..storage.local import LocalStorage
from ..storage.storage import Storage, open_storage
from ..version import VERSION
from .engines.engine import RAY_TIMEOUT_S, Engine, open_engine
from .options import ConvertOptions
from .report import ConvertReport, CountedBytes, SplitReport, report_of
from .rows import schemas
from .rows.mapper import ROWS_VERSION, Mapper
from .rows.options import SchemaOptions
from .sources.sources import open_sources
from .sources.specs import Spec
from .sources.units import CUT_VERSION, Source
from .weighted import convert_parts, weighted_parts
from .writing.commit import commit, measured_lengths, other_files
from .writing.done import digest_of, finished_before
from .writing.encoded_units import UnitEncoder
from .writing.encoding import ShardFormat, compression_extension
from .writing.layout import Laying
from .writing.outputs import Output
from .writing.reading import Reading
from .writing.run import Job, Run, task_name
from .writing.shards import ShardMaker, entry_bytes
from .writing.work import Work, open_work, work_folder


@dataclass(slots=True)
class Progress:
    """Where a caller is told how far a conversion is: bytes of the sources in all (0: unknown) and done, and rows."""

    begin: Callable[[int], None] = lambda num_bytes: None
    advance: Callable[[int], None] = lambda num_bytes: None
    rows: Callable[[int], None] = lambda num_rows: None
    say: Callable[[str], None] = lambda text: None


def convert(
    sources: Sequence[str | Path | Spec],
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

    sources: what open_sources knows; of a list whose entries have weights each becomes a dataset of its own below the
    target. options, changes: see ConvertOptions. num_workers: processes (default: the cores this one may use, or fewer
    for little data); more than one are spawned, so a script calls this below `if __name__ == "__main__":`. work: folder
    for what a run that is ended leaves for the next (default: in the system's temporary folder). overwrite: replace the
    dataset, or what is left of one, that lies at the target.
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
    parts = weighted_parts(sources, options)
    if parts:
        settings: dict[str, Any] = {
            "num_workers": num_workers,
            "overwrite": overwrite,
            "work": work,
            "progress": progress,
        }
        on_engine: dict[str, Any] = {"engine": engine, "ray_address": ray_address, "ray_timeout_s": ray_timeout_s}
        each = partial(_convert_part, options=options, **settings, **on_engine)
        return convert_parts(parts, target, convert=each, say=progress.say)
    folders = [target] if options.splits is None else [f"{target.rstrip('/')}/{name}" for name in options.splits]
    targets = [open_storage(folder) for folder in folders]
    scratch = work_folder(targets[0].url, work) / "sources"
    named = [source if isinstance(source, Spec) else str(source) for source in sources]
    look = partial(
        open_sources,
        named,
        format=options.format,
        delimited=options.delimited,
        scratch=scratch,
        unit_bytes=options.unit_bytes,
    )
    opened = look()
    asked = _asked(opened, options)
    done = None if overwrite else finished_before(targets, asked)
    if done is not None:
        progress.say(
            f"{', '.join(target.url for target in targets)}: is there already, of the same sources and options: "
            "nothing to do (--overwrite converts it again)"
        )
        return report_of(done, options.splits or (), seconds=time.monotonic() - started)
    with (
        open_engine(engine, ray_address=ray_address, ray_timeout_s=ray_timeout_s, num_workers=num_workers) as workers,
        open_work(
            targets,
            asked,
            files=other_files(options.measured_by),
            extension=f".{compression_extension(options.compression)}" if options.compression else "",
            base=work,
            overwrite=overwrite,
        ) as begun,
    ):
        reading, laying = _write_shards(opened, options, begun, workers, num_workers, progress)
        _check_unchanged(opened, look())
        num_cut = [_commit(begun, output, laying, reading, options, opened, asked) for output in laying.outputs]
        for output in laying.outputs:
            begun.release(output.number)
    if any(num_cut):
        progress.say(cut_media(sum(num_cut)))
    return _report(reading, laying, begun, splits=options.splits or (), seconds=time.monotonic() - started)


def _convert_part(spec: Spec, target: str, **settings: Any) -> ConvertReport:
    return convert([spec], target, **settings)


def _write_shards(
    sources: Sequence[Source],
    options: ConvertOptions,
    work: Work,
    workers: Engine,
    num_workers: int | None,
    progress: Progress,
) -> tuple[Reading, Laying]:
    """All shards in their targets; returns what was read and how it was laid."""
    total = sum(source.num_bytes for source in sources)
    progress.begin(total)
    counted = CountedBytes(total, tell=progress.advance)
    reading = Reading(sources, options.schema, say=progress.say)
    _check_processor(options.processor, reading.mapper)
    columns = schemas.TOKENS.columns if options.tokenize else reading.mapper.columns
    format = ShardFormat(columns, shard_bytes=options.shard_bytes, compression=options.compression)
    laying = Laying(format, options, work)
    num_workers = num_workers or min(workers.num_cpus, total // options.unit_bytes + 1)
    job = _job(work, format, options)
    with (
        closing(reading),
        workers.open_pool(job, num_workers, name=task_name, on_progress=counted.advance, marks=work.marks) as pool,
    ):
        told = {"on_bytes": counted.advance, "on_rows": progress.rows}
        Run(pool, reading, laying, work, num_workers=num_workers, **told).go()
    counted.finish()
    return reading, laying


def _check_processor(processor: Processor | None, mapper: Mapper) -> None:
    if processor is not None and processor.schema != mapper.schema:
        raise ConfigError(
            f"the rows are {mapper.schema!r}, and {type(processor).__name__} reads {processor.schema!r}: choose the "
            "other with --processor, or say what the rows are with --kind and --columns"
        )


def _check_unchanged(sources: Sequence[Source], now: Sequence[Source]) -> None:
    """DataError for a source that was written to while it was read: some of its rows may be old and some new."""
    then, after = _described(sources), _described(now)
    known = {json.dumps(each, sort_keys=True) for each in after}
    changed = [each for each in then if json.dumps(each, sort_keys=True) not in known] or after[len(then) :]
    if changed:
        raise DataError(f"{changed[0]['name']} was changed while it was read: start again once nobody writes to it")


def _asked(sources: Sequence[Source], options: ConvertOptions) -> dict[str, Any]:
    """All that decides what is written, as JSON values: a run goes on where another was ended if these are equal."""
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    values["schema"] = options.schema.asked
    values["settings"] = [_changed(source, options.schema).asked for source in sources if source.settings]
    values["processor"] = options.processor and dict(options.processor.description)
    versions = {"units": CUT_VERSION, "rows": ROWS_VERSION, "version of lmms_stream": VERSION}
    return {**values, "sources": _described(sources), **versions}


def _changed(source: Source, schema: SchemaOptions) -> SchemaOptions:
    try:
        return schema.changed(source.settings)
    except ConfigError as error:
        raise ConfigError(f"{source.name}: {error}") from error


def _described(sources: Sequence[Source]) -> list[dict[str, Any]]:
    return [{**source.identity, "name": source.name, **_sliced(source.rows)} for source in sources]


def _sliced(rows: slice) -> dict[str, Any]:
    return {} if rows == slice(None) else {"rows": [rows.start, rows.stop]}


def _commit(
    work: Work,
    output: Output,
    laying: Laying,
    reading: Reading,
    options: ConvertOptions,
    sources: Sequence[Source],
    asked: Mapping[str, Any],
) -> int:
    """Write what belongs to its shards; how many media are not read whole."""
    measured_by = options.measured_by
    is_first = output.number == 0  # rows that are left out are in no split: the first counts them
    rejects = laying.rejects if is_first else []
    description = {
        "schema": reading.mapper.schema if not options.tokenize else TokensProcessor.schema,
        "columns": output.format.columns,
        "num_samples": output.num_samples,
        "num_rejected": len(rejects),
        "num_filtered": laying.num_filtered if is_first else 0,
        "num_empty": laying.num_empty if is_first else 0,
        "source": _described(sources),
        "asked": digest_of(asked),
        "converter": f"lmms_stream {VERSION}",
    }
    lengths = measured_lengths(output.lengths, measured_by) if measured_by and output.lengths else None
    commit(
        work.targets[output.number],
        [work.done[output.number, number] for number in range(output.num_shards)],
        description,
        lengths=lengths,
        rejects=rejects,
        staging=work.staging,
        replaced=work.replaced[output.number],
    )
    return 0 if lengths is None else lengths.num_cut


def _report(reading: Reading, laying: Laying, work: Work, *, splits: Iterable[str], seconds: float) -> ConvertReport:
    reports = [SplitReport.of(output) for output in laying.outputs]
    tokens = [report.num_tokens for report in reports if report.num_tokens is not None]
    return ConvertReport(
        kind=reading.mapper.description,
        num_rows=sum(report.num_rows for report in reports),
        num_rejected=len(laying.rejects),
        num_filtered=laying.num_filtered,
        num_empty=laying.num_empty,
        num_tokens=sum(tokens) if tokens else None,
        num_shards=sum(report.num_shards for report in reports),
        num_bytes=sum(entry_bytes(entry) for entry in work.done.values()),
        seconds=seconds,
        splits=dict(zip(splits, reports, strict=False)),
    )


def _job(work: Work, format: ShardFormat, options: ConvertOptions) -> Job:
    units = UnitEncoder(
        folder=work.units,
        format=format,
        processor=options.processor,
        tokenize=options.tokenize,
        on_error=options.on_error,
        limit=options.limit,
        shortest=options.shortest,
        longest=options.longest,
    )
    shards = [
        ShardMaker(folder=work.units, staging=work.staging, format=format, storage=_wherever(target))
        for target in work.targets
    ]
    return Job(units, shards)


def _wherever(target: Storage) -> Storage:
    """The same for a worker in another folder."""
    return LocalStorage(target.folder.absolute()) if isinstance(target, LocalStorage) else target
