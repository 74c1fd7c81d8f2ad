"""What tensor parallel ranks send each other: activations, and gradients of them on the way back."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist


def copied(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What all ranks have, of which each computes something else: the gradient is the sum of theirs."""
    return cast(torch.Tensor, _Copied.apply(tensor, group))


def summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks, which all have then."""
    return cast(torch.Tensor, _Summed.apply(tensor, group))


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The parts of all ranks, one after another in the last dimension: [..., n] -> [..., n * ranks]."""
    return cast(torch.Tensor, _Gathered.apply(tensor, group))


def split(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of the last dimension of what all ranks have: [..., n] -> [..., n / ranks]."""
    return cast(torch.Tensor, _Split.apply(tensor, group))


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _join(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = part.new_empty(group.size(), *part.shape)
    dist.all_gather_into_tensor(parts.view(-1), part.reshape(-1), group=group)
    return torch.cat(parts.unbind(), dim=-1)


def _own(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return whole.chunk(group.size(), dim=-1)[group.rank()].contiguous()


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _sum(gradients[0], ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _join(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _own(gradients[0], ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _own(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _join(gradients[0], ctx.group), None
