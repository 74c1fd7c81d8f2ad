"""The norm of all gradients, and clipping by it, whatever meshes parameters lie on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

Meshed = dict[DeviceMesh | None, list[torch.Tensor]]


def clip_gradients(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale gradients down so that their norm, together, is at most max_norm; the norm before: float32[].

    It stays on the device, and is the same on all ranks. torch's clip_grad_norm_ takes parameters of one mesh alone:
    here the norm of each mesh is computed as torch does, and the norm of these norms is that of all.
    """
    by_mesh: Meshed = {}
    for each in parameters:
        if each.grad is not None:
            by_mesh.setdefault(each.device_mesh if isinstance(each, DTensor) else None, []).append(each)
    norms = [get_total_norm([each.grad for each in group if each.grad is not None]) for group in by_mesh.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole)) if whole else torch.zeros(())
    for group in by_mesh.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total
