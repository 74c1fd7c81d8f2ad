"""Tensors in memory that a process shares with those that it starts, in copies of their objects, too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


def shared_zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros in shared memory.

    share_memory_() copies a tensor, larger ones in threads, which a forked process does not have: if its parent has
    used these threads before, the process would wait for ever.
    """
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)


class SharesTensors:
    """A class whose tensors lie in memory that processes share.

    A copy by copy.deepcopy, or by pickle for another program, has such memory of its own: without shared memory, its
    processes would not see each other's writes.
    """

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() and not value.is_shared():
                own = shared_zeros(*value.shape, dtype=value.dtype)
                own.numpy()[...] = value.numpy()
                setattr(self, name, own)
