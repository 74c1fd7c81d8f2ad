"""Lists of samples for a run to leave out: lines -> sources and ids."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError, DataError, StorageError
from ..mds.provenance import DATASET, ListedSample, listed_samples
from ..plan.left_out import LeftOut, LeftOutSample, left_out_sample


@dataclass(frozen=True, kw_only=True, slots=True)
class DropList:
    """A file of samples to leave out from a step on; the cursor counts steps from 0."""

    file: str
    from_step: int = 0

    def __post_init__(self) -> None:
        if self.from_step < 0:
            raise ConfigError(f"from_step of the drop list {self.file} must be 0 or more, got {self.from_step}")


class HasSamples(Protocol):
    """A dataset with named samples: a PackedDataset."""

    @property
    def num_samples(self) -> int: ...

    @property
    def identity(self) -> str: ...

    def sample_named(self, stream: str, number: int) -> int | None:
        """Return the id of a sample of a stream; None for another name, or a number beyond its samples."""
        ...

    def samples_of(self, file: str, row: int) -> list[int]:
        """Return the ids of samples made from a row of a file; ConfigError if the dataset was not made of this file."""
        ...


Drop = str | Mapping[str, int] | Sequence[DropList | Mapping[str, Any]]


def drop_lists(drop: Drop | None) -> list[DropList]:
    """Return the lists of a setting: a file, the first step of each file, or DropLists; else raise ConfigError."""
    if drop is None:
        return []
    if isinstance(drop, str):
        return [DropList(file=drop)]
    if isinstance(drop, Mapping):
        return [DropList(file=file, from_step=step) for file, step in drop.items()]
    try:
        return [each if isinstance(each, DropList) else DropList(**each) for each in drop]
    except TypeError as error:
        raise ConfigError(f"drop must be a file, {{FILE: STEP}}, or a list of {{file, from_step}}: {error}") from error


def first_steps(drop: Any) -> Any:
    """Convert a list of {file, from_step} to the first step of each file; return other values unchanged."""
    if not isinstance(drop, list):
        return drop
    latest_first = sorted(drop_lists(drop), key=lambda each: -each.from_step)
    return {each.file: each.from_step for each in latest_first}


def dropped(drop: Drop | None, datasets: Mapping[str, HasSamples]) -> LeftOut:
    """Read the samples of drop lists.

    A line is `SOURCE:ID` or the `ID` of the only source; `STREAM:ID`, a sample of a source's stream; `FILE:ROW`, a row
    of a converted file, rows counted from 1; or JSON with source and sample_id, from the list written by a run. Empty
    lines and lines that begin with # are ignored. ConfigError for an unreadable file, for
    unknown names, and for a line written by a run for another dataset.
    """
    found = LeftOut()
    for each in drop_lists(drop):
        for listed in listed_samples(each.file):
            for source, sample_id in _named(listed, datasets):
                reason = f"listed in {each.file}"
                found.add(LeftOutSample(source, sample_id, reason, each.from_step, "dropped"))
    return found


def located(datasets: Mapping[str, HasSamples], stream: str, number: int) -> Iterator[tuple[str, int]]:
    """Yield source and id of a stream's sample; nothing for an unknown stream or number."""
    for source, each in datasets.items():
        if (sample_id := each.sample_named(stream, number)) is not None:
            yield source, sample_id


def _named(listed: ListedSample, datasets: Mapping[str, HasSamples]) -> list[tuple[str, int]]:
    name, number, where = listed.name, listed.number, listed.where
    if not name and not listed.is_id and len(datasets) == 1:
        return [_checked(next(iter(datasets)), number, datasets, where=where)]
    if listed.is_id:
        _check_dataset(listed, datasets)
    if name not in datasets and (of_stream := [*located(datasets, name, number)]):
        return of_stream
    if listed.is_id or name in datasets:
        return [_checked(name, number, datasets, where=where)]
    return _of_row(name, number, datasets, where=where)


def _checked(source: str, sample_id: int, datasets: Mapping[str, HasSamples], *, where: str) -> tuple[str, int]:
    if source not in datasets:
        raise ConfigError(f"{where}: there is no source {source!r}: the sources are {', '.join(datasets)}")
    num_samples = datasets[source].num_samples
    if not 0 <= sample_id < num_samples:
        raise ConfigError(f"{where}: {source} has no sample {sample_id}: it has {num_samples}, counted from 0")
    return source, sample_id


