"""Check a stored dataset against its description: index, description, shards, lengths. dataset -> all its problems."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ...errors import ConfigError, LengthsError, ObjectMissingError, ShardError, StorageError
from ...mds.filled_folder import filled_from
from ...mds.index import DATASET_NAME, INDEX_NAME, ShardInfo, no_dataset, parse_index, read_if_there
from ...mds.lengths import KINDS, LengthIndex, lengths_names, patches_name
from ...mds.provenance import PROVENANCE_NAME, Provenance
from ...processes.pool import check_num_workers, num_cores
from ...processors.base import Processor, processor_fingerprint
from ...processors.text import TokensProcessor
from ...storage.local import LocalStorage
from ...storage.storage import Storage, open_storage
from ..rows.schemas import READ_SCHEMAS
from .catalog import (
    columns_of,
    known_fingerprints,
    listed_fingerprints,
    local_file,
    open_lengths,
    parse_dataset,
    schema_of,
)
from .verify_shards import Problem, ShardChecker, check_shards

NUM_THREADS = 8  # checks mostly wait for the store
_CHUNK = 1 << 20  # lengths checked together
_INDEX_AGAIN = "write it again with lmms-stream index"


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """Extent and problems of a check. notes: parts that were not checked, with reasons."""

    num_shards: int
    num_samples: int
    num_bytes: int
    num_lengths_indexes: int
    num_problems: int
    seconds: float
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


def verify_dataset(
    remote: str,
    *,
    deep: bool = False,
    processor: Processor | None = None,
    num_workers: int | None = None,
    on_start: Callable[[int], None] = lambda count: None,
    on_shard: Callable[[], None] = lambda: None,
) -> VerifyReport:
    """Check all parts of a dataset at a folder or URL, and continue after each problem.

    deep: also decode every sample, process it with `processor` (not needed for tokens), and compare its length with the
    lengths index. num_workers: shards checked at once, each with its copy in a temporary folder if it must be
    downloaded or decompressed (default: 8 threads; for deep, a process per core, and a script needs `if __name__ ==
    "__main__":` around the call). on_start, on_shard: called with the number of shards, and after each checked shard.
    Raises StorageError without a dataset, ConfigError for a processor without deep; WorkerError.
    """
    if processor is not None and not deep:
        raise ConfigError("samples are measured by a deep check only: pass --deep as well, or leave --tokenizer out")
    check_num_workers(num_workers)
    started = time.monotonic()
    storage = open_storage(remote)
    problems: list[Problem] = []
    notes: list[str] = []
    shards, dataset = _read_description(storage, problems, notes)
    dataset = _without_missing(storage, dataset, notes)
    num_unsure = sum(info.checksum is None and info.zip_checksum is None for info in shards)
    if num_unsure:
        notes.append(
            f"{num_unsure} of {len(shards)} shards have no checksum, so changed bytes are not found: MDSWriter writes "
            "checksums with hashes=['xxh3_64']"
        )
    on_start(len(shards))
    processor = _measured_by(processor, schema_of(shards, dataset), url=storage.url)
    num_samples = sum(info.num_samples for info in shards)
    with TemporaryDirectory(prefix="lmms_stream-verify-", ignore_cleanup_errors=True) as folder:
        indexes = dict(_lengths_indexes(storage, shards, dataset, processor, problems, folder=Path(folder)))
        if shards:
            problems += _wrong_provenance(storage, num_samples, folder=Path(folder))
        problems += _missing_files(storage, dataset, indexes, folder=Path(folder))
        checker = ShardChecker(
            storage=storage,
            folder=Path(folder),
            deep=deep,
            schema=schema_of(shards, dataset),
            processor=processor if deep else None,
            lengths=_arrays_of(indexes, processor, num_samples=num_samples),
        )
        if deep and processor is None and indexes:
            notes.append("the lengths were not compared with those of the samples: pass --tokenizer")
        if num_workers is None:
            num_workers = num_cores() if deep else NUM_THREADS
        if shards:
            workers = min(num_workers, len(shards))
            problems += check_shards(checker, shards, num_workers=workers, on_shard=on_shard)
    return VerifyReport(
        num_shards=len(shards),
        num_samples=num_samples,
        num_bytes=sum(info.zip_size or info.size for info in shards),
        num_lengths_indexes=len(indexes),
        num_problems=len(problems),
        seconds=time.monotonic() - started,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _measured_by(processor: Processor | None, schema: str | None, *, url: str) -> Processor | None:
    """Return the processor that measures the samples; stored tokens have their own. ConfigError for a wrong schema."""
    if processor is None:
        return TokensProcessor() if schema == TokensProcessor.schema else None
    if schema is not None and processor.schema != schema:
        raise ConfigError(f"{url} holds {schema}, and this processor reads {processor.schema}: leave --tokenizer out")
    return processor


def _read_description(
    storage: Storage, problems: list[Problem], notes: list[str]
) -> tuple[list[ShardInfo], dict[str, Any] | None]:
    """Return the shards in index.json, and dataset.json; [] and None for unreadable or unsafe files."""
    index, described = (read_if_there(storage, name) for name in (INDEX_NAME, DATASET_NAME))
    if index is None and described is None:
        raise no_dataset(storage)
    shards: list[ShardInfo] = []
    dataset = None
    if index is None:
        problems.append(Problem(INDEX_NAME, "is missing, so no shard was checked: convert the dataset again"))
    else:
        try:
            refused: dict[str, str] = {}
            shards = parse_index(index, source=INDEX_NAME, refused=refused)
            problems += [
                Problem(INDEX_NAME, f"{_after(what, INDEX_NAME)}; the other columns were checked")
                for what in refused.values()
            ]
            if not any(info.num_samples for info in shards):
                what = "lists no sample, so nothing can be read from it: convert the dataset again"
                problems.append(Problem(INDEX_NAME, what))
        except ShardError as error:
            problems.append(Problem(INDEX_NAME, f"{_after(error, INDEX_NAME)}; no shard was checked"))
    if described is None:
        notes.append(f"there is no {DATASET_NAME}: a plain MDS dataset, checked by its {INDEX_NAME} alone")
        return shards, None
    try:
        dataset = parse_dataset(described, source=DATASET_NAME)
        if shards:
            problems += [Problem(DATASET_NAME, what) for what in _disagreements(dataset, shards)]
            shards = _with_listed_checksums(shards, dataset)
    except ShardError as error:
        problems.append(Problem(DATASET_NAME, _after(error, DATASET_NAME)))
    return shards, dataset


def _without_missing(storage: Storage, dataset: dict[str, Any] | None, notes: list[str]) -> dict[str, Any] | None:
    """Return the description without files missing in a folder that is filled from another place on demand."""
    if dataset is None or not isinstance(storage, LocalStorage) or (source := filled_from(storage.folder)) is None:
        return dataset
    missing = {name for name in dataset["other_files"] if not (storage.folder / name).exists()}
    if missing:
        notes.append(
            f"{', '.join(sorted(missing))}: not here, as this folder is filled from {source} with files that are read: "
            f"verify {source} to check them"
        )
    return {
        **dataset,
        "other_files": [name for name in dataset["other_files"] if name not in missing],
        "lengths": [each for each in dataset["lengths"] if lengths_names(each)[1] not in missing],
    }


def _after(error: Exception | str, name: str) -> str:
    return str(error).removeprefix(name).lstrip(": ")


def _disagreements(dataset: Mapping[str, Any], shards: Sequence[ShardInfo]) -> Iterator[str]:
    """Yield the differences between dataset.json and index.json."""
    remedy = "they are of two conversions; convert the dataset again"
    if dataset.get("version") != 1:
        yield f"has the version {dataset.get('version')!r}, expected 1: use a newer lmms_stream"
    num_samples = sum(info.num_samples for info in shards)
    if dataset.get("num_samples") != num_samples:
        yield f"says {dataset.get('num_samples')!r} samples, {INDEX_NAME} {num_samples}: {remedy}"
    if dataset.get("columns") != columns_of(shards):
        yield f"says the columns {dataset.get('columns')!r}, {INDEX_NAME} {columns_of(shards)!r}: {remedy}"
    if dataset.get("schema") in READ_SCHEMAS and dataset["schema"] != schema_of(shards, dataset):
        yield f"says the schema {dataset['schema']!r}, which the columns do not fit: {remedy}"
    listed = {shard["name"]: shard for shard in dataset["shards"]}
    for info in shards:
        shard = listed.pop(info.name, None)
        if shard is None:
            yield f"does not list {info.name}, {INDEX_NAME} does: {remedy}"
            continue
        said: dict[str, int | str] = {"size": info.size, "num_samples": info.num_samples}
        algorithm, _, digest = (info.checksum or "").partition(":")
        if algorithm == "xxh3_64" and "xxh3_64" in shard:
            said["xxh3_64"] = digest
        for key, value in said.items():
            if shard.get(key) != value:
                yield f"says {key} {shard.get(key)!r} of {info.name}, {INDEX_NAME} {value!r}: {remedy}"
    for name in listed:
        yield f"lists {name}, {INDEX_NAME} does not: {remedy}"
    names = [shard["name"] for shard in dataset["shards"]]
    ours = [info.name for info in shards]
    if names != ours and sorted(names) == sorted(ours):
        yield f"lists the shards in another order than {INDEX_NAME}: {remedy}"


def _with_listed_checksums(shards: Sequence[ShardInfo], dataset: Mapping[str, Any]) -> list[ShardInfo]:
    """Return the shards with checksums of dataset.json if index.json has none."""
    listed = {shard["name"]: shard.get("xxh3_64") for shard in dataset["shards"]}
    return [
        replace(info, checksum=f"xxh3_64:{listed[info.name]}")
        if info.checksum is None and listed.get(info.name)
        else info
        for info in shards
    ]


def _lengths_indexes(
    storage: Storage,
    shards: Sequence[ShardInfo],
    dataset: Mapping[str, Any] | None,
    processor: Processor | None,
    problems: list[Problem],
    *,
    folder: Path,
) -> Iterator[tuple[str, LengthIndex]]:
    """Yield fingerprint and index of all valid lengths indexes; invalid indexes become problems."""
    listed = listed_fingerprints(storage, dataset)
    asked = None if processor is None else processor_fingerprint(processor)
    known = known_fingerprints(shards)
    for fingerprint in dict.fromkeys([*listed, *known, *([asked] if asked else [])]):
        array_name, description_name = lengths_names(fingerprint)
        try:
            index = open_lengths(storage, fingerprint, folder=folder)
        except (LengthsError, StorageError) as error:
            problems.append(Problem(array_name, _after(error, array_name)))
            continue
        if index is not None:
            problems += [Problem(array_name, what) for what in _wrong_lengths(storage, index, description_name, shards)]
            yield fingerprint, index
        elif fingerprint in listed:
            problems.append(Problem(description_name, f"is missing, {DATASET_NAME} lists it: {_INDEX_AGAIN}"))
        elif fingerprint not in known:
            problems.append(
                Problem(
                    description_name,
                    "is missing: the dataset has no lengths index for this tokenizer; pass the one that measured it, "
                    "or write one with lmms-stream index",
                )
            )


def _wrong_lengths(
    storage: Storage, index: LengthIndex, description_name: str, shards: Sequence[ShardInfo]
) -> Iterator[str]:
    num_samples = sum(info.num_samples for info in shards)
    if shards and len(index.lengths) != num_samples:
        yield f"has {len(index.lengths)} lengths, the dataset {num_samples} samples: {_INDEX_AGAIN}"
    total = 0
    for start in range(0, len(index.lengths), _CHUNK):
        lengths = np.asarray(index.lengths[start : start + _CHUNK])
        if not lengths.all():
            yield f"gives sample {start + int(np.argmin(lengths != 0))} a length of 0: {_INDEX_AGAIN}"
            break
        total += int(lengths.sum(dtype=np.int64))
    else:
        described = json.loads(storage.read(description_name))
        if described.get("num_tokens", total) != total:
            yield f"has {total} tokens, {description_name} says {described['num_tokens']!r}: {_INDEX_AGAIN}"
        of_kinds = sum((index.num_tokens_of or {KINDS[0]: total}).values())
        if of_kinds != total:
            yield f"has {total} tokens, {description_name} says {of_kinds} of text and media: {_INDEX_AGAIN}"
        said = described.get("num_patches")
        if index.patches is not None and said != index.num_patches:
            yield f"has {index.num_patches} patches, {description_name} says {said!r}: {_INDEX_AGAIN}"
    index.release()


def _wrong_provenance(storage: Storage, num_samples: int, *, folder: Path) -> Iterator[Problem]:
    """Yield the problems of the provenance files, if any."""
    try:
        provenance = Provenance.of(storage, folder)
        if provenance is not None and provenance.num_samples != num_samples:
            what = f"names the rows of {provenance.num_samples} samples, the dataset has {num_samples}"
            yield Problem(PROVENANCE_NAME, f"{what}: convert the dataset again")
        elif provenance is not None:
            provenance.check()
    except (ShardError, StorageError) as error:
        yield Problem(PROVENANCE_NAME, _after(error, f"{storage.url}/{PROVENANCE_NAME}"))


def _arrays_of(
    indexes: Mapping[str, LengthIndex], processor: Processor | None, *, num_samples: int
) -> list[Path] | None:
    """Return the files with the stored lengths and patches for the processor; None if a sample has no length."""
    index = None if processor is None else indexes.get(processor_fingerprint(processor))
    if index is None or len(index.lengths) != num_samples:
        return None
    arrays = [index.lengths] if index.patches is None else [index.lengths, index.patches]
    return [Path(array.filename) for array in arrays]  # type: ignore[attr-defined]


def _missing_files(
    storage: Storage, dataset: Mapping[str, Any] | None, indexes: Mapping[str, LengthIndex], *, folder: Path
) -> Iterator[Problem]:
    """Yield a problem for each other file that dataset.json lists and that is missing or unreadable."""
    if dataset is None:
        return
    keys = {*indexes, *dataset["lengths"]}
    seen = {INDEX_NAME, PROVENANCE_NAME, *(name for key in keys for name in (*lengths_names(key), patches_name(key)))}
    for name in dataset["other_files"]:
        if name in seen:
            continue
        try:
            path = local_file(storage, name, folder)
        except ObjectMissingError:
            yield Problem(name, f"is missing, {DATASET_NAME} lists it: convert the dataset again")
        except StorageError as error:
            yield Problem(name, f"cannot be read ({error}): correct that and verify again")
        else:
            if path.is_relative_to(folder):
                path.unlink()
