"""What ranks send each other of a tensor, and of its gradient on the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

Exchange = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


def exchanged(tensor: torch.Tensor, group: dist.ProcessGroup, *, forth: Exchange, back: Exchange) -> torch.Tensor:
    """What `forth` makes of a tensor with the ranks of a group, whose gradient becomes the tensor's by `back`."""
    made: torch.Tensor = _Exchanged.apply(tensor, group, forth, back)
    return made


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, forth: Exchange, back: Exchange
    ) -> torch.Tensor:
        ctx.group, ctx.back = group, back
        return forth(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.back(gradients, ctx.group), None, None, None
