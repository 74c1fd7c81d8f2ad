"""A local folder as a store."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import LmmsStreamError, ObjectChangedError, ObjectMissingError
from ..types import StoredObject
from .failures import disk_errors


class FolderStorage:
    """Store in a local folder, which is made at the first write."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.url = str(folder)

    def read(self, key: str) -> bytes:
        with self._errors(key):
            return (self.folder / key).read_bytes()

    def read_range(self, key: str, *, start: int, stop: int, tag: str) -> bytes:
        with self._errors(key), (self.folder / key).open("rb") as file:
            if str(os.fstat(file.fileno()).st_mtime_ns) != tag:
                raise ObjectChangedError(str(self.folder / key))
            file.seek(start)
            return file.read(stop - start)

    def write(self, key: str, data: bytes) -> None:
        def write(temporary: Path) -> None:
            temporary.write_bytes(data)

        self.write_with(key, write)

    def download(self, key: str, path: Path) -> None:
        with self._errors(key):
            self._copy(self.folder / key, path)

    def upload(self, path: Path, key: str) -> None:
        self.write_with(key, lambda temporary: self._copy(path, temporary))

    def delete(self, key: str) -> None:
        with self._errors(key):
            (self.folder / key).unlink(missing_ok=True)

    def list_objects(self, prefix: str, *, linked: bool = False) -> list[StoredObject]:
        """List files below a prefix. Links to folders are not followed: a folder cannot contain itself.

        linked: follow links to folders, except in hidden folders (names with a leading . or _); list each folder once.
        """
        head = prefix.rpartition("/")[0]

        def refuse(error: OSError) -> None:
            raise error

        with self._errors(head):
            if not (self.folder / head).is_dir():
                return []
            keys: list[str] = []
            seen = {_inode(self.folder / head)}
            for path, folders, names in os.walk(self.folder / head, onerror=refuse, followlinks=linked):
                folder = Path(path).relative_to(self.folder)
                keys += [(folder / name).as_posix() for name in names]
                if linked:
                    folders[:] = self._unseen([folder / name for name in folders], seen)
            found = [self._listed(key) for key in sorted(keys) if key.startswith(prefix)]
            return [described for described in found if described is not None]

    def _unseen(self, folders: list[Path], seen: set[tuple[int, int]]) -> list[str]:
        """Return the names of unseen folders, links last; of hidden folders return all but links."""
        chosen: list[str] = []
        for folder in sorted(folders, key=lambda folder: ((self.folder / folder).is_symlink(), folder.name)):
            path = self.folder / folder
            if any(name.startswith((".", "_")) for name in folder.parts):
                chosen += [] if path.is_symlink() else [folder.name]
            elif (inode := _inode(path)) not in seen:
                seen.add(inode)
                chosen.append(folder.name)
        return chosen

    def _listed(self, key: str) -> StoredObject | None:
        """Return a listed file; None for a file removed since, ObjectMissingError for a broken link.

        Broken links with hidden names, for example editors' locks, give None.
        """
        try:
            return self._stat(key)
        except FileNotFoundError:
            if (self.folder / key).is_symlink() and not Path(key).name.startswith("."):
                raise missing(self.folder / key) from None
            return None

    def stat(self, key: str) -> StoredObject:
        with self._errors(key):
            return self._stat(key)

    def _stat(self, key: str) -> StoredObject:
        status = (self.folder / key).stat()
        return StoredObject(key, status.st_size, str(status.st_mtime_ns), status.st_mtime)

    @staticmethod
    def _copy(source: Path, target: Path) -> None:
        import shutil

        shutil.copyfile(source, target)

    def write_with(self, key: str, write: Callable[[Path], None]) -> None:
        """Let `write` write the file under a temporary name, and rename the complete file."""
        target = self.folder / key
        with disk_errors(str(target)):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.{secrets.randbits(64)}.tmp")  # see temporary_name
            try:
                write(temporary)
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Convert errors of the operating system to StorageError, and a missing file to ObjectMissingError."""
        with disk_errors(str(self.folder / key)):
            try:
                yield
            except LmmsStreamError:
                raise
            except (FileNotFoundError, NotADirectoryError) as error:
                raise missing(self.folder / key) from error


def _inode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def missing(path: Path) -> ObjectMissingError:
    """Return the error for a missing file or a broken link."""
    if path.is_symlink():
        return ObjectMissingError(
            f"{path} is a link to {path.readlink()}, which leads to no file: put that back, or remove the link"
        )
    return ObjectMissingError(f"{path} does not exist: check the path")


class LocalStorage(FolderStorage):
    """Local folder with files that are read in place."""


class CopiedFolder(FolderStorage):
    """Local folder with files that are copied to a named folder, for example on a faster disk, before reading."""


def can_write(*folders: Path) -> bool:
    """Return whether files can be made in folders; missing folders count as writable."""
    return all(os.access(folder, os.W_OK | os.X_OK) for folder in folders if folder.is_dir())
