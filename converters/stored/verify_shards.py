"""Check shards against the index: downloaded, checked and deleted, several at once. shards -> problems."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, LmmsStreamError, ObjectMissingError, ShardError, StorageError
from ...mds.decoding import IMAGES, decompress, is_registered
from ...mds.index import ShardInfo, decoded_columns, file_matches
from ...mds.shard import AnyShard, open_shard
from ...processes.engine import open_threads
from ...processes.pool import do_all, open_pool
from ...processors.base import Measured, Processor
from ...processors.lengths import measured_with_media
from ...processors.media.facts import facts_of, media_parts, sound_of_video
from ...processors.stored_chat import read_chat, read_preference
from ...processors.text import DocumentsProcessor, TokensProcessor
from ...storage.local import LocalStorage
from ...storage.storage import Storage
from ...types import Sample
from .catalog import check_processed, local_file

MAX_LISTED = 100  # samples of one shard listed one by one
_REPLACE = "upload it again, or convert the dataset again"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a dataset.

    where: a file of the dataset, or a sample and its shard. what: the fault and the remedy.
    """

    where: str
    what: str


_Task = tuple[int, ShardInfo, int]  # a shard's index among the shards, the shard, and the id of its first sample


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardChecker:
    """Checker of a shard. deep: decode every sample, and measure and process it with `processor`, if given.

    lengths: arrays of the lengths index to compare, for tokens and, if present, for patches.
    folder: location of downloads. schema: schema of the samples.
    """

    storage: Storage
    folder: Path
    deep: bool
    schema: str | None = None
    processor: Processor | None = None
    lengths: Sequence[Path] | None = None

    def __call__(self, task: _Task, on_progress: Callable[[int], None] = lambda count: None) -> list[Problem]:
        """Return the problems of a shard."""
        _, info, first_id = task
        found: list[Problem] = []
        with TemporaryDirectory(prefix="shard-", dir=self.folder, ignore_cleanup_errors=True) as temporary:
            files = [info] if info.meta is None else [info.meta, info]
            paths = [self._raw_file(file, Path(temporary), found) for file in files]
            path = paths[-1]
            if path is None or None in paths:
                return found
            try:
                shard = open_shard(path, info, columns=decoded_columns(info))
            except ShardError as error:
                where, _, what = str(error).removeprefix(str(path).removesuffix(info.name)).partition(" ")
                return [*found, Problem(where, f"{what}: {_REPLACE}")]
            except OSError as error:
                return [*found, _unread(info.name, error)]
            return found + self._check_samples(shard, first_id) if self.deep else found

    def _raw_file(self, info: ShardInfo, folder: Path, found: list[Problem]) -> Path | None:
        """Return a file of a shard, decompressed if needed, for its samples; None if unavailable.

        folder: location of downloaded and decompressed files. Problems of the file are appended to `found`.
        """
        name = info.zip_name or info.name
        try:
            path = self._decompressed(info, folder, found) if info.zip_name else local_file(self.storage, name, folder)
        except ObjectMissingError:
            found.append(Problem(name, f"is missing: {_REPLACE}"))
            return None
        except (StorageError, OSError) as error:
            found.append(_unread(name, error))
            return None
        if path is None:
            return None
        found += _compare(path, info.name, size=info.size, checksum=info.checksum)
        return path if path.stat().st_size == info.size else None

    def _decompressed(self, info: ShardInfo, folder: Path, found: list[Problem]) -> Path | None:
        """Decompress a compressed file of a shard. In a local folder, an existing decompressed file is enough."""
        name, raw = str(info.zip_name), folder / "raw" / info.name
        beside = self.storage.folder / info.name if isinstance(self.storage, LocalStorage) else None
        try:
            path = local_file(self.storage, name, folder)
        except ObjectMissingError:
            if beside is not None and beside.is_file():
                return beside
            raise
        found += _compare(path, name, size=info.zip_size, checksum=info.zip_checksum)
        try:
            data = decompress(str(info.compression), path.read_bytes(), size=info.size)
        except ValueError as error:
            found.append(Problem(name, f"{error}: {_REPLACE}"))
            return None
        if beside is not None and beside.is_file() and beside.read_bytes() != data:
            found.append(Problem(info.name, f"is not what {name} decompresses to: delete it"))
        raw.parent.mkdir(parents=True, exist_ok=True)
        raw.write_bytes(data)
        return raw

    def _check_samples(self, shard: AnyShard, first_id: int) -> list[Problem]:
        found: list[Problem] = []
        num_found = 0
        indexed = self._indexed(first_id, len(shard))
        for index in range(len(shard)):
            said = None if indexed is None else [int(array[index]) for array in indexed]
            what = self._check_sample(shard, index, self.schema, said)
            if what is not None:
                num_found += 1
                if num_found <= MAX_LISTED:
                    found.append(Problem(f"sample {first_id + index} (number {index} of {shard.info.name})", what))
        if num_found > MAX_LISTED:
            found.append(
                Problem(shard.info.name, f"has {num_found - MAX_LISTED} more samples with problems: {_REPLACE}")
            )
        return found

    def _indexed(self, first_id: int, count: int) -> list[NDArray[np.uint32]] | None:
        """Return the lengths index's values of consecutive samples, from each array."""
        if self.lengths is None:
            return None
        arrays = (np.load(path, mmap_mode="r", allow_pickle=False) for path in self.lengths)
        return [np.asarray(array[first_id : first_id + count]) for array in arrays]

    def _check_sample(
        self, shard: AnyShard, index: int, schema: str | None, indexed: Sequence[int] | None
    ) -> str | None:
        """Return the problem of a sample; None without a problem."""
        try:
            sample = shard[index]
            _check_images(sample, shard.info)
            _check_content(sample, schema)
            found = None if self.processor is None else _measured(self.processor, sample)
            if self.processor is not None and found is not None:
                check_processed(self.processor, sample, length=found.tokens)
        except ShardError as error:
            return f"{str(error).removeprefix(f'{shard.path}: sample {index} ')}: {_REPLACE}"
        except LmmsStreamError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - a user's processor may raise any error
            return f"cannot be processed ({error!r}): correct the sample or the processor"
        if found is None or indexed is None:
            return None
        for count, said, what in zip(found, [*indexed, 0], ("tokens", "patches"), strict=False):
            if count != said:
                return f"has {count} {what}, its lengths index says {said}: write it again with lmms-stream index"
        return None


