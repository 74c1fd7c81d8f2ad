"""The norm of all gradients, and clipping by it, whatever meshes parameters lie on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

Parts = tuple[DeviceMesh | None, tuple[int, ...]]  # a mesh, and its dimensions along which ranks have parts


def clip_gradients(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale gradients down so that their norm, together, is at most max_norm; the norm before: float32[].

    It stays on the device, and is the same on all ranks. Parameters that all lie on one mesh, in parts along one of its
    dimensions, are clipped as torch's clip_grad_norm_ does, to the bit; others it does not take, or sums in an order
    that ranks may not share.
    """
    by_parts: dict[Parts, list[torch.Tensor]] = {}
    for each in parameters:
        if each.grad is not None:
            by_parts.setdefault(_parts(each), []).append(each)
    if len(by_parts) == 1 and len(next(iter(by_parts))[1]) <= 1:
        ((_, group),) = by_parts.items()
        norm = get_total_norm([each.grad for each in group if each.grad is not None])
        total = norm.full_tensor() if isinstance(norm, DTensor) else norm
    else:
        total = _joined(by_parts)
    for group in by_parts.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total


def _parts(parameter: torch.Tensor) -> Parts:
    if not isinstance(parameter, DTensor):
        return None, ()
    dims = [dim for dim, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate)]
    return parameter.device_mesh, tuple(dims)


def _joined(by_parts: dict[Parts, list[torch.Tensor]]) -> torch.Tensor:
    """Each rank's squares, summed over all ranks at once; what several ranks have counts once."""
    if not by_parts:
        return torch.zeros(())
    squares = [
        _square(group) / (dist.get_world_size() // _num_parts(mesh, dims)) for (mesh, dims), group in by_parts.items()
    ]
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    return total.sqrt().float()


def _num_parts(mesh: DeviceMesh | None, dims: Sequence[int]) -> int:
    """Ranks that have different parts of a parameter."""
    count = 1
    for dim in dims:
        count *= 1 if mesh is None else mesh.size(dim)
    return count


def _square(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of this rank's parts of gradients: float64[]."""
    parts = [each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad for each in parameters]
    norms = torch._foreach_norm([part for part in parts if part is not None], 2.0, torch.float32)
    return torch.stack(norms).double().square().sum()
