"""Existing shards -> lengths of the samples, in many processes, restartable.

A shard is the unit: the lengths of a measured shard are kept in the work folder, and a new run continues with the
missing shards. Only the command's own process writes lengths: a dying worker leaves no partial files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, LengthsError, LmmsStreamError, ObjectMissingError, StorageError
from ..processes.pool import check_num_workers, do_all, num_cores, open_pool
from ..processors.base import Measured, Processor, processor_fingerprint
from ..processors.lengths import (
    checked,
    groups,
    measured_columns,
    measures_media,
    sample_bytes,
    shown_lengths,
)
from ..processors.not_shown import KINDS, OnDropped, amounts_of, check_shown, loses_calls, named_counts
from ..storage.cache import LocalCache, default_cache_folder, home_folder
from ..storage.failures import disk_errors
from ..storage.local import LocalStorage
from ..storage.locks import LONGEST_HOLD_S, locked, locked_shortly
from ..storage.storage import Storage, open_storage
from ..types import Sample
from .filled_folder import FilledFolder
from .index import DATASET_NAME, INDEX_NAME, ShardInfo
from .lengths import LENGTHS_FOLDER, LengthIndex, array_matches, lengths_names, patches_name
from .shard import AnyShard, fetch_shard, open_shard
from .shard_list import ShardList
from .stored_index import read_index

_DIGEST_BYTES = 16
_REPORT_INTERVAL_S = 0.2
_INDEX_TIMEOUT_S = 600.0  # longest wait for another process that makes the table of a long index
_Task = tuple[ShardInfo, int]  # a shard, and the sample id of its first sample


class BeingMeasuredError(StorageError):
    """Another process measures the same dataset for the same processor."""


@contextmanager
def measured_dataset(
    storage: Storage,
    processor: Processor,
    *,
    num_workers: int | None = None,
    work: Path | None = None,
    on_start: Callable[[Sequence[int], Sequence[int]], None] = lambda shards, missing: None,
    on_samples: Callable[[int], None] = lambda count: None,
    on_dropped: OnDropped = "error",
) -> Iterator[tuple[LengthIndex, Path]]:
    """Measure every sample of a dataset; yield the lengths index, memory-mapped from a folder, and the folder.

    The folder is removed if the block succeeds, otherwise kept for the next run. num_workers: number of measuring
    processes (default: the cores this process may use); 1 measures in this process; the index does not depend on
    num_workers. work: folder for the lengths of finished shards (default: below the dataset's home folder), named by
    the processor's fingerprint and the entry in index.json. on_start: receives the numbers of samples of all shards,
    and of the shards not measured by an earlier run. on_samples: receives the number of newly measured samples.
    on_dropped: whether tools and tool calls not shown by the chat template are an error, or only counted. Raises the
    processor's errors, with the sample's name; DataError for a sample of 0 or 2^32 tokens; WorkerError when a process
    dies; BeingMeasuredError; StorageError; ShardError; ConfigError.
    """
    check_num_workers(num_workers)
    tasks = _read_tasks(storage)
    fingerprint = processor_fingerprint(processor)
    with _work_folder(storage.url, fingerprint, work) as (folder, downloads):
        missing = [number for number, (info, _) in enumerate(tasks) if _is_missing(folder, info, on_dropped)]
        on_start(tasks.samples.tolist(), tasks.samples[missing].tolist())
        measurer = _Measurer(processor, LocalCache(storage, downloads), on_dropped)
        num_processes = max(1, min(num_workers or num_cores(), len(missing)))
        with open_pool(measurer, num_processes, name=lambda task: task[0].name, on_progress=on_samples) as pool:
            for (info, _), of_shard in do_all(pool, map(tasks.__getitem__, missing)):
                _keep_lengths(folder, info, of_shard)
        yield _join_lengths(folder, tasks, processor), folder


class _Tasks(Sequence[_Task]):
    """The shards of a dataset, each with the id of the first sample; a long index is read entry by entry."""

    def __init__(self, shards: ShardList):
        self._shards = shards
        self.samples = shards.samples
        self._first_ids = np.cumsum(self.samples) - self.samples

    def __len__(self) -> int:
        return len(self._shards)

    @overload
    def __getitem__(self, index: int) -> _Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_Task]: ...
    def __getitem__(self, index: int | slice) -> _Task | Sequence[_Task]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return self._shards[index], int(self._first_ids[index])


def _read_tasks(storage: Storage) -> _Tasks:
    folder = default_cache_folder(storage.url)
    tasks = _Tasks(read_index(storage, folder, validate_hash=None, timeout_s=_INDEX_TIMEOUT_S).shards)
    if not tasks.samples.any():
        raise DataError(f"{storage.url}/{INDEX_NAME} lists no samples: convert the dataset again")
    return tasks


@contextmanager
def _work_folder(url: str, fingerprint: str, work: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield a folder for this dataset and processor, removed only on success, and a download folder, always removed."""
    locks = lock_folder(url)
    base = work.absolute() if work else locks
    folder = base / f"{locks.parent.name}-{fingerprint}"
    try:
        locks.mkdir(parents=True, exist_ok=True)
        with locked(locks / f"{folder.name}.lock", timeout_s=0) as ours:
            if ours is None:
                raise BeingMeasuredError(f"another process indexes {url} for this processor: wait until it ends")
            # Left by killed runs, also of other processors.
            for left in base.glob(f"{locks.parent.name}-*/downloads-*"):
                lock = locks / f"{left.parent.name}.lock"
                with nullcontext(ours) if left.parent == folder else locked(lock, timeout_s=0) as free:
                    if free is not None:  # held while a worker that outlived the command still writes
                        shutil.rmtree(left, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix="downloads-", dir=folder, ignore_cleanup_errors=True) as downloads:
                yield folder, Path(downloads)
            shutil.rmtree(folder, ignore_errors=True)  # over NFS a mapped file stays
    except LmmsStreamError:
        raise
    except OSError as error:
        raise StorageError(f"{folder}: {error}: correct it, or name another folder with --work") from error


def lock_folder(url: str) -> Path:
    """Folder of a dataset's locks, independent of the work folder and of the spelling of a local path."""
    return home_folder(url) / "index-work"


def _digest(info: ShardInfo, lengths: bytes = b"") -> bytes:
    """Digest of the index entry of a shard, and of the shard's lengths."""
    entry = json.dumps(asdict(info), sort_keys=True).encode()
    return hashlib.blake2b(entry + lengths, digest_size=_DIGEST_BYTES).digest()


def _keep_lengths(folder: Path, info: ShardInfo, lengths: bytes) -> None:
    temporary = folder / "lengths.tmp"  # a fixed name, since the folder has one writer
    temporary.write_bytes(_digest(info, lengths) + lengths)
    temporary.replace(folder / f"{_digest(info).hex()}.lengths")


def _read_lengths(folder: Path, info: ShardInfo) -> bytes | None:
    """Return the stored lengths of a measured shard, as bytes; None if missing, cut short or damaged."""
    path = folder / f"{_digest(info).hex()}.lengths"
    kept = path.read_bytes() if path.exists() else b""
    lengths = kept[_DIGEST_BYTES:]
    return lengths if kept == _digest(info, lengths) + lengths else None


def _is_missing(folder: Path, info: ShardInfo, on_dropped: OnDropped) -> bool:
    """Whether a shard has no kept lengths, or has samples that are an error now and were only counted before."""
    kept = _read_lengths(folder, info)
    if kept is None or on_dropped == "warn":
        return kept is None
    not_shown = ShardLengths.from_bytes(kept, num_samples=info.num_samples).not_shown
    return loses_calls(named_counts(not_shown))


def _join_lengths(folder: Path, tasks: Sequence[_Task], processor: Processor) -> LengthIndex:
    """Join the lengths of all shards in order, in a memory-mapped file: 10^9 lengths are 4 GB."""
    sums, num_cut = np.zeros(len(MEDIA_KINDS), np.int64), 0
    not_shown = np.zeros(len(KINDS), np.int64)
    has_patches = False
    with (folder / "all").open("wb") as lengths, (folder / "all-patches").open("wb") as patches:
        for info, _ in tasks:
            kept = _read_lengths(folder, info)
            if kept is None:
                raise StorageError(f"lengths of {info.name} were changed in {folder}: run the same command again")
            of_shard = ShardLengths.from_bytes(kept, num_samples=info.num_samples)
            lengths.write(of_shard.lengths.tobytes())
            if of_shard.patches is not None:
                patches.write(of_shard.patches.tobytes())
                has_patches |= bool(of_shard.patches.any())
            sums += of_shard.media_tokens
            num_cut += int(of_shard.num_cut[0])
            not_shown += of_shard.not_shown
    return LengthIndex.from_array(
        _mapped(folder / "all"),
        fingerprint=processor_fingerprint(processor),
        processor=processor.description,
        patches=_mapped(folder / "all-patches") if has_patches else None,
        num_tokens_of=dict(zip(MEDIA_KINDS, sums.tolist(), strict=True)),
        num_cut=num_cut,
        not_shown=named_counts(not_shown),
    )


def _mapped(path: Path) -> NDArray[np.uint32]:
    return np.memmap(path, dtype="<u4", mode="r")


@dataclass(frozen=True, slots=True)
class _Measurer:
    """Measures shards in the current process, a shard at a time, and deletes downloaded files after measuring."""

    processor: Processor
    cache: LocalCache
    on_dropped: OnDropped

    def __call__(self, task: _Task, on_samples: Callable[[int], None]) -> bytes:
        """Return the ShardLengths of a shard, in bytes. on_samples: receives the number of newly measured samples."""
        info, first_id = task
        path = fetch_shard(self.cache, info)
        try:
            shard = open_shard(path, info, columns=measured_columns(self.processor))
            found = ShardLengths.empty(len(shard), with_patches=measures_media(self.processor))
            reported, reported_at = 0, time.monotonic()
            for index, sample in enumerate(self._measured(shard, first_id)):
                found.put(index, sample)
                if time.monotonic() - reported_at > _REPORT_INTERVAL_S:
                    on_samples(index + 1 - reported)
                    reported, reported_at = index + 1, time.monotonic()
            on_samples(len(shard) - reported)
        finally:
            if path.is_relative_to(self.cache.folder):
                path.unlink(missing_ok=True)
        return found.to_bytes()

    def _measured(self, shard: AnyShard, first_id: int) -> Iterator[Measured]:
        """Yield the measures of a shard's samples; an error names the first sample that cannot be measured."""
        index = 0
        whole = _WholeSamples(shard, self.processor)
        for group in groups(_samples(shard, first_id), num_bytes=sample_bytes):
            found = shown_lengths(self.processor, group, whole=partial(whole.sample, index))
            for _ in group:
                with _named(shard, index, first_id):
                    sample = next(found)
                    if isinstance(sample, DataError):
                        raise sample
                    check_shown(sample.not_shown, on_dropped=self.on_dropped)
                yield checked(sample, what=_name(shard, index, first_id))
                index += 1


class _WholeSamples:
    """The samples of a shard with all columns of the processor; the first request opens the file again."""

    def __init__(self, shard: AnyShard, processor: Processor):
        self._opened = shard
        self._processor = processor
        self._shard: AnyShard | None = None

    def sample(self, first: int, index: int) -> Sample:
        """Sample `first` + `index` of the shard."""
        if self._shard is None:
            self._shard = open_shard(self._opened.path, self._opened.info, columns=self._processor.columns)
        return self._shard[first + index]


def _samples(shard: AnyShard, first_id: int) -> Iterator[Sample]:
    for index in range(len(shard)):
        with _named(shard, index, first_id):
            sample = shard[index]
        yield sample


@contextmanager
def _named(shard: AnyShard, index: int, first_id: int) -> Iterator[None]:
    """Add the sample's name to errors raised inside."""
    try:
        yield
    except LmmsStreamError as error:
        raise type(error)(f"{_name(shard, index, first_id)}: {error}") from error
    except Exception as error:
        raise DataError(f"{_name(shard, index, first_id)}: {error!r}") from error


def _name(shard: AnyShard, index: int, first_id: int) -> str:
    return f"sample {first_id + index} (number {index} of {shard.info.name})"


# Measured lengths of one shard, in the work folder.

_LENGTH = np.dtype("<u4")
_SUM = np.dtype("<i8")
MEDIA_KINDS = ("image", "video", "audio")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLengths:
    """lengths: uint32[num_samples], tokens. patches: uint32[num_samples]; None if the processor measures no patches.

    media_tokens: int64[3], tokens of all samples for each of MEDIA_KINDS. num_cut: int64[1], number of media read only
    in part. not_shown: int64[k], samples with content not shown by the chat template, for each of KINDS, and answers
    with an end that is not trained on.
    """

    lengths: NDArray[np.uint32]
    patches: NDArray[np.uint32] | None = None
    media_tokens: NDArray[np.int64]
    num_cut: NDArray[np.int64]
    not_shown: NDArray[np.int64]

    @staticmethod
    def empty(num_samples: int, *, with_patches: bool) -> ShardLengths:
        """Return ShardLengths of zeros, to be filled by put."""
        return ShardLengths(
            lengths=np.zeros(num_samples, _LENGTH),
            patches=np.zeros(num_samples, _LENGTH) if with_patches else None,
            media_tokens=np.zeros(len(MEDIA_KINDS), _SUM),
            num_cut=np.zeros(1, _SUM),
            not_shown=np.zeros(len(KINDS), _SUM),
        )

    def put(self, index: int, found: Measured) -> None:
        self.lengths[index] = found.tokens
        if self.patches is not None:
            self.patches[index] = found.patches
            self.media_tokens[:] += found[2:5]
            self.num_cut[:] += found.num_cut
        if found.not_shown:
            self.not_shown[:] += amounts_of(found.not_shown)

    def to_bytes(self) -> bytes:
        """Return the lengths, the patches if any, and the sums without zeros at the end."""
        sums = np.concatenate([self.media_tokens, self.num_cut, self.not_shown])
        if self.patches is None and not sums.any():
            return self.lengths.tobytes()
        patches = np.zeros_like(self.lengths) if self.patches is None else self.patches
        num_sums = max(len(self.media_tokens), int(np.flatnonzero(sums).max(initial=-1)) + 1)
        return b"".join(array.tobytes() for array in (self.lengths, patches, sums[:num_sums]))

    @staticmethod
    def from_bytes(data: bytes, *, num_samples: int) -> ShardLengths:
        """Parse the result of to_bytes for a shard of num_samples."""
        lengths = np.frombuffer(data, _LENGTH, num_samples)
        num_media = len(MEDIA_KINDS)
        sums = np.zeros(num_media + 1 + len(KINDS), _SUM)
        patches = None
        if len(data) > lengths.nbytes:
            patches = np.frombuffer(data, _LENGTH, num_samples, lengths.nbytes)
            known = np.frombuffer(data, _SUM, offset=2 * lengths.nbytes)
            sums[: len(known)] = known
        return ShardLengths(
            lengths=lengths,
            patches=patches,
            media_tokens=sums[:num_media],
            num_cut=sums[num_media : num_media + 1],
            not_shown=sums[num_media + 1 :],
        )


# Places of a lengths index: next to the shards, listed in `_lmms/dataset.json`, or in a folder of this node.


def write_json(storage: Storage, name: str, value: Mapping[str, Any]) -> None:
    """Write a small file of a dataset, the same bytes for the same values."""
    storage.write(name, json_bytes(value))


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Content of a small file of a dataset, the same bytes for the same values."""
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def upload_lengths(storage: Storage, indexes: Sequence[LengthIndex], *, folder: Path) -> list[str]:
    """Write lengths indexes below `folder` and upload the files; return the names in upload order."""
    names = []
    for index in indexes:
        for name in index.write(folder):
            storage.upload(folder / name, name)
            names.append(name)
    return names


def add_lengths(storage: Storage, index: LengthIndex, *, folder: Path) -> None:
    """Put a lengths index next to the shards, and last in the list of `_lmms/dataset.json`. folder: for the files.

    Plain MDS datasets have no list and get no list: readers look for indexes in the folder.
    """
    names = upload_lengths(storage, [index], folder=folder)
    with locked_shortly(lock_folder(storage.url) / "listing"):
        try:
            dataset = json.loads(storage.read(DATASET_NAME))
        except ObjectMissingError:
            return
        others = [other for other in dataset["lengths"] if other != index.fingerprint]
        dataset["lengths"] = [*others, index.fingerprint]
        dataset["other_files"] = sorted({*dataset["other_files"], *names})
        if isinstance(storage, LocalStorage):  # the folder may be filled from another place
            folder_of_copies = FilledFolder(storage, storage.folder, timeout_s=LONGEST_HOLD_S)
            folder_of_copies.change(DATASET_NAME, json_bytes(dataset))
        else:
            write_json(storage, DATASET_NAME, dataset)


# On this node, for datasets that cannot be written


def node_folder(cache_folder: Path, digest: str) -> Path:
    """This node's folder for lengths of a dataset. digest: of index.json; each digest has a separate folder."""
    return cache_folder / "_lmms" / "measured" / digest


def keep_lengths(folder: Path, index: LengthIndex) -> None:
    """Keep a lengths index below a node_folder; the description is written last."""
    with disk_errors(str(folder)):
        (folder / LENGTHS_FOLDER).mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".writing-", dir=folder, ignore_cleanup_errors=True) as temporary:
            for name in index.write(Path(temporary)):  # the description last: it announces the index
                (Path(temporary) / name).replace(folder / name)