def _unread(name: str, error: Exception) -> Problem:
    return Problem(name, f"cannot be read ({error}): correct that and verify again")


def _check_images(sample: Sample, info: ShardInfo) -> None:
    """Raise DataError for an image damaged after its header; decoding a sample reads only the header."""
    for name, encoding in info.encodings.items():
        if encoding.partition(":")[0] in IMAGES and name in sample:
            for image in sample[name] if isinstance(sample[name], list) else [sample[name]]:
                try:
                    image.load()
                except Exception as error:  # the image library raises any error for damaged bytes
                    raise DataError(f"column {name!r} holds a damaged image ({error}): {_REPLACE}") from error


def _measured(processor: Processor, sample: Sample) -> Measured:
    (found,) = measured_with_media(processor, [sample])
    if isinstance(found, DataError):
        raise found
    return found


def _check_content(sample: Sample, schema: str | None) -> None:
    """Raise DataError for a sample that does not fit its schema."""
    if schema in ("messages", "preference"):
        read = read_preference if schema == "preference" else read_chat
        for part in media_parts(read(sample["messages"]).messages, sample["media"]):
            if part.facts is not None and part.facts != (found := facts_of(part.data, part.kind)):
                raise DataError(
                    f"a part of type {part.kind!r} says {part.facts}, its media have {found}: convert the dataset again"
                )
            if part.sound is not None and part.sound != (heard := sound_of_video(part.data)):
                raise DataError(
                    f"a part of type 'video' says {part.sound} of its sound, its media have {heard}: convert the "
                    "dataset again"
                )
    elif schema == "image":
        found = facts_of(sample["image"], "image")
        said = json.loads(sample["facts"])
        if (said.get("width"), said.get("height")) != tuple(found):
            raise DataError(f"its facts say {said}, its image has {found}: convert the dataset again")
    elif schema == "tokens":
        spans = sample["loss_spans"]
        if sample["input_ids"].ndim != 1 or (spans.size and (spans.ndim != 2 or spans.shape[1] != 2)):
            raise DataError(
                f"input_ids and loss_spans have the shapes {list(sample['input_ids'].shape)} and {list(spans.shape)}, "
                "expected [T] and [k, 2]: convert the dataset again"
            )
        try:
            (DocumentsProcessor() if "document_starts" in sample else TokensProcessor()).process(sample)
        except DataError as error:
            raise DataError(f"{error}: convert the dataset again") from error


def _compare(path: Path, name: str, *, size: int | None, checksum: str | None) -> list[Problem]:
    found = path.stat().st_size
    if found != size:
        return [Problem(name, f"has {found} bytes, index.json says {size}: {_REPLACE}")]
    if not file_matches(path, size=None, checksum=checksum):
        algorithm = str(checksum).partition(":")[0]
        return [Problem(name, f"was changed: its {algorithm} is not the one that the dataset lists: {_REPLACE}")]
    return []


def check_shards(
    checker: ShardChecker, shards: Sequence[ShardInfo], *, num_workers: int, on_shard: Callable[[], None]
) -> list[Problem]:
    """Return the problems of all shards, in order. Deep checks run in processes; other checks wait and hash in threads.

    With encodings registered by the program, deep checks run in threads: other processes would skip their columns.
    """
    first_ids = accumulate((info.num_samples for info in shards), initial=0)
    tasks: list[_Task] = list(zip(range(len(shards)), shards, first_ids, strict=False))
    found: dict[int, list[Problem]] = {}
    in_processes = checker.deep and not any(is_registered(each) for info in shards for each in info.encodings.values())
    pool = open_pool(checker, num_workers, name=_name) if in_processes else open_threads(checker, num_workers)
    with pool as workers:
        for (index, _, _), problems in do_all(workers, tasks):
            found[index] = problems
            on_shard()
    return [problem for index in sorted(found) for problem in found[index]]


def _name(task: _Task) -> str:
    return task[1].name
