"""Places of checkpoints: a folder shared by all nodes, or a prefix of an object store.

A checkpoint is `step-NNNNNNNN/` with `complete.json`, a list of all other files with their sizes and checksums.
`complete.json` is written last: a folder without the list is not a checkpoint. In a folder the checkpoint also gets the
final name last, by a rename after all files are forced to disk.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import xxhash

from ...errors import CheckpointError, ObjectMissingError
from ...storage.failures import disk_errors
from ...storage.local import LocalStorage
from ...storage.storage import Storage, open_storage

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

COMPLETE_NAME = "complete.json"
STATE_NAME = "trainer.json"
METADATA_NAME = ".metadata"
TIED = "tied"  # in the state of a checkpoint: see tied_names
MODEL_FOLDER = "model"  # a transformers folder without the weights
FORMAT = 1
_FOLDER = re.compile(r"step-(\d{8})")
_TEMPORARY = re.compile(r"\.step-\d{8}\.tmp")
_OURS = re.compile(
    r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|\.?(complete|evaluated)\.json(\.\d+\.tmp)?|trainer\.json|"
    rf"{MODEL_FOLDER}(/(?!\.\.?(/|$))[^/]+){{1,2}}"  # names of chat templates are the user's
)
_CHUNK_BYTES = 1 << 23
PROBE_S = 5.0


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, or differs from the written file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileDigest:
    num_bytes: int
    xxh3: str

    @staticmethod
    def of(path: Path) -> FileDigest:
        digest, num_bytes = xxhash.xxh3_64(), 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                num_bytes += len(chunk)
        return FileDigest(num_bytes=num_bytes, xxh3=digest.hexdigest())


class DigestedFile(io.BufferedWriter):
    """New file with a digest of the bytes in the order of writing: the file is not read again."""

    def __init__(self, path: Path):
        super().__init__(io.FileIO(path, "w"))
        self._hash, self._num_bytes = xxhash.xxh3_64(), 0

    def write(self, data: ReadableBuffer, /) -> int:
        with memoryview(data).cast("B") as view:
            for start in range(0, len(view), _CHUNK_BYTES):
                self._hash.update(view[start : start + _CHUNK_BYTES])
            self._num_bytes += len(view)
            return super().write(view)

    @property
    def digest(self) -> FileDigest:
        return FileDigest(num_bytes=self._num_bytes, xxh3=self._hash.hexdigest())


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint: path or URL, step, files, and the trainer's saved `state`."""

    where: str
    step: int
    files: Mapping[str, FileDigest]
    state: Mapping[str, Any]


class Target(Protocol):
    """Writes and reads files of checkpoints for a rank; all paths are of this node.

    A single rank calls prepare before any rank writes, and commit after all ranks have written; each rank calls begin,
    publish and discard. probe: rank 0 writes a file of this name, then every other rank looks for the file and writes
    another file next to the first; OSError if this fails. fetch: return a folder with the named files, after a check.
    reads_in_place: all ranks see the same files, and a single rank checks each file. unfinished: steps with files of a
    killed run that `prepare` does not remove.
    """

    storage: Storage
    reads_in_place: bool

    def probe(self, name: str, *, is_first: bool) -> None: ...
    def candidates(self) -> list[int]: ...
    def unfinished(self) -> list[int]: ...
    def writing(self, step: int) -> Path: ...
    def prepare(self, step: int) -> None: ...
    def begin(self, step: int) -> None: ...
    def publish(self, step: int, names: Iterable[str]) -> None: ...
    def commit(self, step: int, files: Mapping[str, FileDigest]) -> None: ...
    def discard(self, step: int) -> None: ...
    def fetch(self, checkpoint: Checkpoint, names: Iterable[str]) -> Path: ...


def open_target(url: str, *, staging: Path) -> Target:
    """Return the target at a folder or URL. staging: a folder only for this process, for files to and from a store."""
    storage = open_storage(url)
    return FolderTarget(storage) if isinstance(storage, LocalStorage) else StoreTarget(storage, staging)


