"""Which epoch an iteration of a dataset is, where loader workers are processes that come and go."""

from __future__ import annotations

import zlib
from typing import Any

import torch

_COUNT_BITS = 31


class EpochCounter:
    """Counts iterations; all workers of one iteration of a DataLoader get the same number.

    One 64-bit word of shared memory (which has no name, so nothing of it outlives its processes) holds the count of
    iterations begun and a hash of the last one's identity. The first worker that comes with another identity counts
    one up; as the word is written whole, it does not matter which one that is, nor whether two do it at once.
    """

    def __init__(self) -> None:
        # [hash of the last iteration << 31 | iterations begun, epoch to resume, its position]
        self._shared = torch.tensor([0, -1, 0], dtype=torch.int64).share_memory_()
        self._iterations_here = 0

    def begin(self, worker: Any) -> tuple[int, int]:
        """The epoch of the iteration that begins in this process, and the position that it begins at.

        worker: torch's get_worker_info(). Its seed less its number is common to the workers of a DataLoader's
        iterator; persistent workers iterate several times, which each counts for itself.
        """
        self._iterations_here += 1
        word = int(self._shared[0])
        count = word & (1 << _COUNT_BITS) - 1
        identity = None
        if worker is not None:
            identity = zlib.crc32(f"{worker.seed - worker.id} {self._iterations_here}".encode())
        if identity is None or word >> _COUNT_BITS != identity:
            count += 1
            self._shared[0] = (identity or 0) << _COUNT_BITS | count
        return self.current()

    def current(self) -> tuple[int, int]:
        """The epoch of the iteration that was begun last (0 before the first), and where it began."""
        epoch = max(0, (int(self._shared[0]) & (1 << _COUNT_BITS) - 1) - 1)
        return epoch, int(self._shared[2]) if int(self._shared[1]) == epoch else 0

    def resume(self, epoch: int, position: int) -> None:
        """The next iteration is of this epoch and begins at this position."""
        self._shared[0] = epoch
        self._shared[1] = epoch
        self._shared[2] = position
