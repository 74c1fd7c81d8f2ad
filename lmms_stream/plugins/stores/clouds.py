"""Stores of other clouds (azure-dl://, oci://, sftp://, …), through MosaicML Streaming's own code.

For azure-dl:// and oci://, the store's entity tag decides whether a copy without a checksum is current. sftp:// and
dbfs:// have no tags: only the size in the index decides, and a new version of the same size is not detected.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from socket import gaierror
from typing import Any
from urllib.parse import urlsplit

from ...errors import ObjectMissingError, StorageError
from ...extras import install
from ...storage.failures import answer_of, disk_error, first_line, is_out_of_reach
from ...storage.retry import DEFAULT_RETRY, Retry, persist
from ...types import StoredObject


class WholeObjects:
    """A store whose objects are downloaded whole, for a class with `url` and `download`."""

    url: str

    def download(self, key: str, path: Path) -> None:
        raise NotImplementedError

    def read(self, key: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "object"
            self.download(key, path)
            return path.read_bytes()

    def read_range(self, key: str, *, start: int, stop: int, tag: str) -> bytes:
        raise StorageError(f"{self.url}/{key}: ranges are not read from this kind of store: download it first")


class CloudStorage(WholeObjects):
    """Any other store, through MosaicML Streaming, which does not support `delete`."""

    def __init__(self, url: str, *, retry: Retry = DEFAULT_RETRY):
        self.url = url
        self.retry = retry

    def write(self, key: str, data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / Path(key).name
            path.write_bytes(data)
            self.upload(path, key)

    def download(self, key: str, path: Path) -> None:
        remote, downloader = self._remote(key), _of_package(self.url, "CloudDownloader")

        def download(proceed: Callable[[], None]) -> None:
            path.unlink(missing_ok=True)  # a part from an earlier attempt
            downloader.get(remote).download(remote, str(path), timeout=self.retry.timeout_s)

        self._run(remote, download)

    def upload(self, path: Path, key: str) -> None:
        self._remote(key)
        uploader = _of_package(self.url, "CloudUploader")
        target = f"{self.url}/{Path(key).parent.as_posix()}".removesuffix("/.")
        name = Path(key).name

        def upload(proceed: Callable[[], None]) -> None:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / name).symlink_to(path.resolve())  # the object gets the name of the file
                uploader.get((folder, target), keep_local=True, exist_ok=True).upload_file(name)

        self._run(f"{target}/{name}", upload)

    def delete(self, key: str) -> None:
        raise StorageError(f"{self.url}/{key}: deleting is not supported for this store: delete it with its own tool")

    def list_objects(self, prefix: str) -> list[StoredObject]:
        """List only names: MosaicML Streaming does not report sizes and tags of these stores."""
        uploader_class = _of_package(self.url, "CloudUploader")
        found: list[str] = []
        has_whole_paths = urlsplit(self.url).scheme == "alipan"  # it compares a prefix with /FOLDER/NAME

        def read_names(proceed: Callable[[], None]) -> None:
            with tempfile.TemporaryDirectory() as folder:
                uploader = uploader_class.get((folder, self.url), keep_local=True, exist_ok=True)
                found[:] = uploader.list_objects("" if has_whole_paths else prefix) or []

        self._run(f"{self.url}/{prefix}", read_names)
        start = urlsplit(self.url).path.strip("/")  # prefix of names within their bucket
        names = [name.lstrip("/") for name in found if not name.endswith("/")]
        keys = sorted(name.removeprefix(start).lstrip("/") for name in names)
        return [StoredObject(key, 0, "") for key in keys if key.startswith(prefix)]

    def stat(self, key: str) -> StoredObject:
        """Return an object's size and tag. Stores without tags are not asked: `download` finds out whether the object
        exists.
        """
        remote, downloader = self._remote(key), _of_package(self.url, "CloudDownloader")
        asks = _FACTS.get(urlsplit(remote).scheme)
        if asks is None:
            return StoredObject(key, 0, "")
        facts: list[_Facts] = []

        def ask(proceed: Callable[[], None]) -> None:
            facts[:] = [asks(downloader.get(remote), remote)]

        self._run(remote, ask)
        num_bytes, tag = facts[0]
        return StoredObject(key, int(num_bytes or 0), str(tag).strip('"')) if tag else StoredObject(key, 0, "")

    def _remote(self, key: str) -> str:
        """Return the URL of an object; StorageError for a name that MosaicML Streaming would cut."""
        remote = f"{self.url}/{key}"
        cut = next((mark for mark in "?#" if mark in remote), None)
        if cut is not None:
            raise StorageError(
                f"{remote}: the name has {cut!r}, where MosaicML Streaming, which reads this store, ends a name: "
                "rename the object"
            )
        return remote

    def _run(self, where: str, action: Callable[[Callable[[], None]], None]) -> None:
        persist(
            action,
            where=where,
            retry=self.retry,
            refusal=lambda error: _explain(error, where),
            remedy="check the network and the store, or try again",
        )


_INSTEAD = {  # URLs of the same store that need no package
    "oci": "; or write s3://BUCKET/PREFIX and set S3_ENDPOINT_URL=https://NAMESPACE.compat.objectstorage.REGION."
    "oraclecloud.com (docs/stores.md)",
    "azure-dl": "; or write azure://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX",
}


def _of_package(url: str, name: str) -> Any:
    """Return a class of MosaicML's package; StorageError if the package is missing."""
    try:
        from streaming.base import storage
    except ModuleNotFoundError as error:
        raise StorageError(
            f"{url}: {urlsplit(url).scheme}:// is read and written by MosaicML's package, which cannot "
            f"be imported ({error}): {install('streaming')}{_INSTEAD.get(urlsplit(url).scheme, '')}"
        ) from error
    return getattr(storage, name)


