"""Lists of left-out samples on disk, JSON lines: appended by workers at once, read by a run that begins.

A line is a left-out sample, and in "dataset" the identity of the dataset whose sample it is (see StoredDataset): in
another one that number names another sample.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError, StorageError
from ..mds.listed_samples import DATASET
from ..plan.left_out import LeftOut, LeftOutSample, left_out_sample


@dataclass(frozen=True, slots=True)
class ListedLeftOut:
    """What the lists of a folder hold: samples of the datasets that are read, and the names of those of others."""

    left_out: LeftOut
    of_others: tuple[str, ...]


def append_left_out(folder: Path, sample: LeftOutSample, *, dataset: str, rank: int, worker: int) -> None:
    """Add a sample to a worker's list, and return once it is on disk. dataset: its identity. Raises StorageError."""
    line = (json.dumps(asdict(sample) | {DATASET: dataset}) + "\n").encode()
    path = folder / f"rank-{rank}-worker-{worker}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            _remove_unfinished_line(file)
            if os.write(file, line) != len(line):
                raise OSError("the line was written in part")
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise StorageError(f"{path} cannot be appended to ({error}): make room, or correct its permissions") from error


def _remove_unfinished_line(file: int) -> None:
    """Remove what a full disk or a kill left of a last line: the next line would join it."""
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.ftruncate(file, os.pread(file, size, 0).rfind(b"\n") + 1)


def read_left_out(folder: Path, identities: Mapping[str, str]) -> ListedLeftOut:
    """What the workers of earlier starts left out; an unfinished last line of a file is passed over.

    identities: of the datasets that are read, by the names of their sources. DataError for any other line that is no
    left-out sample.
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
        raise DataError(f"{entry!r} does not say of which {DATASET} it is")
    dataset = entry.pop(DATASET)
    return left_out_sample(entry), dataset


def write_left_out(path: Path, left_out: LeftOut, identities: Mapping[str, str]) -> None:
    """Write a list whole: a run whose `drop` names it leaves out the same samples.

    identities: as in read_left_out. Of sources that have none there, lines say no dataset.
    """
    new = path.with_name(f"{path.name}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (_with_dataset(each, identities) for each in left_out.state_dict())
    new.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    new.replace(path)


def _with_dataset(entry: dict[str, Any], identities: Mapping[str, str]) -> dict[str, Any]:
    identity = identities.get(entry["source"])
    return entry if identity is None else entry | {DATASET: identity}
