"""Sources -> a dataset: processes read, map and encode units of rows, and write the samples to shards.

The output depends only on the sources and the options, not on the number of processes, kills and restarts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..checks import check_arguments, local_path, plain_path
from ..errors import ConfigError
from ..processes.engine import RAY_TIMEOUT_S, Engine, open_engine
from ..processors.base import cut_media
from ..processors.not_shown import added
from ..storage.storage import Storage, open_storage
from ..version import VERSION
from .columns import check_columns, check_processor, stored_columns, stored_schema, with_processor
from .dropping import check_drop_targets, dropped_rows
from .identity import (
    CarriedOrigins,
    carried_lengths,
    carried_over,
    check_code,
    check_targets,
    check_unchanged,
    described,
    described_kinds,
    identity_of,
    measures,
)
from .options import ConvertOptions, changed
from .repeats import SourceRecord, check_repeats, check_same_bytes
from .report import ConvertReport, CountedBytes, SplitReport, added_documents, documents_of, report_of
from .rows.user_functions import NamedOrFunction, with_functions
from .sources.files import joint_digest, sampled_digest, status_of
from .sources.python_rows import GivenSources, cannot_go_on, given_sources
from .sources.sources import open_sources
from .sources.specs import Spec
from .sources.table import TableSource
from .sources.units import Source
from .stored.row_counts import RowCounts, described_unread
from .weighted import convert_parts, joint, weighted_parts
from .writing.commit import commit, measured_lengths, other_files
from .writing.dropped_rows import DroppedRows
from .writing.encoded_units import UnitEncoder, process_each
from .writing.encoding import ShardFormat, compression_extension
from .writing.parts import EncodedParts, EncodedReading, UnitCollector
from .writing.placement import Placement
from .writing.reading import Reading
from .writing.run import Encoder, Job, Run, task_name
from .writing.shards import Output, ShardMaker, entry_bytes
from .writing.work import (
    WorkFolder,
    digest_of,
    finished_before,
    from_anywhere,
    open_work,
    options_of,
    place_of,
    work_folder,
)


@dataclass(slots=True)
class Progress:
    """Callbacks for the progress of a conversion: bytes of all sources (0: unknown), bytes done, rows, and messages."""

    begin: Callable[[int], None] = lambda num_bytes: None
    advance: Callable[[int], None] = lambda num_bytes: None
    rows: Callable[[int], None] = lambda num_rows: None
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Settings of execution; the output does not depend on them. See `convert` for the fields."""

    num_workers: int | None = None
    overwrite: bool = False
    work: Path | None = None
    progress: Progress = field(default_factory=Progress)
    engine: str = "processes"
    ray_address: str | None = None
    ray_timeout_s: float = RAY_TIMEOUT_S

    def open_engine(self) -> AbstractContextManager[Engine]:
        return open_engine(
            self.engine,
            ray_address=self.ray_address,
            ray_timeout_s=self.ray_timeout_s,
            num_workers=self.num_workers,
        )

    def scratch(self, url: str) -> Path:
        """Folder for sources that are fetched as complete files. url: of the first target."""
        return work_folder(url, self.work) / "sources"

    def num_workers_for(self, workers: Engine, num_units: int) -> int:
        """Number of workers: the setting, or one per CPU and at most one more than there are units."""
        return self.num_workers or min(workers.num_cpus, num_units + 1)


