"""StreamingDataset: samples made on demand; memory does not grow with the number of rows."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...checks import whole_number
from ...errors import DataError
from .base import BaseDataset
from .prompts import Outcome
from .sample import Sample


class StreamingDataset(BaseDataset):
    """See BaseDataset; yields the same samples in the same order as Dataset.

    In Relax's order this holds only if no rows are dropped: Dataset, like Relax's, shuffles only the kept samples.

    buffer_size: number of recently used samples kept in memory. prefetch_chunk_size: rows made together in the
    background; prefetch_max_cached: maximum rows made ahead, in whole chunks and at least one (0: none);
    prefetch_num_workers: threads. shuffle: call `shuffle(0)` at the start. Dropped rows are counted when read.

    `len` counts all rows, including rows dropped later: their number is unknown until all rows are read.
    """

    def __init__(
        self,
        *arguments: Any,
        buffer_size: int = 10000,
        prefetch_chunk_size: int = 32,
        prefetch_max_cached: int = 256,
        prefetch_num_workers: int = 1,
        shuffle: bool = False,
        **settings: Any,
    ):
        for name, number, least in (
            ("buffer_size", buffer_size, 0),
            ("prefetch_chunk_size", prefetch_chunk_size, 1),
            ("prefetch_max_cached", prefetch_max_cached, 0),
            ("prefetch_num_workers", prefetch_num_workers, 1),
        ):
            whole_number(name, number, least=least)
        self.buffer = SampleBuffer(buffer_size)
        self._chunk_size = min(prefetch_chunk_size, prefetch_max_cached or prefetch_chunk_size)
        self._num_ahead = prefetch_max_cached // self._chunk_size
        self._num_threads = prefetch_num_workers
        self._ahead: Ahead[Outcome] | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()  # process that owns the threads
        self._chunk: tuple[Key, list[Outcome]] | None = None  # the last taken chunk
        super().__init__(*arguments, **settings)
        if shuffle:
            self.shuffle(0)

    def __len__(self) -> int:
        return self.num_rows

    def close(self) -> None:
        """Stop background work; the next request starts it again."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None
        self._chunk = None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a StreamingDataset has threads and open files: make it in the process that reads it")

    def get_stats(self) -> dict[str, Any]:
        """Return counts under Relax's names: rows, size and hit rate of the buffer, and the position of batches."""
        return {
            "total_size": len(self),
            "buffer_size": len(self.buffer),
            "buffer_hit_rate": self.buffer.hit_rate,
            "filter_count": self.num_overlong,
            "total_processed": self.num_processed,
            "current_epoch": self.epoch_id,
            "current_position": self.position,
        }

    def _made(self, rows: NDArray[np.int64]) -> list[Outcome]:
        with self._lock:
            self.num_processed += len(rows)
        return super()._made(rows)

    def _outcomes(self, rows: NDArray[np.int64]) -> list[Outcome]:
        """Return outcomes from the buffer; make all missing outcomes together."""
        numbers = rows.tolist()
        found = self.buffer.outcomes(numbers)
        if not found:
            made = self._made(rows)
            self.buffer.keep(numbers, made)
            return made
        missing = [row for row in dict.fromkeys(numbers) if row not in found]
        if missing:
            made = self._made(np.array(missing, np.int64))
            self.buffer.keep(missing, made)
            found.update(zip(missing, made, strict=True))
        return [found[row] for row in numbers]

    def _of_epoch(self, rows: NDArray[np.int64]) -> list[Outcome]:
        """Return the outcomes of rows in a pass through the epoch; skip the buffer if it cannot help.

        Without shuffle a row comes again only after all other rows. In shuffled epochs of at least twice as many rows
        as the buffer holds, at most an eighth of the rows come again while they are in the buffer.
        """
        most_rows = self.buffer.max_size * (2 if self.is_shuffled else 1)
        return self._made(rows) if self.num_rows > most_rows else self._outcomes(rows)

    def _outcomes_at(self, start: int, stop: int) -> list[Outcome]:
        """Take chunks made or begun by threads; make all other chunks here, together."""
        if not self._num_ahead or start == stop:
            return self._of_epoch(self.index_manager.permutation.between(start, stop))
        first, last = start // self._chunk_size, (stop - 1) // self._chunk_size
        keys = [self._key(self.epoch_id, number) for number in range(first, last + 1)]
        taken = {key: self._taken(key) for key in keys}
        missing = [key for key in keys if taken[key] is None]
        if missing:
            rows = [self._rows_of(key) for key in missing]
            made = self._of_epoch(np.concatenate(rows) if len(rows) > 1 else rows[0])
            ends = np.cumsum([len(each) for each in rows]).tolist()
            taken |= {key: made[end - len(each) : end] for key, end, each in zip(missing, ends, rows, strict=True)}
        found = [outcome for key in keys for outcome in taken[key] or ()]
        self._chunk = keys[-1], taken[keys[-1]] or []
        self._threads().keep(self._following(keys[-1]))
        return found[start - first * self._chunk_size :][: stop - start]

    def _taken(self, key: Key) -> list[Outcome] | None:
        if self._chunk is not None and self._chunk[0] == key:
            return self._chunk[1]
        return self._threads().take(key)

    def _threads(self) -> Ahead[Outcome]:
        if self._ahead is None or self._pid != os.getpid():  # threads do not survive a fork
            self._pid = os.getpid()
            self._ahead = Ahead(self._of_epoch, num_threads=self._num_threads)
        return self._ahead

    def _key(self, epoch_id: int, number: int) -> Key:
        return self.index_manager.name_of(epoch_id), epoch_id, number

    def _following(self, key: Key) -> Iterator[tuple[Key, Callable[[], NDArray[np.int64]]]]:
        _, epoch_id, number = key
        for _ in range(self._num_ahead):
            number += 1
            if number * self._chunk_size >= self.num_rows:
                epoch_id, number = epoch_id + 1, 0
            key = self._key(epoch_id, number)
            yield key, partial(self._rows_of, key)

    def _rows_of(self, key: Key) -> NDArray[np.int64]:
        _, epoch_id, number = key
        start = number * self._chunk_size
        return self.index_manager.of_epoch(epoch_id).between(start, min(start + self._chunk_size, self.num_rows))


