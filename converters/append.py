"""New sources -> a part next to a dataset's own shards, and one index over both.

The dataset's `_lmms/dataset.json` lists its sources; append passes over these sources. A killed command leaves the old
dataset or the new dataset, and the same command resumes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, StorageError
from ..mds.index import DATASET_NAME, no_dataset
from ..processes.engine import RAY_TIMEOUT_S
from ..storage.storage import Storage, open_storage
from .columns import with_processor
from .convert import Execution, Progress, convert_sources, folders_of, look
from .dropping import dropped_rows
from .identity import check_targets, described, identity_of
from .options import ConvertOptions, changed
from .repeats import SETTINGS, SourceRecord, check_same_bytes, has_rows_of, interval, is_copy, overlap, shown, without
from .report import ConvertReport
from .rows.options import SchemaOptions
from .sources.table import TableSource
from .sources.units import Source
from .stored.appending import finish_growth, grow, part_name, parts_of
from .writing.work import digest_of, only_writer, options_of, read_claim, read_described

_SHOWN = 5  # sources in a message
_SHOWN_CHARACTERS = 80  # of an option


@dataclass(frozen=True, kw_only=True, slots=True)
class AppendReport:
    """Result of `append`. part: the new folder below the dataset; None if the dataset already had all sources.

    num_samples: of the grown dataset, all splits together. dropped: parts of the dataset that could not be kept, with
    the reasons.
    """

    num_new_sources: int
    num_known_sources: int
    num_samples: int
    part: str | None
    converted: ConvertReport | None
    seconds: float
    dropped: tuple[str, ...] = ()


def append(
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
) -> AppendReport:
    """Convert the `sources` that the dataset at `target` does not have yet; add their samples behind the dataset's own.

    sources: only names. The other arguments are the arguments of `convert`; SchemaOptions has map and filter by name.
    The options must equal the dataset's options, except the options for reading files, for the number of rows, for the
    order of the new samples, and for filling shards. overwrite: restart an unfinished part of other sources; the
    dataset is never overwritten.

    Raise the errors of `convert`, and ConfigError for other options and for changed sources.
    """
    started = time.monotonic()
    num_workers = changes.pop("workers", num_workers)
    options = changed(options, changes)
    execution = Execution(
        num_workers=num_workers,
        overwrite=overwrite,
        work=work,
        progress=progress or Progress(),
        engine=engine,
        ray_address=ray_address,
        ray_timeout_s=ray_timeout_s,
    )
    folders = folders_of(target, options)
    targets = [open_storage(folder) for folder in folders]
    with only_writer(targets[0].url):
        for each in targets:
            finish_growth(each)
        datasets = _caught_up(targets)
        part = part_name(1 + len(parts_of(datasets[0])))
        scratch = execution.scratch(f"{targets[0].url}/{part}")
        opened = look(sources, scratch, options=options, target=target)
        check_targets(opened, targets)
        options = with_processor(options, opened)
        new, known = _new_sources(opened, targets, datasets, options)
        if all(_is_empty(source) for source in new):
            new, known = [], [*known, *(source.name for source in new)]
        if known:
            execution.progress.say(f"{_named(known)}: in {target} already, passed over")
        if not new:
            return AppendReport(
                num_new_sources=0,
                num_known_sources=len(known),
                num_samples=sum(dataset["num_samples"] for dataset in datasets),
                part=None,
                converted=None,
                seconds=time.monotonic() - started,
            )
        wanted = {_key(each) for each in described(new)}
        parts = [f"{storage.url}/{part}" for storage in targets]
        overwrite = overwrite or _are_nobodys(parts, digest_of(identity_of(new, options, dropped_rows(new, options))))
        converted = convert_sources(
            lambda scratch: _chosen(look(sources, scratch, options=options, target=target), wanted),
            parts,
            options=options,
            execution=replace(execution, overwrite=overwrite),
            columns=datasets[0]["columns"],
        )
        dropped = [text for storage in targets for text in grow(storage, part)]
        return AppendReport(
            num_new_sources=len(new),
            num_known_sources=len(known),
            num_samples=sum(dataset["num_samples"] for dataset in datasets) + converted.num_rows,
            part=part,
            converted=converted,
            seconds=time.monotonic() - started,
            dropped=tuple(dict.fromkeys(dropped)),
        )


def new_sources(opened: Sequence[Source], target: str, options: ConvertOptions) -> list[Source]:
    """Return the sources without any rows in the dataset at `target`.

    Raise ConfigError for options other than the dataset's, for a source that changed since its conversion, and for a
    source of which the dataset has only a part; StorageError if the dataset is missing or incomplete.
    """
    storages = [open_storage(folder) for folder in folders_of(target, options)]
    return _new_sources(opened, storages, [_dataset_at(storage) for storage in storages], options)[0]


def _new_sources(
    opened: Sequence[Source],
    storages: Sequence[Storage],
    datasets: Sequence[Mapping[str, Any]],
    options: ConvertOptions,
) -> tuple[list[Source], list[str]]:
    """Return the new sources, and the names of the known sources."""
    identity = identity_of(opened, options)
    for storage, dataset in zip(storages, datasets, strict=True):
        _check_options(dataset, identity, url=storage.url)
    return _unknown(opened, datasets[0]["source"], options, url=storages[0].url)


def _dataset_at(storage: Storage) -> dict[str, Any]:
    """Return the dataset.json of a target; StorageError if no finished conversion wrote a dataset there."""
    dataset = read_described(storage, DATASET_NAME)
    if read_claim(storage) is not None:
        raise StorageError(
            f"{storage.url} holds an unfinished conversion: run the command that began it to its end, then append"
        )
    if dataset is None:
        raise no_dataset(storage)
    if "options" not in dataset:
        raise ConfigError(
            f"{storage.url} has no record of its conversion options (because of a merge, or an earlier release): "
            "convert the new sources to a new dataset, and merge both in the folder above"
        )
    return dataset


def _caught_up(targets: Sequence[Storage]) -> list[dict[str, Any]]:
    """Return the datasets at all targets, after every split has taken in the same parts.

    A command may be killed after only some splits have taken in their part: the other splits take in theirs first.
    """
    datasets = [_dataset_at(target) for target in targets]
    counts = [len(parts_of(dataset)) for dataset in datasets]
    for number, (target, count) in enumerate(zip(targets, counts, strict=True)):
        if count < max(counts):
            grow(target, part_name(count + 1))
            datasets[number] = _dataset_at(target)
    return datasets


def _check_options(dataset: Mapping[str, Any], identity: Mapping[str, Any], *, url: str) -> None:
    then, now = _flat(dataset["options"]), _flat(options_of(identity))
    code, code_now = then.pop("code", {}), now.pop("code", {})
    changed = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    if changed:
        told = "; ".join(f"{name} was {_shown(then.get(name))}, now {_shown(now.get(name))}" for name in changed)
        raise ConfigError(
            f"{url} was converted with other options ({told}): append with the same options, or convert to another "
            "target"
        )
    # Rows converted before do not depend on functions that only new sources name.
    others = sorted(name for name in code_now if code.get(name, code_now[name]) != code_now[name])
    if others:
        raise ConfigError(
            f"{url} was converted with other code of {', '.join(others)}: restore this code, or give the code for the "
            "new sources another name"
        )


def _flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by name, with the options of rows at the same level."""
    rows = dict(options["schema"])
    return {**options, "kind": rows.pop("schema"), **rows, "schema": None}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _unknown(
    opened: Sequence[Source], known: Sequence[Mapping[str, Any]], options: ConvertOptions, *, url: str
) -> tuple[list[Source], list[str]]:
    """Return the sources with rows outside of the known sources; and the names of the other sources.

    known: sources as a dataset describes them. A name is followed by the name of the known source with the same rows,
    if the two differ. A known source behind the end of a limit has no rows in the dataset, so the source may change;
    append passes over it only if the limit is the same and ends before the source again.
    """
    at: dict[str, list[SourceRecord]] = {}
    of_size: dict[Any, list[SourceRecord]] = {}
    untouched: dict[str, list[SourceRecord]] = {}
    for each in map(SourceRecord, known):
        if each.is_untouched:
            untouched.setdefault(each.place, []).append(each)
            continue
        at.setdefault(each.place, []).append(each)
        of_size.setdefault(each.said.get("size"), []).append(each)
    new, there, has_ended = [], [], False
    for source, said in zip(opened, map(SourceRecord, described(opened)), strict=True):
        same = at.get(said.place, [])
        if any(each.content_said != said.content_said for each in same):
            raise ConfigError(
                f"{source.name} was changed since it was converted to {url}: put its new rows into a file of their "
                "own, or convert all sources again with --overwrite"
            )
        check_same_bytes([source], [each.said for each in same], url=url)
        same = [each for each in same if said.is_read_as(each)]
        if options.allow_repeats:
            is_there = any(_is_as_asked(each, said, options.limit) and each.at == said.at for each in same)
        else:
            same = [each for each in same if each.at == said.at or has_rows_of(source, each, options.schema)]
            same = same or _copied(source, said, of_size.get(said.said.get("size"), []), options.schema, url=url)
            is_there = bool(same) and _is_held(source, said, same, options.limit, url=url)
        if is_there:
            has_ended = has_ended or any(each.said.get("limit", -1) == options.limit for each in same)
        elif has_ended:
            same = [each for each in untouched.get(said.place, []) if _is_untouched_again(each, said, options.limit)]
            is_there = bool(same)
        if is_there:
            there.append(source.name if same[0].at == said.at else f"{source.name} (as {same[0].name})")
        else:
            new.append(source)
    return new, there