class FolderTarget:
    """Checkpoints in a folder shared by all ranks. Files are written and read in place."""

    reads_in_place = True

    def __init__(self, storage: LocalStorage):
        self.storage: Storage = storage
        self._folder = storage.folder

    def probe(self, name: str, *, is_first: bool) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if is_first:
            write_synced(self._folder / name, b"")
            return
        deadline = time.monotonic() + PROBE_S
        while name not in {path.name for path in self._folder.iterdir()}:  # network file systems show new files late
            if time.monotonic() > deadline:
                raise FileNotFoundError(errno.ENOENT, "not the folder that rank 0 writes to", str(self._folder))
            time.sleep(0.1)
        own = self._folder / f"{name}-{uuid.uuid4().hex}"
        own.touch()
        own.unlink()

    def candidates(self) -> list[int]:
        """Return the steps with a folder of the final name, even if a file was lost."""
        if not self._folder.is_dir():
            return []
        found = [_FOLDER.fullmatch(path.name) for path in self._folder.iterdir() if path.is_dir()]
        return sorted(int(match[1]) for match in found if match)

    def unfinished(self) -> list[int]:
        return []

    def writing(self, step: int) -> Path:
        return self._folder / f".{folder_name(step)}.tmp"

    def prepare(self, step: int) -> None:
        """Remove temporary folders of killed runs, and make the folder to write in."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                shutil.rmtree(path)
        self.writing(step).mkdir()

    def begin(self, step: int) -> None:
        pass  # `prepare` made the folder for all ranks

    def publish(self, step: int, names: Iterable[str]) -> None:
        pass  # all ranks see the files

    def commit(self, step: int, files: Mapping[str, FileDigest]) -> None:
        temporary, final = self.writing(step), self._folder / folder_name(step)
        for name, digest in files.items():
            path = temporary / name
            if not path.is_file() or path.stat().st_size != digest.num_bytes:
                raise CheckpointError(
                    f"{path} was written by another rank, and rank 0 cannot see it: checkpoint_dir must be a folder "
                    "shared by all nodes, or a URL, and not used by another run"
                )
        write_synced(temporary / COMPLETE_NAME, _manifest(step, files))
        for folder in {temporary, *(path.parent for path in map(temporary.joinpath, files))}:
            _sync(folder)
        if final.exists():  # an earlier run saved this step, and resuming passed that checkpoint over
            remove(self.storage, step)
            if final.exists():
                raise CheckpointError(f"{final} holds files that do not belong to a checkpoint: move them elsewhere")
        temporary.rename(final)
        _sync(self._folder)

    def discard(self, step: int) -> None:
        shutil.rmtree(self.writing(step), ignore_errors=True)

    def fetch(self, checkpoint: Checkpoint, names: Iterable[str]) -> Path:
        folder = self._folder / folder_name(checkpoint.step)
        for name in names:
            _check(folder / name, checkpoint, name)
        return folder


class StoreTarget:
    """Checkpoints in an object store. Each rank uploads the written files, and downloads the needed files."""

    reads_in_place = False

    def __init__(self, storage: Storage, staging: Path):
        self.storage = storage
        self._staging = staging

    def probe(self, name: str, *, is_first: bool) -> None:
        pass  # a store is the same everywhere

    def candidates(self) -> list[int]:
        """Return the steps with a complete.json, without unfinished steps."""
        return sorted(step for step, names in self._names().items() if COMPLETE_NAME in names)

    def unfinished(self) -> list[int]:
        return sorted(step for step, names in self._names().items() if COMPLETE_NAME not in names)

    def _names(self) -> dict[int, set[str]]:
        """Return the names of files by step."""
        found: dict[int, set[str]] = {}
        for stored in self.storage.list_objects("step-"):
            folder, _, name = stored.key.partition("/")
            if (step := step_of(folder)) is not None:
                found.setdefault(step, set()).add(name)
        return found

    def writing(self, step: int) -> Path:
        return self._staging / folder_name(step)

    def prepare(self, step: int) -> None:
        """Delete the complete.json of an earlier run: a mixture of both runs must not count as a checkpoint."""
        if step in self.candidates():
            self.storage.delete(f"{folder_name(step)}/{COMPLETE_NAME}")

    def begin(self, step: int) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)
        self.writing(step).mkdir(parents=True)

    def publish(self, step: int, names: Iterable[str]) -> None:
        for name in names:
            self.storage.upload(self.writing(step) / name, f"{folder_name(step)}/{name}")
        shutil.rmtree(self._staging, ignore_errors=True)
        self.writing(step).mkdir(parents=True)

    def commit(self, step: int, files: Mapping[str, FileDigest]) -> None:
        self.storage.write(f"{folder_name(step)}/{COMPLETE_NAME}", _manifest(step, files))
        self.discard(step)

    def discard(self, step: int) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)

    def fetch(self, checkpoint: Checkpoint, names: Iterable[str]) -> Path:
        folder = self.writing(checkpoint.step)
        for name in names:
            path = folder / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    self.storage.download(f"{folder_name(checkpoint.step)}/{name}", path)
                except ObjectMissingError as error:
                    raise DamagedError(f"{checkpoint.where}/{name} is missing") from error
                _check(path, checkpoint, name)
        return folder


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint by the last part of the path; None for another name."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def read_checkpoint(storage: Storage, step: int) -> Checkpoint:
    """Read list and state of a checkpoint, and check names and sizes of the files; DamagedError names the file."""
    where = f"{storage.url}/{folder_name(step)}"
    files, evaluated = _read_manifest(storage, step, where)
    stored = {found.key.partition("/")[2]: found for found in storage.list_objects(f"{folder_name(step)}/")}
    for name, digest in files.items():
        if name not in stored:
            raise DamagedError(f"{where}/{name} is missing")
        if stored[name].tag and stored[name].num_bytes != digest.num_bytes:
            raise DamagedError(f"{where}/{name} has {stored[name].num_bytes} of {digest.num_bytes} bytes")
    text = storage.read(f"{folder_name(step)}/{STATE_NAME}")
    if xxhash.xxh3_64(text).hexdigest() != files[STATE_NAME].xxh3:
        raise DamagedError(f"{where}/{STATE_NAME} was changed after writing: its checksum differs")
    return Checkpoint(where=where, step=step, files=files, state=json.loads(text) | evaluated)


def write_evaluated(storage: Storage, step: int, state: Mapping[str, Any]) -> None:
    """Add to complete.json the state after an evaluation that was pending; DamagedError without the checkpoint."""
    files, _ = _read_manifest(storage, step, f"{storage.url}/{folder_name(step)}")
    key, data = f"{folder_name(step)}/{COMPLETE_NAME}", _manifest(step, files, json.loads(json.dumps(state)))
    if isinstance(storage, LocalStorage):
        storage.write_with(key, partial(write_synced, data=data))
    else:
        storage.write(key, data)


def remove(storage: Storage, step: int) -> None:
    """Delete only the files of a checkpoint, complete.json first."""
    prefix = f"{folder_name(step)}/"
    names = [found.key.removeprefix(prefix) for found in storage.list_objects(prefix)]
    for name in sorted(filter(_OURS.fullmatch, names), key=lambda name: name != COMPLETE_NAME):
        storage.delete(prefix + name)
    if isinstance(storage, LocalStorage):
        model = storage.folder / prefix / MODEL_FOLDER
        for folder in (*(path for path in model.glob("*") if path.is_dir()), model, storage.folder / prefix):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def write_synced(path: Path, data: bytes) -> None:
    """Write a file, and return after the data is on the disk, not only in memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check(path: Path, checkpoint: Checkpoint, name: str) -> None:
    try:
        found = FileDigest.of(path)
    except OSError as error:
        raise DamagedError(f"{checkpoint.where}/{name} cannot be read: {error.strerror}") from error
    if found != checkpoint.files[name]:
        raise DamagedError(f"{checkpoint.where}/{name} was changed after writing: its checksum differs")


