"""A prefix of a Google Cloud Storage bucket as a store, through google-cloud-storage.

Credentials are found by Google's libraries (GOOGLE_APPLICATION_CREDENTIALS, gcloud, the machine's own), or are the HMAC
keys of GCS_KEY and GCS_SECRET, like in MosaicML Streaming. With STORAGE_EMULATOR_HOST an emulator is used instead,
without credentials. The tag of an object is its generation: data of one generation belongs together.

MosaicML's code neither deletes nor reads ranges, and reports no sizes. obstore (0.12) does all three, but waits for
ever in a process that was forked after its first request (loader workers are); gcsfs and adlfs raise an error there.
Therefore requests are our own, over Google's library.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ...errors import ObjectChangedError, ObjectMissingError, StorageError
from ...extras import install
from ...storage.failures import disk_error, first_line, is_out_of_reach
from ...storage.retry import DEFAULT_RETRY, Retry, persist
from ...storage.s3 import GOOGLE_HMAC, S3Storage
from ...storage.storage import MAX_CONNECTIONS, ProcessClients, Watched
from ...types import StoredObject

T = TypeVar("T")
Proceed = Callable[[], None]
UPLOADED_BYTES = 16 << 20  # of a large file in one request
WRITTEN_BYTES = 1 << 20  # to a disk at once: data arrives in pieces of 8 KiB
SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_SET_KEYS = "set GOOGLE_APPLICATION_CREDENTIALS, or GCS_KEY and GCS_SECRET"
_NO_BUCKET = "bucket does not exist"  # in Google's answers


def open_google(url: str, *, retry: Retry = DEFAULT_RETRY) -> GoogleStorage | S3Storage:
    """Return the store at gs://bucket/prefix for the credentials in the environment."""
    if "GCS_KEY" in os.environ and "GCS_SECRET" in os.environ:
        return S3Storage(url, retry=retry, service=GOOGLE_HMAC)
    return GoogleStorage(url, retry=retry)


class GoogleStorage:
    """A prefix of a bucket. Clients are made at first use, once per process."""

    def __init__(self, url: str, *, retry: Retry = DEFAULT_RETRY):
        self.url = url
        self.retry = retry
        self.bucket, _, self.prefix = url.removeprefix("gs://").partition("/")
        if not self.bucket:
            raise StorageError(f"{url!r} names no bucket: write gs://BUCKET/PREFIX")
        self._clients = ProcessClients(_make_client)
        self._options = {"timeout": (min(10.0, retry.timeout_s), min(60.0, retry.timeout_s)), "retry": None}

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "retry": self.retry}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"], retry=state["retry"])  # type: ignore[misc]

    def read(self, key: str) -> bytes:
        def read(client: Any, name: str, proceed: Proceed) -> bytes:
            return self._read(client.bucket(self.bucket).blob(name), proceed)

        return self._run(key, read)

    def read_range(self, key: str, *, start: int, stop: int, tag: str) -> bytes:
        def read(client: Any, name: str, proceed: Proceed) -> bytes:
            from google.api_core.exceptions import NotFound

            bucket = client.bucket(self.bucket)
            try:
                return self._read(bucket.blob(name, generation=int(tag)), proceed, start=start, end=stop - 1)
            except NotFound:
                bucket.blob(name).reload(**self._options)  # raises NotFound if the object is gone, not changed
                raise ObjectChangedError(self._where(name)) from None

        return self._run(key, read)

    def write(self, key: str, data: bytes) -> None:
        def write(client: Any, name: str, proceed: Proceed) -> None:
            blob = client.bucket(self.bucket).blob(name)
            blob.upload_from_string(data, content_type="application/octet-stream", **self._options)

        self._run(key, write)

    def download(self, key: str, path: Path) -> None:
        def download(client: Any, name: str, proceed: Proceed) -> None:
            with path.open("wb", buffering=WRITTEN_BYTES) as file:
                self._fetch(client.bucket(self.bucket).blob(name), file, proceed)

        self._run(key, download)

    def upload(self, path: Path, key: str) -> None:
        def upload(client: Any, name: str, proceed: Proceed) -> None:
            blob = client.bucket(self.bucket).blob(name, chunk_size=UPLOADED_BYTES)
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                blob.upload_from_file(file, size=size, content_type="application/octet-stream", **self._options)

        self._run(key, upload)

    def delete(self, key: str) -> None:
        def delete(client: Any, name: str, proceed: Proceed) -> None:
            client.bucket(self.bucket).blob(name).delete(**self._options)

        with suppress(ObjectMissingError):
            self._run(key, delete)

    def list_objects(self, prefix: str) -> list[StoredObject]:
        def read_pages(client: Any, name: str, proceed: Proceed) -> list[StoredObject]:
            start = len(name) - len(prefix)
            found = []
            fields = "items(name,size,generation),nextPageToken"
            for blob in client.list_blobs(self.bucket, prefix=name, fields=fields, **self._options):
                proceed()
                if not blob.name.endswith("/"):  # consoles make these objects for folders
                    found.append(StoredObject(blob.name[start:], blob.size, str(blob.generation)))
            return sorted(found, key=lambda entry: entry.key)

        return self._run(prefix, read_pages)

    def stat(self, key: str) -> StoredObject:
        def stat(client: Any, name: str, proceed: Proceed) -> StoredObject:
            blob = client.bucket(self.bucket).blob(name)
            blob.reload(**self._options)
            return StoredObject(key, blob.size, str(blob.generation), blob.updated.timestamp())

        return self._run(key, stat)

    def _read(self, blob: Any, proceed: Proceed, **interval: int) -> bytes:
        into = io.BytesIO()
        self._fetch(blob, into, proceed, **interval)
        return into.getvalue()

    def _fetch(self, blob: Any, file: BinaryIO, proceed: Proceed, **interval: int) -> None:
        """Download the stored bytes; for whole objects, the library compares the checksum."""
        blob.download_to_file(Watched(file, proceed), raw_download=True, **interval, **self._options)

    def _where(self, name: str) -> str:
        return f"gs://{self.bucket}/{name}"

    def _run(self, key: str, action: Callable[[Any, str, Proceed], T]) -> T:
        name = f"{self.prefix}/{key}" if self.prefix else key
        where = self._where(name)

        def attempt(proceed: Proceed) -> T:
            client = self._clients.get(self.retry.timeout_s)
            from google.api_core.exceptions import NotFound, RequestRangeNotSatisfiable

            try:
                return action(client, name, proceed)
            except RequestRangeNotSatisfiable:  # the object has become shorter
                raise ObjectChangedError(where) from None
            except NotFound as error:
                if self._lacks_bucket(client, error):
                    raise StorageError(
                        f"{where}: bucket {self.bucket!r} does not exist: create it or correct the URL"
                    ) from None
                raise ObjectMissingError(f"{where} does not exist: check the URL") from None

        return persist(
            attempt,
            where=where,
            retry=self.retry,
            refusal=lambda error: _explain(error, where),
            remedy="check the network and STORAGE_EMULATOR_HOST, or try again",
        )

    def _lacks_bucket(self, client: Any, error: Exception) -> bool:
        """Return whether NotFound is about the bucket. Google's answer names the bucket; for other servers, a listing
        shows it.
        """
        from google.api_core.exceptions import GoogleAPICallError, NotFound

        if _NO_BUCKET in str(error) or "No such object" in str(error):
            return _NO_BUCKET in str(error)
        try:
            next(iter(client.list_blobs(self.bucket, max_results=1, **self._options)), None)
        except NotFound:
            return True
        except GoogleAPICallError:
            return False  # permission to read an object may not include listing
        return False


