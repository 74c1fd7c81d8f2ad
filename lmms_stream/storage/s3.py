"""A prefix of an S3 bucket as a store, through boto3.

As MosaicML Streaming does: where no credentials are found, and where a server answers them with 400, objects are read
without, as those of public buckets can be. Requests to buckets that MOSAICML_STREAMING_AWS_REQUESTER_PAYS
lists, with commas between them, say that the requester pays.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ObjectChangedError, ObjectHiddenError, ObjectMissingError, StorageError
from ..types import StoredObject
from .disk_errors import disk_error
from .retry import DEFAULT_RETRY, Retry, persist

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")
MAX_CONNECTIONS = 64  # of one process to one store
CHUNK_BYTES = 1 << 20
REQUESTER_PAYS = "MOSAICML_STREAMING_AWS_REQUESTER_PAYS"
_SET_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


class S3Storage:
    """A prefix of an S3 bucket. Clients are made at first use, once per process."""

    def __init__(self, url: str, *, retry: Retry = DEFAULT_RETRY):
        self.url = url
        self.retry = retry
        self.bucket, _, self.prefix = url.removeprefix("s3://").partition("/")
        if not self.bucket:
            raise StorageError(f"{url!r} names no bucket: write s3://BUCKET/PREFIX")
        self._made: dict[tuple[int, bool], S3Client] = {}  # by process, and whether requests are signed
        self._signs = True  # what is read; what is written always
        self._lacks_keys = False
        self._session: Any = None  # holds the parsed descriptions of the service, which a forked process can use
        self._making: dict[int, threading.Lock] = {}  # by process: a fork copies a lock as it is, held or not

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "retry": self.retry}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"], retry=state["retry"])  # type: ignore[misc]

    def read(self, key: str) -> bytes:
        def read(client: S3Client, at: Any, proceed: Callable[[], None]) -> bytes:
            return b"".join(self._chunks(client.get_object(**at), proceed))

        return self._run(key, read)

    def read_range(self, key: str, *, start: int, stop: int, tag: str) -> bytes:
        def read(client: S3Client, at: Any, proceed: Callable[[], None]) -> bytes:
            answer = client.get_object(**at, Range=f"bytes={start}-{stop - 1}")
            proceed()
            if answer["ETag"].strip('"') != tag:
                answer["Body"].close()
                raise ObjectChangedError(f"s3://{at['Bucket']}/{at['Key']}")
            return b"".join(self._chunks(answer, proceed))

        return self._run(key, read)

    def write(self, key: str, data: bytes) -> None:
        self._run(key, lambda client, at, proceed: client.put_object(**at, Body=data), writes=True)

    def download(self, key: str, path: Path) -> None:
        def download(client: S3Client, at: Any, proceed: Callable[[], None]) -> None:
            answer = client.get_object(**at)
            proceed()
            with path.open("wb") as file:
                for chunk in self._chunks(answer, proceed):
                    file.write(chunk)

        self._run(key, download)

    def upload(self, path: Path, key: str) -> None:
        def upload(client: S3Client, at: Any, proceed: Callable[[], None]) -> None:
            client.upload_file(str(path), at.pop("Bucket"), at.pop("Key"), ExtraArgs=at)

        self._run(key, upload, writes=True)

    def delete(self, key: str) -> None:
        self._run(key, lambda client, at, proceed: client.delete_object(**at), writes=True)

    def list_objects(self, prefix: str) -> list[StoredObject]:
        def read_pages(client: S3Client, at: Any, proceed: Callable[[], None]) -> list[StoredObject]:
            below = at.pop("Key")
            start = len(below) - len(prefix)
            found = []
            for page in client.get_paginator("list_objects_v2").paginate(**at, Prefix=below):
                proceed()
                for entry in page.get("Contents", []):
                    if not entry["Key"].endswith("/"):  # consoles make such objects for folders
                        found.append(StoredObject(entry["Key"][start:], entry["Size"], entry["ETag"].strip('"')))
            return sorted(found, key=lambda entry: entry.key)

        return self._run(prefix, read_pages)

    def stat(self, key: str) -> StoredObject:
        def stat(client: S3Client, at: Any, proceed: Callable[[], None]) -> StoredObject:
            answer = client.head_object(**at)
            return StoredObject(key, answer["ContentLength"], answer["ETag"].strip('"'))

        return self._run(key, stat)

    @staticmethod
    def _chunks(answer: Any, proceed: Callable[[], None]) -> Iterator[bytes]:
        """The body of an answer, whole; ConnectionError when it is shorter than the answer says."""
        received = 0
        with closing(answer["Body"]) as body:
            for chunk in body.iter_chunks(CHUNK_BYTES):
                proceed()
                received += len(chunk)
                yield chunk
        if received != answer["ContentLength"]:
            raise ConnectionError(f"got {received} of {answer['ContentLength']} bytes")

    def _client(self, *, signs: bool) -> S3Client:
        with self._making.setdefault(os.getpid(), threading.Lock()):
            made = os.getpid(), signs
            if made not in self._made:
                import boto3
                from botocore import UNSIGNED
                from botocore.config import Config

                config = Config(
                    connect_timeout=min(10.0, self.retry.timeout_s),
                    read_timeout=min(60.0, self.retry.timeout_s),
                    retries={"mode": "standard", "total_max_attempts": 1},  # `persist` counts attempts
                    max_pool_connections=MAX_CONNECTIONS,
                    response_checksum_validation="when_required",  # shards are checked with the index's own
                    signature_version=None if signs else UNSIGNED,
                )
                endpoint = os.environ.get("S3_ENDPOINT_URL") or None
                self._session = self._session or boto3.session.Session()
                self._made[made] = self._session.client("s3", config=config, endpoint_url=endpoint)
            return self._made[made]

    def _run(self, key: str, action: Callable[[S3Client, Any, Callable[[], None]], T], *, writes: bool = False) -> T:
        at = {"Bucket": self.bucket, "Key": f"{self.prefix}/{key}" if self.prefix else key}
        where = f"s3://{at['Bucket']}/{at['Key']}"
        if self.bucket in [name.strip() for name in os.environ.get(REQUESTER_PAYS, "").split(",")]:
            at["RequestPayer"] = "requester"

        def attempt(proceed: Callable[[], None]) -> T:
            from botocore.exceptions import ClientError, NoCredentialsError

            signs = writes or self._signs
            try:
                return action(self._client(signs=signs), dict(at), proceed)
            except NoCredentialsError:
                if writes:
                    raise
                self._signs, self._lacks_keys = False, True
                return action(self._client(signs=False), dict(at), proceed)
            except ClientError as error:
                if writes or not signs or _status(error) != 400:
                    raise
                try:
                    found = action(self._client(signs=False), dict(at), proceed)
                except ClientError:
                    raise error from None
                self._signs = False
                return found

        try:
            return persist(
                attempt,
                where=where,
                retry=self.retry,
                refusal=lambda error: self._explain(error, where),
                remedy="check S3_ENDPOINT_URL and the network, or try again",
            )
        except (ObjectChangedError, ObjectMissingError):
            raise
        except StorageError as error:
            if writes or not self._lacks_keys:
                raise
            raise StorageError(
                f"{error} (no AWS credentials were found: {_SET_KEYS}, unless the bucket is public)"
            ) from error

    def _explain(self, error: Exception, where: str) -> StorageError | None:
        """The error to raise at once, or None when another attempt may help (a reset, a short body, a 5xx)."""
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

        if isinstance(error, ObjectChangedError):
            return error
        if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
            return StorageError(f"{where}: no AWS credentials were found: {_SET_KEYS}")
        if isinstance(error, ClientError):
            status = _status(error)
            code = error.response.get("Error", {}).get("Code", "")
            return self._explain_text(code, where) or (
                None if status >= 500 or status == 429 else StorageError(f"{where}: {error}")
            )
        if isinstance(error, (BotoCoreError, ConnectionError, TimeoutError)):
            return None
        if isinstance(error, OSError):
            return disk_error(where, error)
        # s3transfer wraps a client's error in one of its own
        return self._explain_text(str(error), where)

    def _explain_text(self, text: str, where: str) -> StorageError | None:
        if "NoSuchBucket" in text:
            return StorageError(f"{where}: bucket {self.bucket!r} does not exist: create it or correct the URL")
        if "NoSuchKey" in text or text == "404":
            return ObjectMissingError(f"{where} does not exist: check the URL")
        if text == "InvalidRange":  # it has become shorter
            return ObjectChangedError(where)
        if self._lacks_keys and any(code in text for code in ("AccessDenied", "403")):
            return ObjectHiddenError(
                f"{where} does not exist or is not public ({text}), and no AWS credentials were found: check the URL, "
                f"or {_SET_KEYS}"
            )
        if any(code in text for code in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403")):
            return StorageError(
                f"{where}: the credentials are refused ({text}): check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY "
                f"and the bucket's policy; a bucket whose requester pays belongs into {REQUESTER_PAYS}"
            )
        return None


def _status(error: Any) -> int:
    """The HTTP status of botocore's ClientError."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