def _manifest(step: int, files: Mapping[str, FileDigest], evaluated: Mapping[str, Any] | None = None) -> bytes:
    content: dict[str, Any] = {"format": FORMAT, "step": step, "files": {n: asdict(files[n]) for n in sorted(files)}}
    content |= {"evaluated": evaluated} if evaluated else {}
    return json.dumps({**content, "xxh3": _digest_of(content)}, indent=1).encode() + b"\n"


def _digest_of(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_manifest(storage: Storage, step: int, where: str) -> tuple[dict[str, FileDigest], dict[str, Any]]:
    """Return the files of a checkpoint, and the state after an evaluation that was pending, if any."""
    try:
        content = json.loads(storage.read(f"{folder_name(step)}/{COMPLETE_NAME}"))
    except ObjectMissingError as error:
        raise DamagedError(f"{where}/{COMPLETE_NAME} is missing") from error
    except ValueError as error:
        raise DamagedError(f"{where}/{COMPLETE_NAME} is not JSON") from error
    if not isinstance(content, dict) or content.pop("xxh3", None) != _digest_of(content):
        raise DamagedError(f"{where}/{COMPLETE_NAME} was changed after writing: its checksum differs")
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{where} has format {content['format']}, this release reads {FORMAT}: use the release that wrote it"
        )
    if strange := [name for name in content["files"] if not _OURS.fullmatch(name)]:
        raise DamagedError(f"{where}/{COMPLETE_NAME} names {strange[0]!r}, which is not a file of a checkpoint")
    files = {name: FileDigest(**digest) for name, digest in content["files"].items()}
    return files, content.get("evaluated", {})