_Facts = tuple[Any, Any]  # size and tag


def _on_azure_dl(downloader: Any, remote: str) -> _Facts:
    if downloader._azure_dl_client is None:
        downloader._create_azure_dl_client(remote)
    url = urlsplit(remote)
    file = downloader._azure_dl_client.get_file_client(file_system=url.netloc, file_path=url.path.lstrip("/"))
    facts = file.get_file_properties()
    return facts.size, facts.etag


def _on_oci(downloader: Any, remote: str) -> _Facts:
    if downloader._oci_client is None:
        downloader._create_oci_client()
    client, url = downloader._oci_client, urlsplit(remote)
    namespace = client.get_namespace().data
    headers = client.head_object(namespace, url.netloc.split(f"@{namespace}")[0], url.path.strip("/")).headers
    return headers["content-length"], headers["etag"]


_FACTS: dict[str, Callable[[Any, str], _Facts]] = {  # each finds the object like the store's downloader
    "azure-dl": _on_azure_dl,
    "oci": _on_oci,
}


def _explain(error: Exception, where: str) -> StorageError | None:
    """Return the error to raise at once, or None if another attempt may help."""
    status, _ = answer_of(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return ObjectMissingError(f"{where} does not exist: check the URL")
    if status in (401, 403):
        return StorageError(f"{where}: the credentials are refused ({first_line(error)}): check or renew them")
    if isinstance(error, NotImplementedError):
        return StorageError(f"{where}: {error}: name the objects one by one, or list them in a YAML file")
    if isinstance(error, ImportError):
        return StorageError(f"{where}: {error}: install what MosaicML Streaming needs for this kind of store")
    if _is_of_settings(error):
        return StorageError(f"{where}: {first_line(error)}: {_SET_UP.get(urlsplit(where).scheme, _SET_UP_ANY)}")
    is_of_disk = isinstance(error, OSError) and error.errno is not None and not isinstance(error, gaierror)
    if isinstance(error, OSError) and is_of_disk and not is_out_of_reach(error):
        return disk_error(where, error)
    return None


_SET_UP_ANY = "correct the URL, or set up the credentials of this kind of store"
_SET_UP = {
    "oci": "write ~/.oci/config (oci setup config)",
    "sftp": "check user and password in the URL (sftp://USER@HOST/PATH), COMPOSER_SFTP_KEY_FILE and ~/.ssh/known_hosts",
    "azure-dl": "set AZURE_ACCOUNT_ACCESS_KEY, or log in (az login)",
}
# Error classes of the stores' libraries; the libraries need not be installed.
_OF_SETTINGS = {
    "oci.exceptions": (
        "ConfigFileNotFound", "InvalidConfig", "ProfileNotFound", "InvalidKeyFilePath", "InvalidPrivateKey",
        "MissingPrivateKeyPassphrase",
    ),
    "paramiko.ssh_exception": ("AuthenticationException", "BadHostKeyException", "PasswordRequiredException"),
    "azure.core.exceptions": ("ClientAuthenticationError",),
}  # fmt: skip


def _is_of_settings(error: Exception) -> bool:
    """Return whether an error is caused by the URL, by missing settings or by credentials: no further attempt helps."""
    if type(error) in (ValueError, AssertionError):  # of MosaicML's code
        return True
    if "known_hosts" in str(error) or "No authentication methods" in str(error):  # of paramiko, in its SSHException
        return True
    classes = [(each.__module__, each.__name__) for each in type(error).__mro__]
    return any(name in _OF_SETTINGS.get(module, ()) for module, name in classes)
