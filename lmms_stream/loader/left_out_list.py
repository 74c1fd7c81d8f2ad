"""Lists of left-out samples on disk, JSON lines: appended by workers at once, read by a run that begins."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from ..errors import DataError, StorageError
from ..plan.left_out import LeftOut, LeftOutSample, left_out_sample


def append_left_out(folder: Path, sample: LeftOutSample, *, rank: int, worker: int) -> None:
    """Add a sample to a worker's list, and return once it is on disk. Raises StorageError."""
    line = (json.dumps(asdict(sample)) + "\n").encode()
    path = folder / f"rank-{rank}-worker-{worker}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if os.write(file, line) != len(line):
                raise OSError("the line was written in part")
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise StorageError(f"{path} cannot be appended to ({error}): make room, or correct its permissions") from error


def read_left_out(folder: Path) -> LeftOut:
    """What the workers of earlier starts left out; an unfinished last line of a file is passed over.

    DataError for any other line that is no left-out sample.
    """
    found = LeftOut()
    for path in sorted(folder.glob("rank-*-worker-*.jsonl")):
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], 1):
            try:
                found.add(left_out_sample(json.loads(line)))
            except (ValueError, DataError) as error:
                raise DataError(f"{path}, line {number}: {error}; correct the line or remove the file") from error
    return found


def write_left_out(path: Path, left_out: LeftOut) -> None:
    """Write a list whole: a run whose `drop` names it leaves out the same samples."""
    new = path.with_name(f"{path.name}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    new.write_text("".join(json.dumps(each) + "\n" for each in left_out.state_dict()), encoding="utf-8")
    new.replace(path)