def _check_dataset(listed: ListedSample, datasets: Mapping[str, HasSamples]) -> None:
    """Raise ConfigError if a line names another dataset than the source's."""
    source = listed.name
    if listed.dataset is None or source not in datasets or (identity := datasets[source].identity) == listed.dataset:
        return
    raise ConfigError(
        f"{listed.where}: the sample is of a dataset {listed.dataset}, and {source} is {identity}, with other sample "
        "numbers: list rows of the original files (FILE:ROW), or leave out the list"
    )


def _of_row(file: str, row: int, datasets: Mapping[str, HasSamples], *, where: str) -> list[tuple[str, int]]:
    if row < 1:
        raise ConfigError(f"{where}: {file}:{row}: rows are counted from 1")
    found, reasons = [], []
    for source, dataset in datasets.items():
        try:
            found += [(source, sample_id) for sample_id in dataset.samples_of(file, row)]
        except ConfigError as error:
            reasons.append(f"{source}: {error}")
    if not found:
        raise ConfigError(
            f"{where}: {file}:{row} is no sample: the sources are {', '.join(datasets)}, and as a row of a file "
            f"{'; '.join(reasons) or 'it was made into none'}"
        )
    return found


# Lists of left-out samples on disk, JSON lines: appended by workers immediately, read at the start of a run.
#
# A line is a left-out sample, with the identity of its dataset in "dataset" (see StoredDataset): in
# another dataset the number names another sample.


@dataclass(frozen=True, slots=True)
class ListedLeftOut:
    """Contents of the lists in a folder: samples of this run's datasets, and names of samples of other datasets."""

    left_out: LeftOut
    of_others: tuple[str, ...]


def append_left_out(folder: Path, sample: LeftOutSample, *, dataset: str, rank: int, worker: int) -> None:
    """Append a sample to a worker's list on disk, and sync the file. dataset: identity. Raises StorageError."""
    line = (json.dumps(asdict(sample) | {DATASET: dataset}) + "\n").encode()
    path = folder / f"rank-{rank}-worker-{worker}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":  # a full disk or a kill left an unfinished last line
                os.ftruncate(file, os.pread(file, size, 0).rfind(b"\n") + 1)
            if os.write(file, line) != len(line):
                raise OSError("the line was written in part")
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise StorageError(f"{path} cannot be appended to ({error}): make room, or correct its permissions") from error


def read_left_out(folder: Path, identities: Mapping[str, str]) -> ListedLeftOut:
    """Read the samples left out by workers of earlier starts; an unfinished last line of a file is ignored.

    identities: identity of each source's dataset. DataError for any other line without a left-out sample.
    """
    found, others = LeftOut(), dict[str, None]()
    for path in sorted(folder.glob("rank-*-worker-*.jsonl")):
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], 1):
            try:
                sample, dataset = _parsed(line)
            except (ValueError, DataError) as error:
                raise DataError(f"{path}, line {number}: {error}; correct the line or remove the file") from error
            if identities.get(sample.source) == dataset:
                found.add(sample)
            else:
                others[sample.name] = None
    return ListedLeftOut(found, tuple(others))


def _parsed(line: bytes) -> tuple[LeftOutSample, str]:
    entry: Any = json.loads(line)
    if not isinstance(entry, dict) or not isinstance(entry.get(DATASET), str):
        raise DataError(f"{entry!r} has no {DATASET}")
    dataset = entry.pop(DATASET)
    return left_out_sample(entry), dataset


def write_left_out(path: Path, left_out: LeftOut, identities: Mapping[str, str]) -> None:
    """Write a complete list: a run with the list in `drop` leaves out the same samples.

    identities: as in read_left_out; lines of sources without an identity name no dataset.
    """
    new = path.with_name(f"{path.name}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    of_source = {source: {DATASET: identity} for source, identity in identities.items()}
    lines = (each | of_source.get(each["source"], {}) for each in left_out.state_dict())
    new.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    new.replace(path)
