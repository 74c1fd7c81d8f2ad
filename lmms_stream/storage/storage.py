"""Bytes in and out of local folders and object stores. url + key -> bytes or a file.

S3 (and whatever speaks it, through S3_ENDPOINT_URL or AWS_ENDPOINT_URL) is served by boto3, Google Cloud Storage,
Azure and the Hugging Face hub by their own libraries, the other clouds by MosaicML Streaming's downloaders and
uploaders.
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

# Clients ask the servers that these name.
_ENDPOINT_NAMES = ("S3_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_SERVICE_ENDPOINT")


class Storage(Protocol):
    """A folder of named objects. Keys are relative, with forward slashes.

    All methods raise StorageError; `read`, `download` and `stat` raise ObjectMissingError for a key that is not there.
    Writes are atomic: a key holds all of its bytes or is unchanged. `list_objects` gives those whose keys begin with
    `prefix`, sorted by key; there may be none. `read_range` gives bytes start <= offset < stop of an object whose tag
    is still `tag`; ObjectChangedError for another. Only stores that tell tags have it.
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
    """The store at a local path, `file://…`, `s3://bucket/prefix`, or another cloud's URL.

    StorageError for a scheme that no store has.
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
    """Whether a URL is that of a folder of this machine, and not of a store.

    >>> [is_folder(url) for url in ("data", "file:///data", "s3://bucket/data")]
    [True, True, False]
    """
    return url is not None and ("://" not in str(url) or str(url).startswith("file://"))


def shared_storage(url: str) -> Storage:
    """The store at a URL, with one client for all that this process reads there."""
    return _shared_storage(url, tuple(os.environ.get(name) for name in _ENDPOINT_NAMES))


@lru_cache(maxsize=16)
def _shared_storage(url: str, endpoints: tuple[str | None, ...]) -> Storage:
    return open_storage(url)


# Clients of stores: one for each process. A fork copies the connections of a client, which two processes cannot
# share, and its locks in their current state.


K = TypeVar("K", bound=Hashable)
C = TypeVar("C")
MAX_CONNECTIONS = 64  # of one process to one store


class ProcessClients(Generic[K, C]):
    """Values of `make` by key, made at the first use in each process, by one thread at a time."""

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
    """A file that a client writes to, for as long as somebody waits: `proceed` raises once nobody does."""

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
