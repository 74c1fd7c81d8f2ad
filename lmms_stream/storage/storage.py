"""Bytes in and out of local folders and object stores. url + key -> bytes or a file.

S3 (and whatever speaks it, through S3_ENDPOINT_URL or AWS_ENDPOINT_URL) is served by boto3; the other clouds
that MosaicML Streaming knows (gs://, azure://, oci://, hf://, …) by its downloaders and uploaders.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from ..errors import ObjectMissingError, StorageError
from ..types import StoredObject
from .retry import DEFAULT_RETRY, Retry, disk_error, disk_errors, persist
from .s3 import S3Storage

T = TypeVar("T")


class Storage(Protocol):
    """A folder of named objects. Keys are relative, with forward slashes.

    All methods raise StorageError; `read`, `download` and `stat` raise ObjectMissingError for a key that is not there.
    Writes are atomic: a key holds all of its bytes or is unchanged. `list_objects` gives those whose keys begin with
    `prefix`, sorted by key; there may be none.
    """

    url: str

    def read(self, key: str) -> bytes: ...
    def write(self, key: str, data: bytes) -> None: ...
    def download(self, key: str, path: Path) -> None: ...
    def upload(self, path: Path, key: str) -> None: ...
    def delete(self, key: str) -> None: ...
    def list_objects(self, prefix: str) -> list[StoredObject]: ...
    def stat(self, key: str) -> StoredObject: ...


def open_storage(url: str | Path, *, retry: Retry = DEFAULT_RETRY) -> Storage:
    """The store at a local path, `file://…`, `s3://bucket/prefix`, or another cloud's URL."""
    text = str(url).rstrip("/")
    scheme, separator, rest = text.partition("://")
    if not separator or scheme == "file":
        return LocalStorage(Path(rest if separator else str(url)))
    if scheme == "s3":
        return S3Storage(text, retry=retry)
    return CloudStorage(text, retry=retry)


class LocalStorage:
    """A local folder; it is made at the first write."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.url = str(folder)

    def read(self, key: str) -> bytes:
        return self._run(key, lambda: (self.folder / key).read_bytes())

    def write(self, key: str, data: bytes) -> None:
        def write(temporary: Path) -> None:
            temporary.write_bytes(data)

        self._write(key, write)

    def download(self, key: str, path: Path) -> None:
        self._run(key, lambda: self._copy(self.folder / key, path))

    def upload(self, path: Path, key: str) -> None:
        self._write(key, lambda temporary: self._copy(path, temporary))

    def delete(self, key: str) -> None:
        self._run(key, lambda: (self.folder / key).unlink(missing_ok=True))

    def list_objects(self, prefix: str) -> list[StoredObject]:
        """Links are followed to files only, so that a folder cannot hold itself."""
        head = prefix.rpartition("/")[0]

        def refuse(error: OSError) -> None:
            raise error

        def walk() -> list[StoredObject]:
            if not (self.folder / head).is_dir():
                return []
            keys = [
                (Path(folder) / name).relative_to(self.folder).as_posix()
                for folder, _, names in os.walk(self.folder / head, onerror=refuse)
                for name in names
            ]
            return [self._stat(key) for key in sorted(keys) if key.startswith(prefix)]

        return self._run(head, walk)

    def stat(self, key: str) -> StoredObject:
        return self._run(key, lambda: self._stat(key))

    def _stat(self, key: str) -> StoredObject:
        status = (self.folder / key).stat()
        return StoredObject(key, status.st_size, str(status.st_mtime_ns))

    @staticmethod
    def _copy(source: Path, target: Path) -> None:
        import shutil

        shutil.copyfile(source, target)

    @staticmethod
    def _replace(target: Path, write: Callable[[Path], None]) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            write(temporary)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def _write(self, key: str, write: Callable[[Path], None]) -> None:
        with disk_errors(str(self.folder / key)):
            self._replace(self.folder / key, write)

    def _run(self, key: str, action: Callable[[], T]) -> T:
        try:
            return action()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectMissingError(f"{self.folder / key} does not exist: check the path") from error
        except OSError as error:
            raise disk_error(str(self.folder / key), error) from error


class CloudStorage:
    """Any other store, through MosaicML Streaming; `delete` is not among what it offers."""

    def __init__(self, url: str, *, retry: Retry = DEFAULT_RETRY):
        self.url = url
        self.retry = retry

    def read(self, key: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "object"
            self.download(key, path)
            return path.read_bytes()

    def write(self, key: str, data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / Path(key).name
            path.write_bytes(data)
            self.upload(path, key)

    def download(self, key: str, path: Path) -> None:
        from streaming.base.storage import CloudDownloader

        remote = f"{self.url}/{key}"

        def download(proceed: Callable[[], None]) -> None:
            path.unlink(missing_ok=True)  # a part of it, from the attempt before
            CloudDownloader.get(remote).download(remote, str(path), timeout=self.retry.timeout_s)

        self._run(remote, download)

    def upload(self, path: Path, key: str) -> None:
        from streaming.base.storage import CloudUploader

        target = f"{self.url}/{Path(key).parent.as_posix()}".removesuffix("/.")

        def upload(proceed: Callable[[], None]) -> None:
            uploader = CloudUploader.get((str(path.parent), target), keep_local=True, exist_ok=True)
            uploader.upload_file(path.name)

        self._run(f"{target}/{path.name}", upload)

    def delete(self, key: str) -> None:
        raise StorageError(f"{self.url}/{key}: deleting is not supported for this store: delete it with its own tool")

    def list_objects(self, prefix: str) -> list[StoredObject]:
        """Names alone: these stores' sizes and tags are not among what MosaicML Streaming offers."""
        from streaming.base.storage import CloudUploader

        found: list[str] = []

        def read_names(proceed: Callable[[], None]) -> None:
            with tempfile.TemporaryDirectory() as folder:
                uploader = CloudUploader.get((folder, self.url), keep_local=True, exist_ok=True)
                found[:] = uploader.list_objects(prefix) or []

        self._run(f"{self.url}/{prefix}", read_names)
        start = urlsplit(self.url).path.strip("/")  # of the names within their bucket, which these are
        keys = sorted(name.removeprefix(start).lstrip("/") for name in found if not name.endswith("/"))
        return [StoredObject(key, 0, "") for key in keys if key.startswith(prefix)]

    def stat(self, key: str) -> StoredObject:
        """Asks nothing: whether it is there is found by `download`."""
        return StoredObject(key, 0, "")

    def _run(self, where: str, action: Callable[[Callable[[], None]], None]) -> None:
        persist(
            action,
            where=where,
            retry=self.retry,
            refusal=lambda error: self._explain(error, where),
            remedy="check the network and the store, or try again",
        )

    @staticmethod
    def _explain(error: Exception, where: str) -> StorageError | None:
        if isinstance(error, FileNotFoundError):
            return ObjectMissingError(f"{where} does not exist: check the URL")
        if isinstance(error, NotImplementedError):
            return StorageError(f"{where}: {error}: name the objects one by one, or list them in a YAML file")
        if isinstance(error, ImportError):
            return StorageError(f"{where}: {error}: install what MosaicML Streaming needs for this kind of store")
        if isinstance(error, OSError) and not isinstance(error, (ConnectionError, TimeoutError)):
            return disk_error(where, error)
        return None
