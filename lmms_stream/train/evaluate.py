"""The loss on a dataset that is not trained on: all of it, the same for any number of ranks."""

from __future__ import annotations

import torch

from ..errors import ConfigError
from ..loader import PackedLoader
from ..types import World
from .distributed import gather
from .model import PackedModel


@torch.no_grad()
def evaluate(model: PackedModel, loader: PackedLoader, *, device: torch.device, world: World) -> float:
    """The mean loss over the loss tokens of an epoch of `loader`; all ranks call it."""
    was_training = model.training
    model.eval()
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    for batch in loader:
        model.check(batch)
        losses, _ = model(batch.to(device))
        total += losses.double().sum()
        count += batch.num_loss_tokens
    model.train(was_training)
    loss, num_loss_tokens = gather([float(total), count], world.world_size).sum(dim=0).tolist()
    if not num_loss_tokens:
        raise ConfigError("the eval_dataset has no token that is learnt: choose another")
    return float(loss) / float(num_loss_tokens)
