"""The loss on a dataset that is not trained on: all of it, the same for any number of ranks."""

from __future__ import annotations

import torch

from ..errors import ConfigError
from ..loader.loader import PackedLoader
from ..types import World
from .model.model import PackedModel
from .model.sharding import reshard
from .report.metrics import objective_losses
from .run.distributed import gather
from .tasks.steps import TaskSteps

EVAL_NAME = "eval_dataset"  # the name of its source in errors


def check_evaluated(loader: PackedLoader) -> None:
    """ConfigError for a loader whose packs never end."""
    if loader.packs_left is None:
        raise ConfigError(
            f"the {EVAL_NAME} is packed in lanes, which have no end: write its lengths index with lmms-stream index, "
            "and leave its packing_mode auto"
        )


def evaluate(
    model: PackedModel, loader: PackedLoader, steps: TaskSteps, *, device: torch.device, world: World
) -> dict[str, float]:
    """eval_loss, the mean over the loss tokens of an epoch of `loader`, and eval_num_loss_tokens; all ranks call it.

    Of a task with several objectives it is their weighted sum, beside eval_loss/OBJECTIVE. The loader gives all ranks
    the same number of packs, some without a label, so that all take part in FSDP's collectives.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(len(steps.logged), dtype=torch.float64, device=device)
    units, num_loss_tokens = [0.0] * len(steps.objectives), 0
    for batch in loader:
        sums += torch.stack(steps.forward(batch))
        units = [total + more for total, more in zip(units, steps.units([batch]), strict=True)]
        num_loss_tokens += batch.num_loss_tokens
    model.train(was_training)
    reshard(model)
    everyone = gather([*sums.tolist(), *units, num_loss_tokens], world.world_size)[:: world.replication]
    *totals, num_loss_tokens = everyone.sum(dim=0).tolist()
    losses, units = totals[: len(sums)], totals[len(sums) :]
    of_logged = [count for each, count in zip(steps.objectives, units, strict=True) if each.is_logged]
    if not any(of_logged):
        raise ConfigError(f"the {EVAL_NAME} has no token that is learnt: choose another")
    figures = objective_losses(steps.logged, [EVAL_NAME], [[[loss], [0.0]] for loss in losses], of_logged)
    return {
        **{f"eval_{name}": loss for name, loss in figures.items()},
        "eval_num_loss_tokens": int(num_loss_tokens),
    }
