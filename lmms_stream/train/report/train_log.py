"""The log of a run, one record per line: written in training, read to compare and draw runs. Without torch."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, ObjectMissingError
from ...storage.failures import disk_errors
from ...storage.storage import open_storage

if TYPE_CHECKING:
    from ...types import Batch

LOG_NAME = "train_log.jsonl"
DIGESTS_NAME = "step_digests.bin"  # beside the log, see StepDigests
ALERTS_NAME = "alerts.jsonl"  # beside the log: alerts of slow parts, which do not wait for the next record
ROOM = "free some, and the same command goes on from the last checkpoint"
_BLOCK = 1 << 16


class RecordFile:
    """Writes a line for each record. Lines of an earlier run stay, except an incomplete last line of a killed run.

    is_shared: another process writes the file, too. Raises StorageError if writing fails.
    """

    def __init__(self, path: Path):
        self._path = path
        with disk_errors(str(path), room=ROOM):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            self.is_shared = not _lock(self._file)
            self._file.truncate(_end_of_lines(self._file))

    def write(self, record: Mapping[str, Any]) -> None:
        line = line_of(record)
        with disk_errors(str(self._path), room=ROOM):
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        with disk_errors(str(self._path), room=ROOM):
            self._file.close()


def _lock(file: IO[bytes]) -> bool:
    """Lock a file until it is closed; return False if another process has it. Children do not inherit the lock."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # of a file system without locks
        pass
    return True


def line_of(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of a log. Numbers that are not finite become null: JSON has no NaN and no infinity."""
    finite = {name: _finite(value) for name, value in record.items()}
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


class History(NamedTuple):
    """Valid records of a run: of training and of evaluations, both ascending by step, without a step twice."""

    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log, or of the log in an output_dir; [] without a log.

    An incomplete last line is left out. Raises DataError for a line without a record, StorageError if reading fails.
    """
    path = path if path.is_file() else path / LOG_NAME  # a run may have made the folder, but not the log yet
    records = []
    with disk_errors(str(path)):
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    records.append(record_of(line[:-1], where=f"{path}:{number}"))
    return records


def history(records: Iterable[Mapping[str, Any]]) -> History:
    """Return the valid records.

    A killed run resumes from a checkpoint and repeats later steps. The first record of the resumed run shows the step
    of the checkpoint, step - num_steps: earlier records of later steps are not valid.
    """
    kept = History([], [])
    for record in map(dict, records):
        keep(kept, record)
    return kept


def keep(kept: History, record: dict[str, Any]) -> None:
    """Add the next record of a log to the valid records, see history."""
    own, other = (kept.steps, kept.evaluations) if "eval_loss" not in record else (kept.evaluations, kept.steps)
    begun = record["step"] - record.get("num_steps", 1)
    while own and own[-1]["step"] > begun:
        former = own.pop()
        if former["step"] == record["step"] and ("num_steps" in former) != ("num_steps" in record):
            record = former | record  # of a step, and a script's own figures
    while other and other[-1]["step"] > record["step"]:
        other.pop()
    own.append(record)


def record_of(line: bytes, *, where: str) -> dict[str, Any]:
    """Return the record of a line, with None for numbers that are not finite; DataError for any other line."""
    try:
        record = json.loads(line.decode(), parse_constant=lambda _: None, parse_float=lambda text: _finite(float(text)))
    except ValueError as error:
        raise DataError(f"{where}: not a record of a run ({error}): remove the line") from None
    numbers = [record.get("step"), record.get("num_steps", 1)] if isinstance(record, dict) else [None]
    if any(type(number) is not int for number in numbers):
        raise DataError(f"{where}: not a record of a run (an object with its step): remove the line")
    return dict(record)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _end_of_lines(file: IO[bytes]) -> int:
    """Return the offset of the end of the last whole line."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


# Digests of the samples of each step: a run writes what it read, and `lmms-stream ledger --verify` computes it again.

DIGEST_BYTES = 8
_KEPT_NAME = f"log/{DIGESTS_NAME}"  # next to checkpoints outside of the output_dir
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of splitmix64


class StepDigests:
    """The file of the digests of a run's steps, 8 bytes each, little-endian, in turn; 0: the step has no digest.

    step: finished steps; digests of later steps are cut. kept_at: URL of checkpoints outside of the folder, with a copy
    of the file next to the checkpoints. Raises StorageError.
    """

    def __init__(self, folder: Path, *, step: int, kept_at: str | None = None):
        self._path, self._kept_at = folder / DIGESTS_NAME, kept_at
        num_bytes = DIGEST_BYTES * step
        with disk_errors(str(self._path), room=ROOM):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b", buffering=0)
            if kept_at is not None and step:
                with suppress(ObjectMissingError):  # the file here may be of steps that another node did again
                    kept = open_storage(kept_at).read(_KEPT_NAME)
                    if len(kept) >= min(num_bytes, self._file.seek(0, os.SEEK_END)):
                        self._file.truncate(0)
                        self._file.write(kept)
            num_whole = self._file.seek(0, os.SEEK_END) // DIGEST_BYTES
            self._file.truncate(min(num_bytes, DIGEST_BYTES * num_whole))
            self._file.truncate(num_bytes)  # missing digests become 0, and so does one that a full disk cut

    def write(self, words: Sequence[float]) -> None:
        """Add the digest of the next step. words: sums of digest_words over all ranks with different packs."""
        low, second, third, high = map(int, words)
        digest = low + (second << 16) + (third << 32) + (high << 48)
        with disk_errors(str(self._path), room=ROOM):
            if self._file.write(known_digest(digest).to_bytes(DIGEST_BYTES, "little")) != DIGEST_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a short write is no error

    def close(self) -> None:
        self._file.close()

    def part(self) -> dict[str, bytes]:
        """Return the copy of the file to keep next to a checkpoint, by key."""
        if self._kept_at is None:
            return {}
        with disk_errors(str(self._path)):
            return {_KEPT_NAME: self._path.read_bytes()}


def known_digest(digest: int) -> int:
    """Return a digest as stored: modulo 2**64, and never 0."""
    return digest % (1 << 64) or 1


def digest_of(source: str, sample_ids: NDArray[np.int64]) -> int:
    """Return the sum of a hash of each sample: the same in any order and partition of samples."""
    seed = hashlib.blake2b(source.encode(), digest_size=DIGEST_BYTES).digest()
    mixed = sample_ids.astype(np.uint64) + np.frombuffer(seed, "<u8")
    for multiplier, shift in zip(_MULTIPLIERS, (np.uint64(30), np.uint64(27)), strict=True):
        mixed = (mixed ^ (mixed >> shift)) * multiplier
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


def digest_words(batches: Iterable[Batch]) -> list[float]:
    """Return the digest of a rank's step in 4 parts of 16 bits, as float64 sums them over ranks without rounding."""
    digest = 0
    for batch in batches:
        digest += digest_of(batch.source, batch.sample_ids.numpy())
    words: list[float] = np.array([digest % (1 << 64)], "<u8").view("<u2").astype(np.float64).tolist()
    return words


def read_digests(folder: Path) -> list[int]:
    """Return the digests of the steps of a run, 0 for a step without one; [] without a file."""
    path = folder / DIGESTS_NAME
    with disk_errors(str(path)):
        data = path.read_bytes() if path.is_file() else b""
    digests: list[int] = np.frombuffer(data[: len(data) // DIGEST_BYTES * DIGEST_BYTES], "<u8").tolist()
    return digests
