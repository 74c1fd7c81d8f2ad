"""The log of a run as it grows: each time what is new of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError
from ..storage.disk_errors import disk_errors
from ..train.report.train_log import record_of


class NewRecords(NamedTuple):
    """Records since the last time; is_new_log: the log is another one, and these are its first."""

    records: list[dict[str, Any]]
    is_new_log: bool


class LogTail:
    """Reads a log that another process writes. A last line that is being written waits until it is whole.

    num_damaged: lines that are no records, which are left out. written_s: when the log was last written; None while
    there is none.
    """

    def __init__(self, path: Path):
        self._path = path
        self._offset = 0  # where the last whole line ends
        self._inode: int | None = None
        self.num_damaged = 0
        self.written_s: float | None = None

    def read(self) -> NewRecords:
        """What is new; nothing while there is no log. StorageError by the disk."""
        with disk_errors(str(self._path)):
            try:
                file = self._path.open("rb")
            except FileNotFoundError:
                is_new_log = self._inode is not None
                self._begin(None)
                self.written_s = None
                return NewRecords([], is_new_log)
            with file:
                status = os.fstat(file.fileno())
                is_new_log = self._inode != status.st_ino or status.st_size < self._offset
                if is_new_log:
                    self._begin(status.st_ino)
                self.written_s = status.st_mtime
                file.seek(self._offset)
                records = []
                for line in file:
                    if line.endswith(b"\n"):
                        self._offset += len(line)
                        records += self._record(line[:-1])
        return NewRecords(records, is_new_log)

    def _begin(self, inode: int | None) -> None:
        self._inode, self._offset, self.num_damaged = inode, 0, 0

    def _record(self, line: bytes) -> list[dict[str, Any]]:
        try:
            return [record_of(line, where=str(self._path))]
        except DataError:
            self.num_damaged += 1
            return []