def _make_client(timeout_s: float) -> Any:
    from google.cloud.storage import Client
    from requests.adapters import HTTPAdapter

    if os.environ.get("STORAGE_EMULATOR_HOST"):
        client = Client()
    else:
        import google.auth

        credentials, _ = google.auth.default(scopes=[SCOPE])
        client = Client(project="unused", credentials=credentials)  # only buckets need a project
    if not client._http.is_mtls:  # mTLS has its own adapter
        for scheme in ("http://", "https://"):
            client._http.mount(scheme, HTTPAdapter(pool_maxsize=MAX_CONNECTIONS))
    return client


def _explain(error: Exception, where: str) -> StorageError | None:
    """Return the error to raise at once, or None if another attempt may help (a reset, a short body)."""
    if isinstance(error, StorageError):
        return error
    if isinstance(error, ImportError):
        return StorageError(f"{where}: {error}: {install('google')}")
    from google.api_core.exceptions import Forbidden, GoogleAPICallError, Unauthorized
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, RefreshError
    from requests.exceptions import RequestException

    if isinstance(error, DefaultCredentialsError):
        return StorageError(f"{where}: no Google credentials were found ({error}): {_SET_KEYS}")
    if isinstance(error, RefreshError):
        return None if error.retryable or is_out_of_reach(error) else _explain_refresh(error, where)
    if isinstance(error, (Unauthorized, Forbidden)):
        return StorageError(
            f"{where}: the credentials are refused ({first_line(error)}): check GOOGLE_APPLICATION_CREDENTIALS and the "
            "roles that its account has on the bucket"
        )
    if isinstance(error, GoogleAPICallError):
        return StorageError(f"{where}: {first_line(error)}: check the URL and the settings of the bucket")
    if isinstance(error, (GoogleAuthError, RequestException)):
        return None
    if isinstance(error, OSError):
        return None if is_out_of_reach(error) else disk_error(where, error)
    return None


def _explain_refresh(error: Exception, where: str) -> StorageError:
    """Error for credentials that Google refuses to make a token from."""
    reason = first_line(error)
    if "iat" in reason or "clock" in reason:  # Google's words for a token from the future or the past
        return StorageError(
            f"{where}: the clock of this machine is wrong ({reason}): set it (timedatectl set-ntp true), and start "
            "again"
        )
    return StorageError(
        f"{where}: the credentials are refused or have expired ({reason}): renew them (gcloud auth application-default "
        "login, or another key in GOOGLE_APPLICATION_CREDENTIALS), and start again"
    )
