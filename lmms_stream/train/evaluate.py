"""The loss on a dataset that is not trained on: all of it, the same for any number of ranks."""

from __future__ import annotations

import torch

from ..errors import ConfigError
from ..loader.loader import PackedLoader
from ..types import World
from .model.isolation import check_lengths
from .model.model import PackedModel
from .model.sharding import reshard
from .run.distributed import gather

EVAL_NAME = "eval_dataset"  # the name of its source in errors


def check_evaluated(loader: PackedLoader) -> None:
    """ConfigError for a loader whose packs never end."""
    if loader.packs_left is None:
        raise ConfigError(
            f"the {EVAL_NAME} is packed in lanes, which have no end: write its lengths index with lmms-stream index, "
            "and leave its packing_mode auto"
        )


@torch.no_grad()
def evaluate(model: PackedModel, loader: PackedLoader, *, device: torch.device, world: World) -> dict[str, float]:
    """eval_loss, the mean over the loss tokens of an epoch of `loader`, and eval_num_loss_tokens; all ranks call it.

    The loader gives all ranks the same number of packs, some without a label, so that all take part in FSDP's
    collectives.
    """
    was_training = model.training
    model.eval()
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    for batch in loader:
        model.check_tokens(batch)
        check_lengths(model.model.config, batch)
        total += model(batch.to(device)).tokens.double().sum()
        count += batch.num_loss_tokens
    model.train(was_training)
    reshard(model)
    everyone = gather([float(total), count], world.world_size)[:: world.replication]
    loss, num_loss_tokens = everyone.sum(dim=0).tolist()
    if not num_loss_tokens:
        raise ConfigError(f"the {EVAL_NAME} has no token that is learnt: choose another")
    return {"eval_loss": loss / num_loss_tokens, "eval_num_loss_tokens": int(num_loss_tokens)}
