"""A folder of a dataset repository of the Hugging Face hub as a store, through huggingface_hub.

The tag of a file is a hash of its content, the hub's entity tag. Each write is a commit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ...errors import ObjectMissingError, StorageError
from ...storage.failures import answer_of, causes, disk_error, is_out_of_reach
from ...storage.locks import folder_beside
from ...storage.retry import DEFAULT_RETRY, Retry, persist
from ...types import StoredObject
from .clouds import WholeObjects

T = TypeVar("T")
_TIMEOUT_S = 60.0  # for an answer without a body
_FORM = "hf://datasets/ORGANIZATION/NAME/PATH"


class HubStorage(WholeObjects):
    """hf://datasets/ORGANIZATION/NAME/PATH, of the branch `main` or of NAME@REVISION."""

    def __init__(self, url: str, *, retry: Retry = DEFAULT_RETRY):
        self.url = url
        self.retry = retry
        kind, *names = url.removeprefix("hf://").split("/", 3)
        if kind != "datasets" or len(names) < 2 or not all(names[:2]):
            raise StorageError(f"{url} names no dataset of the hub: write {_FORM}")
        name, _, revision = names[1].partition("@")
        self._folder = f"{names[2]}/" if names[2:] else ""
        self._repository = {"repo_id": f"{names[0]}/{name}", "repo_type": "dataset", "revision": revision or None}

    def download(self, key: str, path: Path) -> None:
        def download(hub: Any, name: str) -> None:
            folder = folder_beside(path)
            try:
                found = hub.hf_hub_download(
                    filename=name, local_dir=folder, etag_timeout=self._timeout_s, **self._repository
                )
                Path(found).replace(path)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        self._run(key, download)

    def write(self, key: str, data: bytes) -> None:
        self._upload(key, data)

    def upload(self, path: Path, key: str) -> None:
        self._upload(key, path)

    def _upload(self, key: str, given: bytes | Path) -> None:
        def upload(hub: Any, name: str) -> None:
            hub.upload_file(path_or_fileobj=given, path_in_repo=name, **self._repository)

        self._run(key, upload)

    def delete(self, key: str) -> None:
        def delete(hub: Any, name: str) -> None:
            from huggingface_hub.errors import EntryNotFoundError

            try:
                hub.delete_file(path_in_repo=name, **self._repository)
            except EntryNotFoundError:
                return

        self._run(key, delete)

    def list_objects(self, prefix: str) -> list[StoredObject]:
        def entries(hub: Any, name: str) -> list[StoredObject]:
            from huggingface_hub.errors import EntryNotFoundError

            folder = name.rpartition("/")[0]
            try:
                found = [*hub.list_repo_tree(path_in_repo=folder or None, recursive=True, **self._repository)]
            except EntryNotFoundError:
                return []
            files = [each for each in found if hasattr(each, "blob_id") and each.path.startswith(name)]
            return [
                StoredObject(
                    each.path.removeprefix(self._folder), each.size, each.lfs.sha256 if each.lfs else each.blob_id
                )
                for each in files
            ]

        return sorted(self._run(prefix, entries), key=lambda each: each.key)

    def stat(self, key: str) -> StoredObject:
        def stat(hub: Any, name: str) -> StoredObject:
            url = hub.hf_hub_url(filename=name, **self._repository)
            facts = hub.get_hf_file_metadata(url=url, timeout=self._timeout_s)
            return StoredObject(key, int(facts.size or 0), str(facts.etag or "").strip('"'))

        return self._run(key, stat)

    @property
    def _timeout_s(self) -> float:
        return min(_TIMEOUT_S, self.retry.timeout_s)

    def _run(self, key: str, action: Callable[[Any, str], T]) -> T:
        import huggingface_hub

        where = f"{self.url}/{key}"
        return persist(
            lambda proceed: action(huggingface_hub, self._folder + key),
            where=where,
            retry=self.retry,
            refusal=lambda error: _explain(error, where),
            remedy="check the network and the hub, or try again",
        )


def _explain(error: Exception, where: str) -> StorageError | None:
    """Return the error to raise at once, or None if another attempt may help.

    The hub's errors are OSErrors, and its FileNotFoundError is an error of the network.
    """
    from huggingface_hub import errors

    if any(isinstance(each, errors.OfflineModeIsEnabled) for each in causes(error)):
        return StorageError(f"{where}: HF_HUB_OFFLINE is set, so the hub is not asked: unset it")
    if isinstance(error, errors.LocalEntryNotFoundError):
        return None
    if isinstance(error, errors.EntryNotFoundError):
        return ObjectMissingError(f"{where} does not exist: check the URL")
    if isinstance(error, errors.RevisionNotFoundError):
        return StorageError(f"{where}: the repository has no such revision: check what follows the @ in the URL")
    if isinstance(error, errors.RepositoryNotFoundError):
        return StorageError(
            f"{where}: the hub knows no such repository, or does not show it to you: check the URL ({_FORM}), or set "
            "HF_TOKEN"
        )
    if isinstance(error, errors.HfHubHTTPError):
        has_answer = answer_of(error)[0] is not None
        return StorageError(f"{where}: {error}: check the URL and HF_TOKEN") if has_answer else None
    if isinstance(error, errors.HFValidationError):
        return StorageError(f"{where}: {error}: write {_FORM}")
    is_of_disk = isinstance(error, OSError) and error.errno is not None and not is_out_of_reach(error)
    return disk_error(where, error) if is_of_disk else None  # type: ignore[arg-type]
