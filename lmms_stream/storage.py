"""Bytes in and out of local folders and object stores. url + key -> bytes or a file.

S3 (and whatever speaks it, through S3_ENDPOINT_URL or AWS_ENDPOINT_URL) is served by boto3; the other clouds
that MosaicML Streaming knows (gs://, azure://, oci://, hf://, …) by its downloaders and uploaders.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .errors import ObjectMissingError, StorageError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")
ATTEMPTS = 5
FIRST_BACKOFF_S = 0.25


class Storage(Protocol):
    """A folder of named objects. Keys are relative, with forward slashes.

    All methods raise StorageError; `read` and `download` raise ObjectMissingError for a key that is not there.
    Writes are atomic: a key holds all of its bytes or is unchanged.
    """

    url: str

    def read(self, key: str) -> bytes: ...
    def write(self, key: str, data: bytes) -> None: ...
    def download(self, key: str, path: Path) -> None: ...
    def upload(self, path: Path, key: str) -> None: ...
    def delete(self, key: str) -> None: ...


def open_storage(url: str | Path) -> Storage:
    """The store at a local path, `file://…`, `s3://bucket/prefix`, or another cloud's URL."""
    text = str(url).rstrip("/")
    scheme, separator, rest = text.partition("://")
    if not separator or scheme == "file":
        return LocalStorage(Path(rest if separator else str(url)))
    if scheme == "s3":
        return S3Storage(text)
    return CloudStorage(text)


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

        self._run(key, lambda: self._replace(self.folder / key, write))

    def download(self, key: str, path: Path) -> None:
        self._run(key, lambda: self._copy(self.folder / key, path))

    def upload(self, path: Path, key: str) -> None:
        self._run(key, lambda: self._replace(self.folder / key, lambda temporary: self._copy(path, temporary)))

    def delete(self, key: str) -> None:
        self._run(key, lambda: (self.folder / key).unlink(missing_ok=True))

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

    def _run(self, key: str, action: Callable[[], T]) -> T:
        try:
            return action()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectMissingError(f"{self.folder / key} does not exist: check the path") from error
        except OSError as error:
            raise StorageError(f"{self.folder / key}: {error.strerror}: check the path and its rights") from error


class S3Storage:
    """A prefix of an S3 bucket. The client is made at first use, once per process."""

    def __init__(self, url: str):
        self.url = url
        self.bucket, _, self.prefix = url.removeprefix("s3://").partition("/")
        if not self.bucket:
            raise StorageError(f"{url!r} names no bucket: write s3://BUCKET/PREFIX")
        self._made: tuple[int, S3Client] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": None}

    def read(self, key: str) -> bytes:
        def read(client: S3Client, at: Any) -> bytes:
            return client.get_object(**at)["Body"].read()

        return self._run(key, read)

    def write(self, key: str, data: bytes) -> None:
        self._run(key, lambda client, at: client.put_object(**at, Body=data))

    def download(self, key: str, path: Path) -> None:
        self._run(key, lambda client, at: self._stream(client, at, path))

    def upload(self, path: Path, key: str) -> None:
        self._run(key, lambda client, at: client.upload_file(str(path), at["Bucket"], at["Key"]))

    def delete(self, key: str) -> None:
        self._run(key, lambda client, at: client.delete_object(**at))

    @staticmethod
    def _stream(client: S3Client, at: Any, path: Path) -> None:
        answer = client.get_object(**at)
        with path.open("wb") as file:
            for chunk in answer["Body"].iter_chunks(1 << 20):
                file.write(chunk)
        if path.stat().st_size != answer["ContentLength"]:
            raise ConnectionError(f"got {path.stat().st_size} of {answer['ContentLength']} bytes")

    def _client(self) -> S3Client:
        if self._made is None or self._made[0] != os.getpid():
            import boto3
            from botocore.config import Config

            config = Config(connect_timeout=10, read_timeout=60, retries={"mode": "standard", "total_max_attempts": 3})
            endpoint = os.environ.get("S3_ENDPOINT_URL") or None
            self._made = os.getpid(), boto3.session.Session().client("s3", config=config, endpoint_url=endpoint)
        return self._made[1]

    def _run(self, key: str, action: Callable[[S3Client, Any], T]) -> T:
        """Run an action; what may pass with time (a reset, a short body, a 5xx) is tried again with back-off."""
        from botocore.exceptions import BotoCoreError, ClientError

        at = {"Bucket": self.bucket, "Key": f"{self.prefix}/{key}" if self.prefix else key}
        where = f"s3://{at['Bucket']}/{at['Key']}"
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return action(self._client(), at)
            except (ClientError, BotoCoreError, ConnectionError) as error:
                refusal = self._explain(error, where)
                if refusal is not None or attempt == ATTEMPTS:
                    raise refusal or StorageError(f"{where}: {error} (after {ATTEMPTS} attempts)") from error
                time.sleep(FIRST_BACKOFF_S * 2 ** (attempt - 1))
            except OSError as error:
                raise StorageError(f"{where}: {error.strerror}: {error.filename}") from error
            except Exception as error:  # s3transfer wraps a client's error in one of its own
                if error.__cause__ is None and "S3UploadFailed" not in type(error).__name__:
                    raise
                raise self._explain_text(str(error), where) or StorageError(f"{where}: {error}") from error
        raise AssertionError("unreachable")

    def _explain(self, error: Exception, where: str) -> StorageError | None:
        """The error to raise at once, or None when another attempt may help."""
        from botocore.exceptions import (
            ClientError,
            EndpointConnectionError,
            NoCredentialsError,
            PartialCredentialsError,
        )

        if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
            return StorageError(
                f"{where}: no AWS credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        if isinstance(error, EndpointConnectionError):
            return StorageError(f"{where}: {error}: check S3_ENDPOINT_URL and the network")
        if isinstance(error, ClientError):
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            code = error.response.get("Error", {}).get("Code", "")
            return self._explain_text(code, where) or (
                None if status >= 500 or status == 429 else StorageError(f"{where}: {error}")
            )
        return None

    def _explain_text(self, text: str, where: str) -> StorageError | None:
        if "NoSuchBucket" in text:
            return StorageError(f"{where}: bucket {self.bucket!r} does not exist: create it or correct the URL")
        if "NoSuchKey" in text or text == "404":
            return ObjectMissingError(f"{where} does not exist: check the URL")
        if any(code in text for code in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403")):
            return StorageError(
                f"{where}: the credentials are refused ({text}): check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY "
                "and the bucket's policy"
            )
        return None


class CloudStorage:
    """Any other store, through MosaicML Streaming; `delete` is not among what it offers."""

    def __init__(self, url: str):
        self.url = url

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
        try:
            CloudDownloader.get(remote).download(remote, str(path), timeout=60)
        except FileNotFoundError as error:
            raise ObjectMissingError(f"{remote} does not exist: check the URL") from error
        except Exception as error:
            raise StorageError(f"{remote}: {error}") from error

    def upload(self, path: Path, key: str) -> None:
        from streaming.base.storage import CloudUploader

        target = f"{self.url}/{Path(key).parent.as_posix()}".removesuffix("/.")
        try:
            uploader = CloudUploader.get((str(path.parent), target), keep_local=True, exist_ok=True)
            uploader.upload_file(path.name)
        except Exception as error:
            raise StorageError(f"{target}/{path.name}: {error}") from error

    def delete(self, key: str) -> None:
        raise StorageError(f"{self.url}/{key}: deleting is not supported for this store: delete it with its own tool")
