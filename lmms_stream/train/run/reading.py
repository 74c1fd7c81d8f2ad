"""What the host reads of the device in a step, in one transfer: it is the one time that it waits for the device."""

from __future__ import annotations

import torch


def read(grad_norm: torch.Tensor, losses: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The norm, and the losses on the CPU: float64 of their shape."""
    norm, *values = torch.cat([each.detach().double().flatten() for each in (grad_norm, losses)]).tolist()
    return norm, torch.tensor(values, dtype=torch.float64).view(losses.shape)
