"""A run's log beside its checkpoints: it outlives the disk of the node that wrote it.

The first rank of a run writes the log, and after a restart that may be a rank of another node. So each checkpoint
leaves the records since the one before as `log/step-NNNNNNNN.jsonl`, and a run that resumes adds to its own log what
that lacks. The first line of such a file says after which step its records begin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import DataError, ObjectMissingError
from ...storage.storage import Storage
from .train_log import JsonLines, history, line_of, read_log, record_of

AFTER = "after_step"


def part_name(step: int) -> str:
    """The key of the records that end with a checkpoint, beside the checkpoints."""
    return f"log/step-{step:08d}.jsonl"


class KeptLog:
    """The records of a run since its last checkpoint."""

    def __init__(self) -> None:
        self._after = 0  # the step of the last checkpoint
        self._lines: list[bytes] = []

    def begin(self, step: int) -> None:
        """Begin behind a checkpoint."""
        self._after, self._lines = step, []

    def add(self, record: Mapping[str, Any]) -> None:
        self._lines.append(line_of(record))

    def part(self, step: int) -> dict[str, bytes]:
        """What is to be kept with the checkpoint of a step, by its key; the next part begins behind it."""
        data = line_of({AFTER: self._after}) + b"".join(self._lines)
        self.begin(step)
        return {part_name(step): data}


def restore_log(storage: Storage, step: int, path: Path) -> int:
    """Add to the log at `path` the records up to a checkpoint that it lacks; how many those were.

    Parts are read from the last one back to the first whose records the log has. None where none was kept, as by
    earlier releases. Raises DataError, StorageError.
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
            break  # a part without records says nothing of those before it
        lacking.append(records)
    records = [record for part in reversed(lacking) for record in part]
    while records and known.get(_key(records[0])) == records[0]:
        records.pop(0)
    if records:
        lines = JsonLines(path)
        for record in records:
            lines.write(record)
        lines.close()
    return len(records)


def _key(record: Mapping[str, Any]) -> tuple[int, bool]:
    """Of a record among those that count: its step, and whether it is one of an evaluation."""
    return record["step"], "eval_loss" in record


def _read_part(storage: Storage, step: int) -> tuple[int, list[dict[str, Any]]]:
    """After which step a part begins, and its records."""
    where = f"{storage.url}/{part_name(step)}"
    head, *lines = storage.read(part_name(step)).splitlines() or [b""]
    try:
        after = int(json.loads(head)[AFTER])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where}: its first line does not say where it begins ({error}): remove it") from None
    if not 0 <= after < step:
        raise DataError(f"{where} begins after step {after}, which is not before step {step}: remove it")
    return after, [record_of(line, where=f"{where}:{number}") for number, line in enumerate(lines, start=2)]
