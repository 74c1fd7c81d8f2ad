"""Samples in their final order -> which of them each shard holds. samples -> [output] -> shard tasks.

A shard is full where MDSWriter would say so: with one sample more it would be larger than it may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from .encoding import ShardFormat
from .shards import ShardTask, shard_name


@dataclass(slots=True)
class Output:
    """The shards of one dataset as they fill. number: among the outputs of a conversion.

    file_numbers: which the files of its shards have in their names, in turn. rows: what its samples were made of, as
    packed_rows gives it.
    """

    number: int
    format: ShardFormat
    file_numbers: Iterator[int] = field(default_factory=count)
    num_shards: int = 0
    num_samples: int = 0
    lengths: list[NDArray[np.uint32]] = field(default_factory=list)
    rows: list[NDArray[np.int64]] = field(default_factory=list)
    _waiting: list[NDArray[np.int64]] = field(default_factory=list)  # for each sample: unit, first byte, size
    _bytes: int = 0  # of the shard that the waiting samples will make

    def add(self, samples: NDArray[np.int64], lengths: NDArray[np.uint32] | None) -> Iterator[ShardTask]:
        """Samples that follow, int64[n, 4]: unit, first byte in it, size, packed row; gives shards that are full."""
        if lengths is not None:
            self.lengths.append(lengths)
        self.num_samples += len(samples)
        self.rows.append(samples[:, 3].copy())
        samples = samples[:, :3]
        ends = np.cumsum(samples[:, 2] + 4)
        first, before = 0, 0  # the first sample that no shard has yet; bytes of all before it
        while first < len(samples):
            if not self._waiting:
                self._bytes = self.format.empty_bytes
            room = self.format.shard_bytes - self._bytes
            end = int(np.searchsorted(ends, before + room, side="right"))
            if end <= first and not self._waiting:
                end = first + 1  # this sample alone is larger than a shard may be
            if end > first:
                self._waiting.append(samples[first:end])
                self._bytes += int(ends[end - 1]) - before
                first, before = end, int(ends[end - 1])
            if first < len(samples):
                yield self._take()

    def finish(self) -> Iterator[ShardTask]:
        """The last shard."""
        if self._waiting:
            yield self._take()

    def _take(self) -> ShardTask:
        samples = np.concatenate(self._waiting)
        self._waiting = []
        self.num_shards += 1
        return ShardTask(
            output=self.number,
            number=self.num_shards - 1,
            name=shard_name(next(self.file_numbers)),
            sizes=samples[:, 2].copy(),
            runs=_joined(samples),
        )


def _joined(samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same bytes in as few runs as possible."""
    ends = samples[:, 1] + samples[:, 2]
    begins = np.ones(len(samples), bool)
    begins[1:] = (samples[1:, 0] != samples[:-1, 0]) | (samples[1:, 1] != ends[:-1])
    firsts = np.flatnonzero(begins)
    runs = samples[firsts].copy()
    runs[:, 2] = np.add.reduceat(samples[:, 2], firsts)
    return runs