def _is_empty(source: Source) -> bool:
    """Whether a source is a file of a folder or glob without rows, which is passed over."""
    return isinstance(source, TableSource) and source.is_part and not source.has_rows


def _copied(
    source: Source, said: SourceRecord, known: Sequence[SourceRecord], schema: SchemaOptions, *, url: str
) -> list[SourceRecord]:
    """Return the known sources with the rows of a source at another place."""
    found = [(each, is_same) for each in known if (is_same := is_copy(said, each)) is not False]
    found = [(each, is_same) for each, is_same in found if said.is_read_as(each) and has_rows_of(source, each, schema)]
    for each, is_same in found:
        if is_same is None:
            raise ConfigError(
                f"{said.name} has the size of {each.name}, from which {url} was converted and which is gone or changed "
                "now, and agrees with a sample of its content: leave it out, or pass --allow-repeats to add it"
            )
    return [each for each, _ in found]


def _is_as_asked(known: SourceRecord, said: SourceRecord, limit: int | None) -> bool:
    """Return whether the same rows are requested: the same slice, and the same limit if a limit ended in the source."""
    if "limit" in known.said:
        return bool(known.said["limit"] == limit and known.rows.start == (said.rows.start or 0))
    return bool(known.said.get("rows") == said.said.get("rows"))


