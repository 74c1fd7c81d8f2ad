"""A model of flow matching -> images for people to look at. Euler's method along the velocity, from noise at time 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import ConfigError
from ...train.model.build import takes
from .flow_matching import FlowMatching, velocity_of
from .images import LABELS


@torch.no_grad()
def sample_images(
    model: Any, task: FlowMatching, labels: torch.Tensor | list[int], *, num_steps: int = 50, guidance: float = 1.0,
    seed: int = 0,
) -> NDArray[np.uint8]:  # fmt: skip
    """An image of each label: uint8[n, S, S, 3]. model: whole, on the device of its parameters, as exported.

    guidance: how far the velocity of a class is followed beyond that of any class, 1 for itself (Ho and Salimans 2022).
    Image i is the same for its label, the seed and i, whatever the others are.
    """
    if num_steps < 1:
        raise ConfigError(f"num_steps must be at least 1, got {num_steps}")
    was_training = model.training
    wrapped = task.wrap(model).model.eval()
    device = next(wrapped.parameters()).device
    told = torch.as_tensor(labels, dtype=torch.int64, device=device)
    anyone = torch.full_like(told, task.num_classes or 0)
    noise = [np.random.default_rng([seed, i]).standard_normal(task.shape, np.float32) for i in range(len(told))]
    images = torch.from_numpy(np.stack(noise)).to(device)
    guides = guidance != 1 and takes(wrapped.forward, LABELS)
    for step in range(num_steps):
        times = torch.full((len(told),), step / num_steps, device=device)
        velocity = velocity_of(wrapped, images, times, told)
        if guides:
            free = velocity_of(wrapped, images, times, anyone)
            velocity = free + guidance * (velocity - free)
        images = images + velocity / num_steps
    model.train(was_training)
    if task.autoencoder is not None:
        images = task.autoencoder.decode(images)
    pixels = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    made: NDArray[np.uint8] = pixels.permute(0, 2, 3, 1).cpu().numpy()
    return made
