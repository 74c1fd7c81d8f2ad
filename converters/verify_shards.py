"""Whether a shard is what the index says: downloaded, checked and deleted, several at once. shards -> problems."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from ..decoding import decompress
from ..errors import ConfigError, DataError, LmmsStreamError, ObjectMissingError, ShardError, StorageError, WorkerError
from ..processors.base import Processor
from ..processors.stored_chat import read_chat
from ..processors.text import TokensProcessor
from ..shards import Shard, ShardInfo, file_matches
from ..storage import Storage
from ..types import Sample
from .catalog import local_file, schema_of
from .media_parts import media_parts

MAX_LISTED = 100  # samples of one shard that are listed one by one
_REPLACE = "upload it again, or convert the dataset again"


@dataclass(frozen=True, slots=True)
class Problem:
    """where: a file of the dataset, or a sample and its shard. what: is wrong with it, and what to do."""

    where: str
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardChecker:
    """deep: decode every sample, and measure it with `processor`, if there is one.

    lengths: the array of the lengths index that it should agree with. folder: for downloads.
    """

    storage: Storage
    folder: Path
    deep: bool
    processor: Processor | None = None
    lengths: Path | None = None

    def check(self, info: ShardInfo, first_id: int) -> list[Problem]:
        """What is wrong with a shard whose first sample has the number `first_id` in the dataset."""
        name = info.zip_name or info.name
        with TemporaryDirectory(prefix="shard-", dir=self.folder, ignore_cleanup_errors=True) as temporary:
            try:
                path = local_file(self.storage, name, Path(temporary))
                if info.zip_name is None:
                    return self._check_file(path, info, first_id)
                return self._check_compressed(path, info, first_id, raw=Path(temporary) / "raw")
            except ObjectMissingError:
                return [Problem(name, f"is missing: {_REPLACE}")]
            except (StorageError, OSError) as error:
                return [Problem(name, f"cannot be read ({error}): correct that and verify again")]

    def _check_compressed(self, path: Path, info: ShardInfo, first_id: int, *, raw: Path) -> list[Problem]:
        found = _compare(path, str(info.zip_name), size=info.zip_size, checksum=info.zip_checksum)
        try:
            raw.write_bytes(decompress(str(info.compression), path.read_bytes(), size=info.size))
        except ValueError as error:
            return [*found, Problem(str(info.zip_name), f"{error}: {_REPLACE}")]
        return found + self._check_file(raw, info, first_id)

    def _check_file(self, path: Path, info: ShardInfo, first_id: int) -> list[Problem]:
        found = _compare(path, info.name, size=info.size, checksum=info.checksum)
        if path.stat().st_size != info.size:
            return found
        try:
            shard = Shard(path, info)
        except ShardError as error:
            return [*found, Problem(info.name, f"{str(error).removeprefix(f'{path} ')}: {_REPLACE}")]
        return found + self._check_samples(shard, first_id) if self.deep else found

    def _check_samples(self, shard: Shard, first_id: int) -> list[Problem]:
        found: list[Problem] = []
        num_found = 0
        schema = schema_of([shard.info])
        indexed = self._indexed(first_id, len(shard))
        for place in range(len(shard)):
            what = self._check_sample(shard, place, schema, None if indexed is None else int(indexed[place]))
            if what is not None:
                num_found += 1
                if num_found <= MAX_LISTED:
                    found.append(Problem(f"sample {first_id + place} (number {place} of {shard.info.name})", what))
        if num_found > MAX_LISTED:
            found.append(
                Problem(shard.info.name, f"has {num_found - MAX_LISTED} more samples with problems: {_REPLACE}")
            )
        return found

    def _indexed(self, first_id: int, count: int) -> NDArray[np.uint32] | None:
        if self.lengths is None:
            return None
        return np.asarray(np.load(self.lengths, mmap_mode="r", allow_pickle=False)[first_id : first_id + count])

    def _check_sample(self, shard: Shard, place: int, schema: str | None, indexed: int | None) -> str | None:
        """What is wrong with a sample; None for nothing."""
        try:
            sample = shard[place]
            _check_content(sample, schema)
            length = None if self.processor is None else self.processor.measure(sample)
        except ShardError as error:
            return f"{str(error).removeprefix(f'{shard.path}: sample {place} ')}: {_REPLACE}"
        except LmmsStreamError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - of a processor, which may be anybody's
            return f"cannot be measured ({error!r}): correct the sample or the processor"
        if length is not None and indexed is not None and length != indexed:
            return f"has {length} tokens, its lengths index says {indexed}: write it again with lmms-stream index"
        return None


def _check_content(sample: Sample, schema: str | None) -> None:
    """DataError for a sample that does not fit its schema."""
    if schema == "messages":
        media_parts(read_chat(sample["messages"]).messages, sample["media"])
    elif schema == "tokens":
        spans = sample["loss_spans"]
        if sample["input_ids"].ndim != 1 or (spans.size and (spans.ndim != 2 or spans.shape[1] != 2)):
            raise DataError(
                f"input_ids and loss_spans have the shapes {list(sample['input_ids'].shape)} and {list(spans.shape)}, "
                "expected [T] and [k, 2]: convert the dataset again"
            )
        try:
            TokensProcessor().process(sample)
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
    """The problems of all shards, in their order. Deep checks run in processes, the others wait and hash in threads."""
    first_ids = list(accumulate((info.num_samples for info in shards), initial=0))
    found: dict[int, list[Problem]] = {}
    threads = not checker.deep or num_workers == 1
    executor = ThreadPoolExecutor(num_workers) if threads else _processes(checker, num_workers)
    run = checker.check if threads else _check
    try:
        futures = {executor.submit(run, info, first_ids[place]): place for place, info in enumerate(shards)}
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            on_shard()
    except BrokenProcessPool as error:
        raise WorkerError(
            "a process that checks shards died: verify again with fewer --workers if memory ran out (a script must "
            "call verify_dataset below `if __name__ == '__main__':`)"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)
    return [problem for place in sorted(found) for problem in found[place]]


_checker: ShardChecker | None = None  # of a process that checks shards


def _processes(checker: ShardChecker, num_workers: int) -> Executor:
    try:
        pickled = pickle.dumps(checker)
    except Exception as error:
        raise ConfigError(f"the processor cannot be sent to other processes ({error!r}): pass num_workers=1") from error
    return ProcessPoolExecutor(num_workers, mp_context=get_context("spawn"), initializer=_begin, initargs=(pickled,))


def _begin(pickled: bytes) -> None:
    global _checker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the command, which ends its processes
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a core for each process
    _checker = pickle.loads(pickled)


def _check(info: ShardInfo, first_id: int) -> list[Problem]:
    assert _checker is not None
    return _checker.check(info, first_id)
