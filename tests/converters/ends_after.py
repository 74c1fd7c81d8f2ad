"""A storage that fails after some changes, as if the command had been killed there."""

from __future__ import annotations

from pathlib import Path

from lmms_stream.errors import StorageError
from lmms_stream.storage.local import LocalStorage


class EndsAfter(LocalStorage):
    """A folder that takes so many changes and then no more; several folders count together."""

    def __init__(self, folder: Path, left: list[int]):
        super().__init__(folder)
        self._left = left

    def _count(self) -> None:
        self._left[0] -= 1
        if self._left[0] < 0:
            raise StorageError("ended")

    def write(self, key: str, data: bytes) -> None:
        self._count()
        super().write(key, data)

    def upload(self, path: Path, key: str) -> None:
        self._count()
        super().upload(path, key)

    def delete(self, key: str) -> None:
        self._count()
        super().delete(key)
