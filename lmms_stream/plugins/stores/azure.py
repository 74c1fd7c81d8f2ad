"""A prefix of an Azure Blob Storage container as a store, through azure-storage-blob.

azure://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX, like in MosaicML Streaming: the account is AZURE_ACCOUNT_NAME,
or else the text before the first dot; the credential is AZURE_ACCOUNT_ACCESS_KEY, or else the credential of the Azure
command line or azure-identity. AZURE_STORAGE_SERVICE_ENDPOINT, a variable of the Azure command line, replaces
https://ACCOUNT.blob.core.windows.net: an emulator, or another cloud's endpoint.

MosaicML's code neither deletes, lists nor reads ranges, and writes to another container than it reads from; obstore
waits for ever in forked processes (see gcs). Therefore requests are our own, over Azure's library.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ...errors import ObjectChangedError, ObjectMissingError, StorageError
from ...extras import install
from ...storage.failures import disk_error, first_line, is_out_of_reach
from ...storage.retry import DEFAULT_RETRY, Retry, persist
from ...storage.storage import MAX_CONNECTIONS, ProcessClients, Watched
from ...types import StoredObject

T = TypeVar("T")
Proceed = Callable[[], None]
REQUEST_BYTES = 16 << 20  # maximum bytes of a large object in one request
READ_BYTES = 1 << 20  # of an answer at once
_KEY = "AZURE_ACCOUNT_ACCESS_KEY"
_ENDPOINT = "AZURE_STORAGE_SERVICE_ENDPOINT"


class AzureStorage:
    """A prefix of a container. Clients are made at first use, once per process."""

    def __init__(self, url: str, *, retry: Retry = DEFAULT_RETRY):
        self.url = url
        self.retry = retry
        self.host = urlsplit(url).netloc
        self.container, _, self.prefix = url.removeprefix(f"azure://{self.host}").lstrip("/").partition("/")
        if not self.host or not self.container:
            raise StorageError(
                f"{url!r} names no account and container: write azure://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX"
            )
        self._clients = ProcessClients(self._make_client)

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "retry": self.retry}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"], retry=state["retry"])  # type: ignore[misc]

    def read(self, key: str) -> bytes:
        def read(container: Any, name: str, proceed: Proceed) -> bytes:
            return b"".join(_pieces(container.download_blob(name), proceed))

        return self._run(key, read)

    def read_range(self, key: str, *, start: int, stop: int, tag: str) -> bytes:
        def read(container: Any, name: str, proceed: Proceed) -> bytes:
            from azure.core import MatchConditions
            from azure.core.exceptions import ResourceModifiedError

            unchanged = {"etag": f'"{tag}"', "match_condition": MatchConditions.IfNotModified}
            try:
                answer = container.download_blob(name, offset=start, length=stop - start, **unchanged)
                return b"".join(_pieces(answer, proceed))
            except ResourceModifiedError:
                container.get_blob_client(name).get_blob_properties()  # raises another error if the object is gone
                raise

        return self._run(key, read)

    def write(self, key: str, data: bytes) -> None:
        self._run(key, lambda container, name, proceed: container.upload_blob(name, data, overwrite=True))

    def download(self, key: str, path: Path) -> None:
        def download(container: Any, name: str, proceed: Proceed) -> None:
            with path.open("wb") as file:
                container.download_blob(name).readinto(Watched(file, proceed))

        self._run(key, download)

    def upload(self, path: Path, key: str) -> None:
        def upload(container: Any, name: str, proceed: Proceed) -> None:
            with path.open("rb") as file:
                container.upload_blob(name, file, length=os.fstat(file.fileno()).st_size, overwrite=True)

        self._run(key, upload)

    def delete(self, key: str) -> None:
        with suppress(ObjectMissingError):
            self._run(key, lambda container, name, proceed: container.delete_blob(name))

    def list_objects(self, prefix: str) -> list[StoredObject]:
        def read_pages(container: Any, name: str, proceed: Proceed) -> list[StoredObject]:
            start = len(name) - len(prefix)
            found = []
            for blob in container.list_blobs(name_starts_with=name, include=["metadata"]):
                proceed()
                if not blob.name.endswith("/") and "hdi_isfolder" not in (blob.metadata or {}):
                    found.append(StoredObject(blob.name[start:], blob.size, blob.etag.strip('"')))
            return sorted(found, key=lambda entry: entry.key)

        return self._run(prefix, read_pages)

    def stat(self, key: str) -> StoredObject:
        def stat(container: Any, name: str, proceed: Proceed) -> StoredObject:
            facts = container.get_blob_client(name).get_blob_properties()
            return StoredObject(key, facts.size, facts.etag.strip('"'), facts.last_modified.timestamp())

        return self._run(key, stat)

    def _make_client(self, container: str) -> Any:
        from azure.core.pipeline.transport import RequestsTransport
        from azure.storage.blob import ContainerClient
        from requests import Session
        from requests.adapters import HTTPAdapter

        session = Session()
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(pool_maxsize=MAX_CONNECTIONS))
        account = os.environ.get("AZURE_ACCOUNT_NAME") or self.host.split(".")[0]
        return ContainerClient(
            os.environ.get(_ENDPOINT) or f"https://{account}.blob.core.windows.net",
            container,
            credential=_credential(account),
            transport=RequestsTransport(session=session, connection_data_block_size=READ_BYTES),
            retry_total=0,  # `persist` counts attempts
            connection_timeout=min(10.0, self.retry.timeout_s),
            read_timeout=min(60.0, self.retry.timeout_s),
            max_single_get_size=REQUEST_BYTES,
            max_chunk_get_size=REQUEST_BYTES,
            max_single_put_size=REQUEST_BYTES,
            max_block_size=REQUEST_BYTES,
        )

    def _run(self, key: str, action: Callable[[Any, str, Proceed], T]) -> T:
        name = f"{self.prefix}/{key}" if self.prefix else key
        where = f"azure://{self.host}/{self.container}/{name}"
        return persist(
            lambda proceed: action(self._clients.get(self.container), name, proceed),
            where=where,
            retry=self.retry,
            refusal=lambda error: self._explain(error, where),
            remedy=f"check AZURE_ACCOUNT_NAME, {_ENDPOINT} and the network, or try again",
        )

    def _explain(self, error: Exception, where: str) -> StorageError | None:
        """Return the error to raise at once, or None if another attempt may help (a reset, a short body)."""
        if isinstance(error, ImportError):
            return StorageError(f"{where}: {error}: {install('azure')}")
        from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError
        from requests.exceptions import RequestException

        if isinstance(error, ClientAuthenticationError) and error.status_code is None:  # before any answer
            if os.environ.get(_KEY):
                return StorageError(
                    f"{where}: {_KEY} is not the key of a storage account ({first_line(error)}): correct it"
                )
            return StorageError(f"{where}: no Azure credentials were found ({first_line(error)}): set {_KEY}")
        if isinstance(error, HttpResponseError):
            return self._explain_answer(error, where)
        if isinstance(error, (AzureError, RequestException)):
            return None
        if isinstance(error, OSError):
            return None if is_out_of_reach(error) else disk_error(where, error)
        return None

    def _explain_answer(self, error: Any, where: str) -> StorageError | None:
        status, code = error.status_code, str(getattr(error, "error_code", "") or "")
        if status == 404 and "ContainerNotFound" in code:
            return StorageError(f"{where}: container {self.container!r} does not exist: create it or correct the URL")
        if status == 404:
            return ObjectMissingError(f"{where} does not exist: check the URL")
        if status in (412, 416):  # another tag, or the object ends before the range
            return ObjectChangedError(where)
        if status in (401, 403) and "date header too old" in str(error):
            return StorageError(
                f"{where}: the clock of this machine is wrong by many minutes ({first_line(error)}): set it "
                "(timedatectl set-ntp true), and start again"
            )
        if status in (401, 403) and ("Expired" in code or "expired" in str(error)):
            return StorageError(
                f"{where}: the credentials have expired ({first_line(error)}): renew them (az login), and start again"
            )
        if status in (401, 403):
            return StorageError(
                f"{where}: the credentials are refused ({first_line(error)}): check AZURE_ACCOUNT_NAME, {_KEY} and the "
                "roles of the account"
            )
        if status is None:
            return None
        return StorageError(f"{where}: {first_line(error)}: check the URL and the settings of the account")


def _credential(account: str) -> Any:
    if os.environ.get(_KEY):
        return {"account_name": account, "account_key": os.environ[_KEY]}
    from azure.identity import AzureCliCredential, ChainedTokenCredential, DefaultAzureCredential

    return ChainedTokenCredential(AzureCliCredential(), DefaultAzureCredential())


def _pieces(answer: Any, proceed: Proceed) -> list[bytes]:
    pieces = []
    for piece in answer.chunks():
        proceed()
        pieces.append(piece)
    return pieces