def kept_lengths(folder: Path, fingerprint: str) -> LengthIndex | None:
    """Return a lengths index written by keep_lengths, memory-mapped; None if missing or damaged."""
    array_path, description_path = (folder / name for name in lengths_names(fingerprint))
    try:
        index = LengthIndex.open(array_path, description_path.read_bytes(), fingerprint=fingerprint)
    except (OSError, LengthsError):
        return None
    if not array_matches(array_path, content_hash=index.content_hash):
        return None
    patches_path = folder / patches_name(fingerprint)
    if index.patches is not None and not array_matches(patches_path, content_hash=index.patches_hash):
        return None
    return index


def index_dataset(
    remote: str,
    processor: Processor,
    *,
    num_workers: int | None = None,
    work: Path | None = None,
    on_start: Callable[[Sequence[int], Sequence[int]], None] = lambda shards, missing: None,
    on_samples: Callable[[int], None] = lambda count: None,
    on_dropped: OnDropped = "error",
) -> LengthIndex:
    """Measure every sample of `remote`, write the lengths index next to the shards, and return the index.

    The index is memory-mapped. See measured_dataset for options and errors. Several workers are spawned: a script must
    call this below `if __name__ == "__main__":`.
    """
    storage = open_storage(remote)
    with measured_dataset(
        storage,
        processor,
        num_workers=num_workers,
        work=work,
        on_start=on_start,
        on_samples=on_samples,
        on_dropped=on_dropped,
    ) as (index, folder):
        add_lengths(storage, index, folder=folder)
    return index
