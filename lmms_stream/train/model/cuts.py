"""What tensor parallel ranks send each other: activations, and gradients of them on the way back."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .exchanges import exchanged


def copied(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What all ranks have, of which each computes something else: the gradient is the sum of theirs."""
    return exchanged(tensor, group, forth=_same, back=_sum)


def summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks, which all have then."""
    return exchanged(tensor, group, forth=_sum, back=_same)


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The parts of all ranks, one after another in the last dimension: [..., n] -> [..., n * ranks]."""
    return exchanged(tensor, group, forth=_join, back=_own)


def split(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of the last dimension of what all ranks have: [..., n] -> [..., n / ranks]."""
    return exchanged(tensor, group, forth=_own, back=_join)


def _same(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return tensor.view_as(tensor)


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