def _is_untouched_again(known: SourceRecord, said: SourceRecord, limit: int | None) -> bool:
    """Whether a source with the content, settings and slice of a known one is asked for with the limit of then."""
    is_same = known.at == said.at and known.content_said == said.content_said and said.is_read_as(known)
    return is_same and _is_as_asked(known, said, limit)


def _is_held(source: Source, said: SourceRecord, known: Sequence[SourceRecord], limit: int | None, *, url: str) -> bool:
    """Return whether known sources of the same content have all rows of a source; ConfigError for only some rows."""
    if any("rows" not in each.said or _is_as_asked(each, said, limit) for each in known):
        return True
    num_rows = source.num_rows if isinstance(source, TableSource) else lambda: 0
    rows = interval(said.rows, num_rows)
    taken = [interval(each.rows, num_rows) for each in known]
    if not any(overlap(rows, each) for each in taken):
        return False
    whole = rows if rows[1] is not None else (rows[0], num_rows())
    left = [each for each in without(rows, taken) if overlap(each, whole)]
    if not left:
        return True
    some = [each for each, (start, stop) in zip(known, taken, strict=True) if stop is None or stop > start]
    slices = ", ".join(dict.fromkeys(str(each).removeprefix(each.name) for each in some))
    rest = " ".join(f"{source.name}{shown(each)}" for each in left)
    if "rows" not in said.said:
        raise ConfigError(f"{source.name} is in {url} in part ({slices}): name the remaining rows as a slice, {rest}")
    raise ConfigError(
        f"{said} has rows that are already in {url} ({slices}): name only the other rows, {rest}, or pass "
        "--allow-repeats to store rows more than once"
    )


def _key(said: Mapping[str, Any]) -> str:
    return json.dumps([said.get(name) for name in ("name", "rows", *SETTINGS)], sort_keys=True)


def _chosen(opened: Sequence[Source], wanted: set[str]) -> list[Source]:
    return [source for source, said in zip(opened, described(opened), strict=True) if _key(said) in wanted]


def _are_nobodys(parts: Sequence[str], identity: str) -> bool:
    """Return whether finished datasets of other sources are at the places of the parts; these datasets may be replaced.

    They are left by a command that was killed before the dataset took them in, if the next command names other sources.
    """
    storages = [open_storage(part) for part in parts]
    found = [read_described(storage, DATASET_NAME) for storage in storages]
    is_other = any(dataset is not None and dataset.get("asked") != identity for dataset in found)
    return is_other and all(read_claim(storage) is None for storage in storages)


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else "")