def convert(
    sources: GivenSources,
    target: str | Path,
    *,
    map: NamedOrFunction | None = None,
    filter: NamedOrFunction | None = None,
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

    sources: a source of open_sources, a datasets.Dataset or IterableDataset, an iterable of rows (dicts), or a list of
    these. Each entry with a weight of a YAML list becomes its own dataset below the target; each kind of rows of
    LLaMA-Factory's dataset_info.json#*, too.
    map, filter: see SchemaOptions; a function must be defined in a module or in the script.
    options: see ConvertOptions. changes: fields of ConvertOptions or SchemaOptions, or options of
    `lmms-stream convert` by name, for example tokenizer="path", kind="messages", columns={"messages": "dialogue"},
    shard_size="256mb".
    num_workers, or workers: processes (default: the cores of this process; fewer for little data; 1 if the amount of
    data is unknown); several processes are spawned, therefore a script calls `convert` below
    `if __name__ == "__main__":`. work: folder for the state of a killed run, read by the next run (default: in the
    system's temporary folder). overwrite: replace the dataset at the target, finished or not.
    engine: "processes" of this machine, or "ray": workers on the cluster at ray_address (an existing connection of this
    process, RAY_ADDRESS, or an own cluster), by default one per CPU of the cluster. The cluster must answer within
    ray_timeout_s, and the first workers must start within ray_timeout_s. All nodes must see `work`, local sources and a
    local target under the same paths.

    Raise DataError, StorageError, ConfigError, WorkerError; the same call resumes afterwards if a restart can succeed.
    """
    target, num_workers = str(plain_path("target", target)), changes.pop("workers", num_workers)
    check_arguments(convert, locals())
    options = changed(options, changes)
    options = replace(options, schema=with_functions(options.schema, map=map, filter=filter))
    execution = Execution(
        num_workers=num_workers,
        overwrite=overwrite,
        work=None if work is None else local_path("work", work),
        progress=progress or Progress(),
        engine=engine,
        ray_address=ray_address,
        ray_timeout_s=ray_timeout_s,
    )

    convert_to = partial(_convert_to, whole=target, options=options, execution=execution)
    if parts := weighted_parts(sources, options):
        return convert_parts(parts, target, convert=lambda spec, to: convert_to([spec], to), say=execution.progress.say)
    kinds = described_kinds(sources, opens=partial(_try_to_open, target=target, options=options, execution=execution))
    if len(kinds) == 1:
        return convert_to([spec for specs in kinds.values() for spec in specs], target)
    if kinds:
        return joint({kind: convert_to(list(specs), f"{target.rstrip('/')}/{kind}") for kind, specs in kinds.items()})
    return convert_to(sources, target)


def _try_to_open(spec: Spec, *, target: str, options: ConvertOptions, execution: Execution) -> None:
    scratch = execution.scratch(open_storage(folders_of(target, options)[0]).url)
    look([spec], scratch, options=options, target=target)


def _convert_to(
    sources: GivenSources, target: str, *, whole: str, options: ConvertOptions, execution: Execution
) -> ConvertReport:
    """Convert to one target. whole: folder or URL of this dataset and of the datasets written in the same call."""
    folders = folders_of(target, options)
    scratch = execution.scratch(open_storage(folders[0]).url)
    given = given_sources(sources, scratch=scratch, unit_bytes=options.unit_bytes)
    looked = partial(look, given, options=options, target=whole)
    return convert_sources(looked, folders, options=options, execution=execution, base=target)


def folders_of(target: str, options: ConvertOptions) -> list[str]:
    """Folders of a conversion's datasets: the target, or one folder per split below the target."""
    if not target:
        raise ConfigError("the target is empty: name a folder or a URL")
    return [target] if options.splits is None else [f"{target.rstrip('/')}/{name}" for name in options.splits]


def look(
    sources: Sequence[str | Path | Spec | Source], scratch: Path, *, options: ConvertOptions, target: str | None
) -> list[Source]:
    """Return the current sources for names and sources. scratch, target: see open_sources."""
    return list(
        open_sources(
            [str(each) if isinstance(each, Path) else each for each in sources],
            format=options.format,
            delimited=options.delimited,
            scratch=scratch,
            unit_bytes=options.unit_bytes,
            ids=Path(options.ids) if options.ids is not None else None,
            target=target,
            media_root=options.schema.media_root,
        )
    )


def convert_sources(
    look: Callable[[Path], Sequence[Source]],
    folders: Sequence[str],
    *,
    options: ConvertOptions,
    execution: Execution,
    columns: Mapping[str, str] | None = None,
    base: str | None = None,
) -> ConvertReport:
    """Convert to folders or URLs, one for each output. look: returns the current sources, given a folder for downloads.

    columns: required columns of the samples, name -> encoding; None for any. base: the target, which may hold units
    encoded by parts of the conversion; None if the conversion has no parts.
    """
    started = time.monotonic()
    progress, overwrite = execution.progress, execution.overwrite
    targets = [open_storage(folder) for folder in folders]
    scratch = execution.scratch(targets[0].url)
    opened = look(scratch)
    options = with_processor(options, opened)
    check_targets(opened, targets)
    if once := cannot_go_on(opened):
        progress.say(
            f"{', '.join(once)}: nothing tells whether these rows are the same the next time: if this conversion is "
            "ended, it is not gone on with, and the next begins anew with overwrite=True"
        )
    check_drop_targets(options, targets)
    dropped = dropped_rows(opened, options)
    identity = identity_of(opened, options, dropped)
    encoded = None if base is None else EncodedParts.found(open_storage(base), identity)
    done = None if overwrite else finished_before(targets, identity)
    if done is not None:
        check_same_bytes(opened, done[0].description["source"], url=targets[0].url)
        if encoded is not None and encoded.has_begun:  # parts of another conversion are not converted yet
            encoded.remove()
        progress.say(
            f"{', '.join(target.url for target in targets)}: is there already, of the same sources and options: "
            "nothing to do (--overwrite converts it again)"
        )
        return report_of(done, options.splits or (), seconds=time.monotonic() - started)
    check_repeats(opened, options, say=progress.say)
    num_units = None if encoded is None else encoded.counts(len(opened), overwrite=overwrite)
    carried = carried_over(opened, options)
    with (
        execution.open_engine() as workers,
        open_work(
            targets,
            identity,
            files=other_files(options.measured_by, carried),
            extension=f".{compression_extension(options.compression)}" if options.compression else "",
            base=execution.work,
            overwrite=overwrite,
        ) as begun,
    ):
        measured = options if measures(options, carried) else replace(options, processor=None)
        made = (encoded.storage, num_units) if encoded is not None and num_units is not None else None
        reading, placement = _write_shards(opened, measured, begun, execution, workers, columns, dropped, made)
        check_processor(options.processor, reading.mapper)
        check_unchanged(opened, look(scratch))
        check_code(identity["code"], opened, options)
        begun.check_claims()
        num_cut = [
            _commit(begun, output, placement, reading, measured, opened, identity, carried)
            for output in placement.outputs
        ]
        for output in placement.outputs:
            begun.release(output.number)
    if encoded is not None:
        encoded.remove()
    if any(num_cut):
        progress.say(cut_media(sum(num_cut)))
    return _report(reading, placement, begun, options, seconds=time.monotonic() - started)


def _write_shards(
    sources: Sequence[Source],
    options: ConvertOptions,
    work: WorkFolder,
    execution: Execution,
    workers: Engine,
    expected: Mapping[str, str] | None,
    dropped: DroppedRows | None,
    made: tuple[Storage, Sequence[int]] | None,
) -> tuple[Reading, Placement]:
    """Write all shards to their targets; return the reading of sources and the placement of samples.

    made: folder of the units that parts have encoded, and the number of units of each source.
    """
    progress = execution.progress
    total = sum(source.num_bytes for source in sources)
    progress.begin(total)
    counted = CountedBytes(total, tell=progress.advance)
    if made is None:
        reading = Reading(sources, options.schema, say=progress.say)
    else:
        reading = EncodedReading(sources, options.schema, say=progress.say, num_units=made[1])
    check_processor(options.processor, reading.mapper)
    columns = stored_columns(options, reading.mapper)
    check_columns(columns, expected, source=sources[0].name)
    format = ShardFormat(columns, shard_bytes=options.most_shard_bytes, compression=options.compression)
    placement = Placement(format, options, work, dropped)
    num_workers = execution.num_workers_for(workers, total // options.unit_bytes)
    encoder: Encoder = (
        unit_encoder(work.units, format, options)
        if made is None
        else UnitCollector(folder=work.units, storage=from_anywhere(made[0]))
    )
    job = Job(encoder, _shard_makers(work, format))
    with (
        closing(reading),
        workers.open_pool(job, num_workers, name=task_name, on_progress=counted.advance, marks=work.marks) as pool,
    ):
        told = {"on_bytes": counted.advance, "on_rows": progress.rows}
        Run(pool, reading, placement, num_workers=num_workers, **told).go()
    counted.finish()
    return reading, placement


def _commit(
    work: WorkFolder,
    output: Output,
    placement: Placement,
    reading: Reading,
    options: ConvertOptions,
    sources: Sequence[Source],
    identity: Mapping[str, Any],
    carried: Sequence[str],
) -> int:
    """Write index, lengths and provenance of an output; return the number of media that are read only in part."""
    measured_by = options.measured_by
    tokenizer = getattr(measured_by, "tokenizer", None)
    is_first = output.number == 0  # rows left out belong to no split: the first split counts them
    rejects = placement.rejects if is_first else []
    description = {
        "schema": stored_schema(options, reading.mapper),
        "columns": output.format.columns,
        "num_samples": output.num_samples,
        **(placement.left_out if is_first else RowCounts()).as_dict(),
        **described_unread(placement.unread if is_first else {}),
        **documents_of(output),
        **({"trust_remote_code": True} if getattr(tokenizer, "trust_remote_code", False) else {}),
        **({"not_shown": dict(output.not_shown)} if output.not_shown else {}),
        "source": _taken(sources, reading, options.limit if placement.is_full else None),
        "options": options_of(identity),
        "asked": digest_of(identity),
        "converter": f"lmms_stream {VERSION}",
    }
    lengths = []
    if measured_by and output.lengths:
        not_shown = {} if output.concatenation is not None else output.not_shown  # of samples, not of documents
        lengths = [measured_lengths(output.lengths, measured_by, not_shown=not_shown)]
    others = [fingerprint for fingerprint in carried if fingerprint not in [index.fingerprint for index in lengths]]
    lengths += carried_lengths(sources, others, output.rows, folder=work.staging)
    origins = CarriedOrigins.of(sources, output.rows, folder=work.staging)
    commit(
        work.targets[output.number],
        [work.done[output.number, number] for number in range(output.num_shards)],
        description,
        lengths=lengths,
        rejects=rejects,
        rows=origins.rows,
        sources=origins.names,
        staging=work.staging,
        replaced=work.replaced[output.number],
    )
    return lengths[0].num_cut if lengths else 0


def _taken(sources: Sequence[Source], reading: Reading, limit: int | None) -> list[dict[str, Any]]:
    """Descriptions of the sources for dataset.json, without files that have no rows.

    limit: the reached limit; sources that were not read to their end are described with the rows taken.
    """
    said = {index: _placed(each) for index, each in enumerate(described(sources)) if index not in reading.empty}
    if limit is not None:
        rows = [reading.rows_taken(index) for index in range(len(sources))]
        last = max(index for index, (start, stop) in enumerate(rows) if stop > start)
        said |= {at: each | {"rows": [*rows[at]], "limit": limit} for at, each in said.items() if at >= last}
    for at, each in said.items():
        if isinstance(source := sources[at], TableSource) and source.files and "rows" not in each:
            each |= {"status": status_of(source.files), "bytes": joint_digest(source.files)}
    return list(said.values())


def _placed(said: dict[str, Any]) -> dict[str, Any]:
    """Add the place to a source's description, and for a local file a digest by which a later copy is recognized."""
    placed = said | {"at": place_of(said["name"])}
    file = SourceRecord(placed).file
    return placed if file is None else placed | {"sample": sampled_digest(file)}


def _report(
    reading: Reading, placement: Placement, work: WorkFolder, options: ConvertOptions, *, seconds: float
) -> ConvertReport:
    reports = [SplitReport.of(output) for output in placement.outputs]
    tokens = [report.num_tokens for report in reports if report.num_tokens is not None]
    return ConvertReport(
        kind=reading.mapper.description,
        schema=stored_schema(options, reading.mapper),
        num_rows=sum(report.num_rows for report in reports),
        **placement.left_out.as_dict(),
        num_tokens=sum(tokens) if tokens else None,
        num_shards=sum(report.num_shards for report in reports),
        num_bytes=sum(entry_bytes(entry) for entry in work.done.values()),
        seconds=seconds,
        splits=dict(zip(options.splits or (), reports, strict=False)),
        not_shown=added(output.not_shown for output in placement.outputs),
        **added_documents(reports),
        unread=placement.unread,
    )


def unit_encoder(folder: Path, format: ShardFormat, options: ConvertOptions) -> UnitEncoder:
    """Return an encoder that writes units to a folder by the options."""
    return UnitEncoder(
        folder=folder,
        format=format,
        processor=options.processor,
        tokenize=options.stores_tokens,
        documents=options.concat is not None,
        # Placement decides later which rows of a unit are dropped, and so how many rows stay.
        on_error=options.on_error if options.drop is None else "skip",
        process_each=process_each(options.on_error),
        limit=options.limit if options.dedup is None and options.drop is None else None,
        shortest=options.shortest,
        longest=options.longest,
        hashes=options.dedup is not None,
        on_dropped=options.on_dropped,
    )


def _shard_makers(work: WorkFolder, format: ShardFormat) -> list[ShardMaker]:
    return [
        ShardMaker(folder=work.units, staging=work.staging, format=format, storage=from_anywhere(target))
        for target in work.targets
    ]
