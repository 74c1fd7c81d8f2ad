"""Tensors in memory that a process shares with those that it starts, in copies of their objects, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class SharesTensors:
    """A class whose tensors lie in memory that processes share.

    A copy by copy.deepcopy, or by pickle for another program, has such memory of its own: without it none of its
    processes would see what another one writes.
    """

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.numel():
                value.share_memory_()  # changes nothing where it is shared, as in a process that was started
