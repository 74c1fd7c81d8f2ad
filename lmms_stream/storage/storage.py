"""Bytes in and out of local folders and object stores. url + key -> bytes or a file.

boto3 serves S3 and compatible stores (through S3_ENDPOINT_URL or AWS_ENDPOINT_URL). Google Cloud Storage, Azure and the
Hugging Face hub have their own libraries. MosaicML Streaming's downloaders and uploaders serve the other clouds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Generic, Protocol, TypeVar

from ..checks import plain_path
from ..errors import StorageError
from ..registry import Registry
from ..types import StoredObject
from .local import LocalStorage
from .retry import DEFAULT_RETRY, Retry

# Variables with the servers of clients.
_ENDPOINT_NAMES = ("S3_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_SERVICE_ENDPOINT")


class Storage(Protocol):
    """A folder of named objects. Keys are relative, with forward slashes.

    All methods raise StorageError; `read`, `download` and `stat` raise ObjectMissingError for a missing key. Writes are
    atomic: a key holds all of its bytes or is unchanged. `list_objects` returns the objects with keys that begin with
    `prefix`, sorted by key, possibly none. `read_range` returns bytes start <= offset < stop of an object;
    ObjectChangedError if its tag is no longer `tag`. Only stores with tags have `read_range`.
    """

    url: str

    def read(self, key: str) -> bytes: ...
    def read_range(self, key: str, *, start: int, stop: int, tag: str) -> bytes: ...
    def write(self, key: str, data: bytes) -> None: ...
    def download(self, key: str, path: Path) -> None: ...
    def upload(self, path: Path, key: str) -> None: ...
    def delete(self, key: str) -> None: ...
    def list_objects(self, prefix: str) -> list[StoredObject]: ...
    def stat(self, key: str) -> StoredObject: ...


class OpenStore(Protocol):
    """Opens the store at a URL of its scheme."""

    def __call__(self, url: str, *, retry: Retry) -> Storage: ...


STORES = Registry[OpenStore](
    "stores",
    {
        "s3": "storage.s3:S3Storage",
        "gs": "plugins.stores.gcs:open_google",
        "azure": "plugins.stores.azure:AzureStorage",
        "hf": "plugins.stores.hub:HubStorage",
        **dict.fromkeys(("azure-dl", "oci", "sftp", "dbfs", "alipan"), "plugins.stores.clouds:CloudStorage"),
    },
)  # by the scheme of their URLs


def open_storage(url: str | Path, *, retry: Retry = DEFAULT_RETRY) -> Storage:
    """Open the store at a local path, `file://…`, `s3://bucket/prefix`, or another cloud's URL.

    StorageError for an unknown scheme.
    """
    url = plain_path("folder", url)
    text = str(url).rstrip("/")
    scheme, separator, _ = text.partition("://")
    if not separator:
        return LocalStorage(Path(url))
    if scheme not in STORES:
        known = ", ".join(f"{each}://" for each in STORES)
        raise StorageError(f"{text}: no store has the scheme {scheme!r}: write one of {known}, or a path")
    return STORES[scheme](text, retry=retry)


def is_folder(url: str | Path | None) -> bool:
    """Return whether a URL is a folder of this machine instead of a store.

    >>> [is_folder(url) for url in ("data", "file:///data", "s3://bucket/data")]
    [True, True, False]
    """
    return url is not None and ("://" not in str(url) or str(url).startswith("file://"))


def shared_storage(url: str) -> Storage:
    """Return the store at a URL, with a single client for all reads of this process."""
    return _shared_storage(url, tuple(os.environ.get(name) for name in _ENDPOINT_NAMES))


@lru_cache(maxsize=16)
def _shared_storage(url: str, endpoints: tuple[str | None, ...]) -> Storage:
    return open_storage(url)


# Clients of stores, separate for each process: a fork copies a client's connections, which two processes cannot
# share, and its locks in their current state.


K = TypeVar("K", bound=Hashable)
C = TypeVar("C")
MAX_CONNECTIONS = 64  # of one process to one store


class ProcessClients(Generic[K, C]):
    """Values of `make` by key, made at the first use in each process, by a single thread at a time."""

    def __init__(self, make: Callable[[K], C]):
        self._make = make
        self._made: dict[tuple[int, K], C] = {}
        self._making: dict[int, threading.Lock] = {}

    def get(self, key: K) -> C:
        with self._making.setdefault(os.getpid(), threading.Lock()):
            made = os.getpid(), key
            if made not in self._made:
                self._made[made] = self._make(key)
            return self._made[made]


class Watched:
    """File for the output of a client. `proceed` raises when nobody waits for the output any more."""

    def __init__(self, file: BinaryIO, proceed: Callable[[], None]):
        self._file = file
        self._proceed = proceed

    def write(self, data: bytes) -> int:
        self._proceed()
        return self._file.write(data)

    def seek(self, offset: int) -> int:
        return self._file.seek(offset)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()
