"""Communication of a tensor between ranks, and of its gradient on the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

Exchange = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


def exchanged(tensor: torch.Tensor, group: dist.ProcessGroup, *, forth: Exchange, back: Exchange) -> torch.Tensor:
    """Return the result of `forth` for a tensor and the ranks of a group; `back` maps its gradient to the tensor's."""
    made: torch.Tensor = _Exchanged.apply(tensor, group, forth, back)
    return made


def swapped(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange rows: row r of each rank's tensor, [ranks, …], becomes a row of rank r; gradients take the same way
    back.
    """
    return exchanged(rows, group, forth=_swap, back=_swap)


def _swap(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    made = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dist.all_to_all_single(made, rows.contiguous(), group=group)
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
