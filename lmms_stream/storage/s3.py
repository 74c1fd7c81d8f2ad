"""A prefix of an S3 bucket as a store, through boto3.

Objects are read without credentials if none are found, or if the server answers signed requests with status 400, as in
MosaicML Streaming: public buckets allow this. For buckets in MOSAICML_STREAMING_AWS_REQUESTER_PAYS (separated by
commas), requests declare that the requester pays.

Google Cloud Storage answers the same requests with the HMAC keys in GCS_KEY and GCS_SECRET: GOOGLE_HMAC.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..errors import ObjectChangedError, ObjectHiddenError, ObjectMissingError, StorageError
from ..types import StoredObject
from .failures import answer_of, disk_error, is_out_of_reach
from .retry import DEFAULT_RETRY, Retry, persist
from .storage import MAX_CONNECTIONS, ProcessClients

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")
FILE_PIECE_BYTES, MEMORY_PIECE_BYTES = 1 << 20, 1 << 24  # of an answer on its way to a file, and to memory
REQUESTER_PAYS = "MOSAICML_STREAMING_AWS_REQUESTER_PAYS"
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_SKEWED = {"RequestTimeTooSkewed", "RequestExpired"}


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Service:
    """A service with the S3 protocol: scheme of its URLs, and variables for endpoint and keys.

    checksums: whether uploads carry boto3's own checksums; None: by AWS_REQUEST_CHECKSUM_CALCULATION.
    """

    scheme: str
    endpoint_name: str
    key_name: str
    secret_name: str
    endpoint: str | None = None  # if the variable is not set
    region: str | None = None
    checksums: Literal["when_required"] | None = None

    def keys(self) -> dict[str, str]:
        """Return access keys from variables unknown to boto3."""
        if self.key_name == "AWS_ACCESS_KEY_ID":
            return {}
        return {
            "aws_access_key_id": os.environ[self.key_name],
            "aws_secret_access_key": os.environ[self.secret_name],
        }


AWS = S3Service(
    scheme="s3",
    endpoint_name="S3_ENDPOINT_URL",
    key_name="AWS_ACCESS_KEY_ID",
    secret_name="AWS_SECRET_ACCESS_KEY",
)
GOOGLE_HMAC = S3Service(
    scheme="gs",
    endpoint_name="STORAGE_EMULATOR_HOST",
    endpoint="https://storage.googleapis.com",
    key_name="GCS_KEY",
    secret_name="GCS_SECRET",
    region="auto",
    checksums="when_required",  # Google refuses boto3's checksums: github.com/boto/boto3/issues/4400
)


class S3Storage:
    """A prefix of an S3 bucket. Clients are made at first use, in each process."""

    def __init__(self, url: str, *, retry: Retry = DEFAULT_RETRY, service: S3Service = AWS):
        self.url = url
        self.retry = retry
        self.service = service
        self.bucket, _, self.prefix = url.removeprefix(f"{service.scheme}://").partition("/")
        if not self.bucket:
            raise StorageError(f"{url!r} names no bucket: write {service.scheme}://BUCKET/PREFIX")
        self._clients = ProcessClients(self._make_client)  # key: whether requests are signed
        self._signs = True  # reads only; writes are always signed
        self._lacks_keys = False
        self._session: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "retry": self.retry, "service": self.service}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"], retry=state["retry"], service=state["service"])  # type: ignore[misc]

    def read(self, key: str) -> bytes:
        def read(client: S3Client, at: Any, proceed: Callable[[], None]) -> bytes:
            return b"".join(self._chunks(client.get_object(**at), proceed, MEMORY_PIECE_BYTES))

        return self._run(key, read)

    def read_range(self, key: str, *, start: int, stop: int, tag: str) -> bytes:
        def read(client: S3Client, at: Any, proceed: Callable[[], None]) -> bytes:
            answer = client.get_object(**at, Range=f"bytes={start}-{stop - 1}")
            proceed()
            if answer["ETag"].strip('"') != tag:
                answer["Body"].close()
                raise ObjectChangedError(self._where(at))
            return b"".join(self._chunks(answer, proceed, MEMORY_PIECE_BYTES))

        return self._run(key, read)

    def write(self, key: str, data: bytes) -> None:
        self._run(key, lambda client, at, proceed: client.put_object(**at, Body=data), writes=True)

    def write_if(self, key: str, data: bytes, *, tag: str | None) -> None:
        """Write an object if its tag is `tag`, or if there is no object (None); otherwise ObjectChangedError.

        A server without such conditions writes always, also Google's, whose conditions are others.
        """
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": f'"{tag}"'}
        if self.service != AWS:
            condition = {}

        def write(client: S3Client, at: Any, proceed: Callable[[], None]) -> None:
            from botocore.exceptions import ClientError

            try:
                client.put_object(**at, **condition, Body=data)
            except ClientError as error:
                if _status(error) != 501:
                    raise
                client.put_object(**at, Body=data)

        self._run(key, write, writes=True)

    def download(self, key: str, path: Path) -> None:
        def download(client: S3Client, at: Any, proceed: Callable[[], None]) -> None:
            answer = client.get_object(**at)
            proceed()
            with path.open("wb") as file:
                for chunk in self._chunks(answer, proceed, FILE_PIECE_BYTES):
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
            tag, written_s = answer["ETag"].strip('"'), answer["LastModified"].timestamp()
            is_by_key = answer.get("ServerSideEncryption", "").startswith("aws:kms") or "SSECustomerAlgorithm" in answer
            return StoredObject(key, answer["ContentLength"], tag, written_s, has_opaque_tag=is_by_key)

        return self._run(key, stat)

    def _where(self, at: Any) -> str:
        return f"{self.service.scheme}://{at['Bucket']}/{at['Key']}"

    def _set_keys(self) -> str:
        return f"set {self.service.key_name} and {self.service.secret_name}"

    @staticmethod
    def _chunks(answer: Any, proceed: Callable[[], None], size: int) -> Iterator[bytes]:
        """Yield the whole body of an answer; IncompleteReadError if the body is shorter than announced."""
        from botocore.exceptions import IncompleteReadError

        received = 0
        with closing(answer["Body"]) as body:
            for chunk in body.iter_chunks(size):
                proceed()
                received += len(chunk)
                yield chunk
        if received != answer["ContentLength"]:
            raise IncompleteReadError(actual_bytes=received, expected_bytes=answer["ContentLength"])

    def _make_client(self, signs: bool) -> S3Client:
        from botocore import UNSIGNED
        from botocore.config import Config

        config = Config(
            connect_timeout=min(10.0, self.retry.timeout_s),
            read_timeout=min(60.0, self.retry.timeout_s),
            retries={"mode": "standard", "total_max_attempts": 1},  # `persist` counts attempts
            max_pool_connections=MAX_CONNECTIONS,
            request_checksum_calculation=self.service.checksums,
            response_checksum_validation="when_required",  # shards are checked with the checksums of the index
            signature_version=None if signs else UNSIGNED,
        )
        self._session = self._session or _new_session()
        endpoint = os.environ.get(self.service.endpoint_name) or self.service.endpoint
        return self._session.client(  # type: ignore[no-any-return]
            "s3", config=config, endpoint_url=endpoint, region_name=self.service.region, **self.service.keys()
        )

    def _run(self, key: str, action: Callable[[S3Client, Any, Callable[[], None]], T], *, writes: bool = False) -> T:
        at = {"Bucket": self.bucket, "Key": f"{self.prefix}/{key}" if self.prefix else key}
        where = self._where(at)
        if self.bucket in [name.strip() for name in os.environ.get(REQUESTER_PAYS, "").split(",")]:
            at["RequestPayer"] = "requester"

        def attempt(proceed: Callable[[], None]) -> T:
            from botocore.exceptions import ClientError, NoCredentialsError

            signs = writes or self._signs
            try:
                return action(self._clients.get(signs), dict(at), proceed)
            except NoCredentialsError:
                if writes:
                    raise
                self._signs, self._lacks_keys = False, True
                return action(self._clients.get(False), dict(at), proceed)
            except ClientError as error:
                if writes or not signs or _status(error) != 400:
                    raise
                try:
                    found = action(self._clients.get(False), dict(at), proceed)
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
                remedy=f"check {self.service.endpoint_name} and the network, or try again",
            )
        except (ObjectChangedError, ObjectMissingError):
            raise
        except StorageError as error:
            if writes or not self._lacks_keys:
                raise
            raise StorageError(
                f"{error} (no AWS credentials were found: {self._set_keys()}, unless the bucket is public)"
            ) from error

    def _explain(self, error: Exception, where: str) -> StorageError | None:
        """Return the error to raise at once, or None if another attempt may help (a reset, a short body)."""
        from botocore.exceptions import BotoCoreError, NoCredentialsError, PartialCredentialsError

        if isinstance(error, ObjectChangedError):
            return error
        if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
            return StorageError(f"{where}: no AWS credentials were found: {self._set_keys()}")
        if isinstance(error, BotoCoreError):
            return None if _may_pass(error) else self._wrong_setting(error, where)
        if isinstance(error, ValueError) and "endpoint" in str(error):
            return self._wrong_setting(error, where)
        if isinstance(error, OSError):
            return None if is_out_of_reach(error) else disk_error(where, error)
        status, codes = answer_of(error)  # of a client's error, which s3transfer may wrap
        if status is None:
            return None
        code = next(iter(codes), "") or str(status)
        return self._explain_code(code, where) or StorageError(
            f"{where}: {error}: check the URL, the credentials and the region (AWS_DEFAULT_REGION)"
        )

    def _wrong_setting(self, error: Exception, where: str) -> StorageError:
        return StorageError(
            f"{where}: {error}: correct the URL, {self.service.endpoint_name}, AWS_PROFILE or what else the message "
            "names; an expired login is renewed by aws sso login"
        )

    def _explain_code(self, code: str, where: str) -> StorageError | None:
        if code == "NoSuchBucket":
            return StorageError(f"{where}: bucket {self.bucket!r} does not exist: create it or correct the URL")
        if code in ("NoSuchKey", "404"):
            return ObjectMissingError(f"{where} does not exist: check the URL")
        if code in ("InvalidRange", "PreconditionFailed", "ConditionalRequestConflict"):
            return ObjectChangedError(where)  # the object has become shorter, or another process writes it
        if code in _EXPIRED:
            return StorageError(
                f"{where}: the temporary credentials have expired ({code}): renew {self.service.key_name}, "
                f"{self.service.secret_name} and AWS_SESSION_TOKEN together, and start again"
            )
        if code in _SKEWED:
            return StorageError(
                f"{where}: the clock of this machine is wrong by many minutes ({code}): set it "
                "(timedatectl set-ntp true), and start again"
            )
        if self._lacks_keys and code in ("AccessDenied", "403"):
            return ObjectHiddenError(
                f"{where} does not exist or is not public ({code}), and no AWS credentials were found: check the URL, "
                f"or {self._set_keys()}"
            )
        if code in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403"):
            return StorageError(
                f"{where}: the credentials are refused ({code}): check {self.service.key_name}, "
                f"{self.service.secret_name} and the bucket's policy; a bucket whose requester pays belongs into "
                f"{REQUESTER_PAYS}"
            )
        return None


def _may_pass(error: Exception) -> bool:
    """Return whether an error of botocore may pass: of the connection, the body, or the source of credentials."""
    from botocore import exceptions

    kinds = (
        exceptions.HTTPClientError, exceptions.ConnectionError, exceptions.IncompleteReadError,
        exceptions.ChecksumError, exceptions.FlexibleChecksumError, exceptions.MetadataRetrievalError,
        exceptions.CredentialRetrievalError,
    )  # fmt: skip
    return isinstance(error, kinds)


def _new_session() -> Any:
    """Return a new boto3 session, which searches credentials again, with the service descriptions of this process.

    Parsing the descriptions takes five times the rest of a client's start. A forked process reuses the descriptions.
    """
    import boto3
    import botocore.session

    session = botocore.session.Session()
    loader = _descriptions()
    session.register_component("data_loader", loader)
    made = boto3.session.Session(botocore_session=session)
    loader.search_paths[:] = dict.fromkeys(loader.search_paths)  # each session adds boto3's own path again
    return made


@cache
def _descriptions() -> Any:
    import botocore.session

    return botocore.session.Session().get_component("data_loader")


def _status(error: Any) -> int:
    """Return the HTTP status of botocore's ClientError."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