# Names of exports and of their files.

Dtype = Literal["float32", "bfloat16", "float16"]
ADAPTER_NAME = "adapter_config.json"  # peft's
BASE_CONFIGS = ("config.json", "generation_config.json")


# Paths and URLs of checkpoints, in settings of runs and arguments of users.

CHECKPOINTS_NAME = "checkpoints"  # in the output_dir, without a checkpoint_dir
LINK_NAME = "_checkpoint_dir"  # in the output_dir, with a checkpoint_dir: a file with its folder or URL


def checkpoints_url(output_dir: str, checkpoint_dir: str | None) -> str:
    """Return the folder or URL of a run's checkpoints, by the run's settings."""
    return checkpoint_dir or str(Path(output_dir) / CHECKPOINTS_NAME)


def link_checkpoints(output_dir: Path, checkpoint_dir: str | None) -> None:
    """Write the place of a run's checkpoints to the output_dir, for checkpoints_of."""
    link = output_dir / LINK_NAME
    with disk_errors(str(link)):
        if checkpoint_dir is not None:
            output_dir.mkdir(parents=True, exist_ok=True)
            link.write_text(checkpoint_dir if "://" in checkpoint_dir else str(Path(checkpoint_dir).absolute()))
        elif link.is_file():
            link.unlink()


def checkpoints_of(output_dir: str) -> str:
    """Return the folder or URL of the checkpoints of a started run."""
    link = Path(output_dir, LINK_NAME)
    return link.read_text().strip() if link.is_file() else f"{output_dir.rstrip('/')}/{CHECKPOINTS_NAME}"


def split_path(checkpoint: str) -> tuple[str, int | None]:
    """Return the folder or URL with a checkpoint, and the step; None if the name is not a checkpoint's."""
    folder, _, name = checkpoint.rstrip("/").rpartition("/")
    return folder or ".", step_of(name)


def refuse_theirs(folders: Iterable[Path]) -> None:
    """Raise CheckpointError for the first folder that is a checkpoint of transformers' Trainer."""
    for folder in folders:
        if folder.name.startswith("checkpoint-") and (folder / "trainer_state.json").is_file():
            raise CheckpointError(
                f"{folder} is a checkpoint of transformers' Trainer, whose optimizer is not read here: begin a run "
                f"from its weights, with model={folder}"
            )
