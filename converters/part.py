"""One part of a conversion on several machines; the machines share only the files at the target.

Each part encodes its units of the sources and keeps the units below the target. The same conversion without a part then
makes the dataset from these units, byte for byte the dataset of one machine: no source is read or encoded again.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, StorageError
from ..mds.index import DATASET_NAME
from ..processes.engine import RAY_TIMEOUT_S, Engine
from ..storage.cache import home_folder
from ..storage.failures import disk_errors
from ..storage.local import LocalStorage
from ..storage.storage import Storage, open_storage
from .columns import check_processor, stored_columns, with_processor
from .convert import Execution, Progress, folders_of, look, unit_encoder
from .dropping import check_drop_targets, dropped_rows
from .identity import carried_over, check_code, check_targets, check_unchanged, identity_of, measures
from .options import ConvertOptions, changed
from .repeats import check_repeats
from .report import CountedBytes
from .sources.python_rows import cannot_go_on
from .sources.units import Source
from .weighted import weighted_parts
from .writing.encoding import ShardFormat
from .writing.parts import EncodedParts, KeptUnits, UnitKeeper
from .writing.reading import Part, Reading, Share
from .writing.run import Job, Run, task_name
from .writing.work import finished_before, read_claim, read_described


@dataclass(frozen=True, kw_only=True, slots=True)
class PartReport:
    """Result of a part. num_there: units of the part that earlier runs encoded. num_units: None if the part, or the
    complete dataset, existed already.
    """

    part: str
    num_units: int | None
    num_there: int
    seconds: float


def convert_part(
    sources: Sequence[str | Path],
    target: str,
    part: Part | str,
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
) -> PartReport:
    """Encode the units of `part`, and keep them below `target` for `convert` with the same arguments.

    part: such as "3/16". sources: only names. The other arguments are the arguments of `convert`. The same call resumes
    a killed run. All parts need the same sources and options, under the same names. engine: workers of "ray" encode on
    a cluster, whose nodes share only the target. overwrite: encode the part again, and accept a dataset or parts of
    another conversion at the target; `convert` with overwrite replaces them. Raise the errors of `convert`.
    """
    started = time.monotonic()
    part = Part.parse(part) if isinstance(part, str) else part
    num_workers = changes.pop("workers", num_workers)
    options = changed(options, changes)
    progress = progress or Progress()
    execution = Execution(
        num_workers=num_workers,
        progress=progress,
        engine=engine,
        ray_address=ray_address,
        ray_timeout_s=ray_timeout_s,
    )
    if weighted_parts(sources, options):
        raise ConfigError(
            f"{sources[0]}: its entries have weights, so each entry becomes a separate dataset: convert each entry in "
            "parts, or leave out the weights"
        )
    folders = folders_of(target, options)
    targets = [open_storage(folder) for folder in folders]
    home = (work.absolute() / home_folder(target).name if work else home_folder(target)) / "convert-parts"
    scratch = home / f"{part.number:05}-of-{part.count:05}"
    opened = look(sources, scratch / "sources", options=options, target=target)
    options = with_processor(options, opened)
    check_targets(opened, targets)
    if once := cannot_go_on(opened):
        raise ConfigError(
            f"{', '.join(once)}: parts may read different rows, and no check can find the difference: store the rows "
            "as files first"
        )
    check_drop_targets(options, targets)
    check_repeats(opened, options, say=progress.say)
    identity = identity_of(opened, options, dropped_rows(opened, options))
    encoded = EncodedParts.at(open_storage(target), identity)
    is_there = (
        _check_free(targets, identity, overwrite=overwrite) or encoded.begin(part, overwrite=overwrite) is not None
    )
    if is_there:
        progress.say(f"{target}: part {part} is there already, of the same sources and options: nothing to do")
        return PartReport(part=str(part), num_units=None, num_there=0, seconds=time.monotonic() - started)
    if engine == "ray":
        _check_read_by_ranges(opened)
    with disk_errors(str(home)), execution.open_engine() as workers:
        there = set() if overwrite else set(encoded.units())
        kept, num_units = _encode(opened, part, options, encoded, scratch, execution, workers, KeptUnits(there))
    check_unchanged(opened, look(sources, scratch / "sources", options=options, target=target))
    check_code(identity["code"], opened, options)
    encoded.end(part, num_units)
    shutil.rmtree(scratch, ignore_errors=True)
    return PartReport(
        part=str(part), num_units=kept.next_unit, num_there=kept.num_there, seconds=time.monotonic() - started
    )


def _check_free(targets: Sequence[Storage], identity: dict[str, Any], *, overwrite: bool) -> bool:
    """Return whether the complete dataset already exists; StorageError for other content at the target."""
    if overwrite:
        return False
    if finished_before(targets, identity) is not None:
        return True
    for target in targets:
        if read_described(target, DATASET_NAME):
            raise StorageError(
                f"{target.url} already holds a dataset: choose another target, or pass --overwrite to all parts, and "
                "to the command that joins the parts"
            )
        if read_claim(target) is not None:
            raise StorageError(
                f"{target.url} holds an unfinished conversion: let it end first, or pass --overwrite to all parts, and "
                "to the command that joins the parts"
            )
    return False


def _check_read_by_ranges(sources: Sequence[Source]) -> None:
    for source in sources:
        if source.fetch is not None:
            raise ConfigError(
                f"{source.name} is fetched whole, to a folder that all nodes must see: leave out --part, and name such "
                "a folder with --work, or leave out --engine ray"
            )


def _encode(
    sources: Sequence[Source],
    part: Part,
    options: ConvertOptions,
    encoded: EncodedParts,
    scratch: Path,
    execution: Execution,
    workers: Engine,
    kept: KeptUnits,
) -> tuple[KeptUnits, dict[int, int]]:
    """Encode the units of the part; return the kept units, and the number of units per source of the part."""
    progress = execution.progress
    share = Share.of(
        part, [each.num_bytes for each in sources], is_fetched=[each.fetch is not None for each in sources]
    )
    total = sum(each.num_bytes for number, each in enumerate(sources) if share.reads(number))
    progress.begin(total)
    counted = CountedBytes(total, tell=progress.advance)
    if not measures(options, carried_over(sources, options)):
        options = replace(options, processor=None)
    reading = Reading(sources, options.schema, say=progress.say, share=share)
    check_processor(options.processor, reading.mapper)
    columns = stored_columns(options, reading.mapper)
    format = ShardFormat(columns, shard_bytes=options.most_shard_bytes, compression=options.compression)
    storage = encoded.storage
    folder = storage.folder.absolute() if isinstance(storage, LocalStorage) else scratch
    (scratch / "sources").mkdir(parents=True, exist_ok=True)
    encoder = unit_encoder(folder, format, options)
    keeper = UnitKeeper(encoder=encoder, storage=storage, first_rows=[each.first_row for each in sources])
    num_workers = execution.num_workers_for(workers, total // options.unit_bytes // part.count)
    settings: dict[str, Any] = {"name": task_name, "on_progress": counted.advance, "marks": encoded.marks(part)}
    with closing(reading), workers.open_pool(Job(keeper, ()), num_workers, **settings) as pool:
        told = {"on_bytes": counted.advance, "on_rows": progress.rows}
        Run(pool, reading, kept, num_workers=num_workers, **told).go()
    counted.finish()
    return kept, reading.num_units