# Chunks of an epoch made in the background, in the order of use.

T = TypeVar("T")
Key = tuple[str, int, int]  # name of an order, an epoch, a chunk number


class Ahead(Generic[T]):
    """Chunks made ahead by threads. make: rows -> results, called by threads.

    Only the chunks of the last `keep` are held, without a limit on their size. Before a fork of this process, begun
    chunks are finished: a child would inherit locked locks.
    """

    def __init__(self, make: Callable[[NDArray[np.int64]], list[T]], *, num_threads: int):
        self._make = make
        self._num_threads = num_threads
        self._num_busy = 0
        self._lock = threading.Lock()
        self._waiting: dict[Key, NDArray[np.int64]] = {}  # rows of chunks not begun yet, in order of use
        self._begun: dict[Key, Future[list[T]]] = {}
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="lmms_stream-rl")
        self._end = weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        _ALIVE.add(self)

    def take(self, key: Key) -> list[T] | None:
        """Return the chunk, waiting until it is made; None if not begun. Raises errors of `make` unchanged."""
        with self._lock:
            self._waiting.pop(key, None)
            future = self._begun.pop(key, None)
        return None if future is None else future.result()

    def keep(self, following: Iterable[tuple[Key, Callable[[], NDArray[np.int64]]]]) -> None:
        """Begin these chunks, given by their rows, unless begun; drop all other chunks."""
        wanted = dict(following)
        with self._lock:
            self._begun = {key: future for key, future in self._begun.items() if key in wanted}
            self._waiting = {key: rows() for key, rows in wanted.items() if key not in self._begun}
            num_more = max(0, min(self._num_threads, len(self._waiting)) - self._num_busy)
            self._num_busy += num_more
        for _ in range(num_more):
            self._pool.submit(self._make_those_waiting)

    def _make_those_waiting(self) -> None:
        while True:
            with self._lock:
                key = next(iter(self._waiting), None)
                if key is None:
                    self._num_busy -= 1
                    return
                rows = self._waiting.pop(key)
                future: Future[list[T]] = Future()
                self._begun[key] = future
            try:
                future.set_result(self._make(rows))
            except BaseException as error:  # noqa: BLE001 - raised where the chunk is taken
                future.set_exception(error)

    def rest(self) -> None:
        """Cancel chunks that are not begun, and wait for begun chunks."""
        with self._lock:
            self._waiting.clear()
            begun = [*self._begun.values()]
        wait(begun)

    def close(self) -> None:
        self.keep(())
        self._end()


_ALIVE: weakref.WeakSet[Ahead[Any]] = weakref.WeakSet()


def _rest_all() -> None:
    for each in list(_ALIVE):
        each.rest()


os.register_at_fork(before=_rest_all, after_in_child=_ALIVE.clear)


# SampleBuffer: the most recently used samples, by row.

# Parts kept of a sample: its prompt, label, metadata and media. Keeping Sample objects would cost more than making them
# again: Python's garbage collector repeatedly traverses every sample and its lists.
_Kept = tuple[Any, Any, dict[str, Any], Any, Any] | Sample | DataError | str


class SampleBuffer:
    """Samples of at most max_size rows; evicts the least recently used row. Safe for several threads."""

    def __init__(self, max_size: int = 10000):
        self.max_size = max_size
        self._held: OrderedDict[int, _Kept] = OrderedDict()
        self._hits = 0
        self._misses = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def hit_rate(self) -> float:
        """Share of requested rows found in the buffer."""
        return self._hits / max(self._hits + self._misses, 1)

    def get(self, idx: int) -> Sample | None:
        """Return the sample of a row; None if the row is not in the buffer or was dropped."""
        found = self.outcomes([idx]).get(idx)
        return found if isinstance(found, Sample) else None

    def put(self, idx: int, sample: Sample) -> None:
        self._put([(idx, sample)])

    def clear(self) -> None:
        """Remove all rows and reset the counts."""
        with self._lock:
            self._held.clear()
            self._hits = self._misses = 0

    def outcomes(self, rows: list[int]) -> dict[int, Outcome]:
        """Return the outcomes of the rows in the buffer."""
        found: dict[int, Outcome] = {}
        with self._lock:
            if not self._held.keys().isdisjoint(rows):
                for row in rows:
                    if row in self._held:
                        self._held.move_to_end(row)
                        kept = self._held[row]
                        found[row] = Sample.of(*kept) if isinstance(kept, tuple) else kept
            self._hits += len(found)
            self._misses += len(rows) - len(found)
        return found

    def keep(self, rows: list[int], outcomes: Iterable[Outcome]) -> None:
        """Store the outcomes of rows; of samples only the parts in _Kept."""
        self._put(
            (row, (each.prompt, each.label, each.metadata, each.multimodal_inputs, each.teacher_multimodal_inputs))
            if isinstance(each, Sample)
            else (row, each)
            for row, each in zip(rows, outcomes, strict=True)
        )

    def _put(self, held: Iterable[tuple[int, _Kept]]) -> None:
        with self._lock:
            self._held.update(held)
            while len(self._held) > self.max_size:
                self._held.popitem(last=False)
