"""Tensors in memory shared by a process and its children, also in copies of objects."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import WorkerError

MEMORY = "/dev/shm"
LEAST_BYTES = 1 << 18  # left after a tensor, for locks of workers


def shared_zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros in shared memory. Raises WorkerError for too little memory.

    share_memory_() copies a tensor, with threads for large tensors. In a forked process the threads do not exist; the
    copy would never end if the parent had used the threads before.
    """
    num_bytes, memory = math.prod(shape) * dtype.itemsize, os.statvfs(MEMORY)
    if (free := memory.f_bavail * memory.f_frsize) < num_bytes + LEAST_BYTES:
        raise WorkerError(
            f"{MEMORY} has {free >> 10} of {memory.f_blocks * memory.f_frsize >> 10} KiB left, and datasets and "
            f"loaders need {num_bytes + LEAST_BYTES >> 10}: give the container more (docker run --shm-size 1g; "
            f"Kubernetes: an emptyDir of medium Memory at {MEMORY})"
        )
    storage = torch.UntypedStorage._new_shared(num_bytes)
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)


class SharesTensors:
    """Class with tensors in shared memory.

    A copy by copy.deepcopy, or by pickle for another program, gets its own shared memory: without shared memory, the
    copy's processes would not see each other's writes.
    """

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() and not value.is_shared():
                own = shared_zeros(*value.shape, dtype=value.dtype)
                own.numpy()[...] = value.numpy()
                setattr(self, name, own)
