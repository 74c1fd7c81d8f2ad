"""StreamingDataset: samples that are made when they are asked for; memory does not grow with the number of rows."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .ahead import Ahead, Key
from .base import BaseDataset
from .prompts import Outcome


class StreamingDataset(BaseDataset):
    """See BaseDataset; it gives the same samples in the same order as Dataset.

    buffer_size: samples that were made and are kept, those used last. prefetch_chunk_size: rows made together in the
    background; prefetch_max_cached: rows made ahead at most, in whole chunks and at least one (0: none);
    prefetch_num_workers: threads. shuffle: as if `shuffle(0)` were called. What is dropped is counted as it is met.

    `len` counts the rows, also those that will be dropped: how many these are is not known before they are read.
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
            if number < least:
                raise ConfigError(f"{name} must be at least {least}, got {number}")
        self._kept_outcomes: OrderedDict[int, Outcome] = OrderedDict()
        self._buffer_size = buffer_size
        self._lock = threading.Lock()
        self._chunk_size = min(prefetch_chunk_size, prefetch_max_cached or prefetch_chunk_size)
        self._num_ahead = prefetch_max_cached // self._chunk_size
        self._num_threads = prefetch_num_workers
        self._ahead: Ahead[Outcome] | None = None
        self._pid = os.getpid()  # of the process whose threads these are
        self._chunk: tuple[Key, list[Outcome]] | None = None  # the last that was taken
        super().__init__(*arguments, **settings)
        if shuffle:
            self.shuffle(0)

    def __len__(self) -> int:
        return self.num_rows

    def close(self) -> None:
        """End what goes on in the background; what is asked for afterwards begins it again."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None
        self._chunk = None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a StreamingDataset has threads and open files: make it in the process that reads it")

    def _begin(self, *, epoch_id: int, is_shuffled: bool, position: int) -> None:
        goes_on = hasattr(self, "epoch_id") and (self.is_shuffled, self.epoch_id + 1) == (is_shuffled, epoch_id)
        super()._begin(epoch_id=epoch_id, is_shuffled=is_shuffled, position=position)
        self._chunk = None
        if self._ahead is not None and not goes_on:
            self._ahead.keep(())

    def _outcomes(self, rows: NDArray[np.int64]) -> list[Outcome]:
        """From the buffer, and what is not in it made now, all of it together."""
        numbers = rows.tolist()
        found: dict[int, Outcome] = {}
        with self._lock:
            for row in numbers:
                if row in self._kept_outcomes:
                    self._kept_outcomes.move_to_end(row)
                    found[row] = self._kept_outcomes[row]
        missing = [row for row in dict.fromkeys(numbers) if row not in found]
        if missing:
            found.update(zip(missing, self._made(np.array(missing, np.int64)), strict=True))
            with self._lock:
                self._kept_outcomes.update((row, found[row]) for row in missing)
                while len(self._kept_outcomes) > self._buffer_size:
                    self._kept_outcomes.popitem(last=False)
        return [found[row] for row in numbers]

    def _outcomes_at(self, start: int, stop: int) -> list[Outcome]:
        if not self._num_ahead:
            return super()._outcomes_at(start, stop)
        found: list[Outcome] = []
        while start < stop:
            number, skip = divmod(start, self._chunk_size)
            chunk = self._taken((self.epoch_id, number))[skip : skip + stop - start]
            found += chunk
            start += len(chunk)
        return found

    def _taken(self, key: Key) -> list[Outcome]:
        if self._chunk is None or self._chunk[0] != key:
            if self._ahead is None or self._pid != os.getpid():  # threads do not survive a fork
                self._pid = os.getpid()
                self._ahead = Ahead(self._outcomes, num_threads=self._num_threads)
            taken = self._ahead.take(key)
            self._ahead.keep(self._following(key))
            self._chunk = key, self._outcomes(self._rows_of(key)()) if taken is None else taken
        return self._chunk[1]

    def _following(self, key: Key) -> Iterator[tuple[Key, Callable[[], NDArray[np.int64]]]]:
        epoch_id, number = key
        for _ in range(self._num_ahead):
            number += 1
            if number * self._chunk_size >= self.num_rows:
                epoch_id, number = epoch_id + 1, 0
            yield (epoch_id, number), self._rows_of((epoch_id, number))

    def _rows_of(self, key: Key) -> Callable[[], NDArray[np.int64]]:
        epoch_id, number = key
        start = number * self._chunk_size

        def rows() -> NDArray[np.int64]:
            order = self._order if epoch_id == self.epoch_id else self._order_of(epoch_id)
            return order(np.arange(start, min(start + self._chunk_size, self.num_rows)))

        return rows
