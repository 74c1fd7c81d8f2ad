"""Losses and predictions on datasets that are not trained on: on all of each, the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers.trainer_utils import PredictionOutput

from ..errors import ConfigError
from ..mds.core import gives_packs
from ..types import Batch, World
from .data import EVAL_NAME, check_evaluated
from .model.sharding import reshard
from .predictions import Predictions, check_text, figures_of
from .protocol import Trainer
from .report.metrics import objective_losses
from .run.distributed import gather
from .run.settings import Packed
from .tasks.steps import TaskSteps

EvaluationStep = Callable[[Batch], Sequence[torch.Tensor]]


def evaluate(trainer: Trainer, name: str, dataset: Packed, *, prefix: str) -> dict[str, float]:
    """The figures of a dataset, with those of compute_metrics; all ranks call it.

    prefix: of names by compute_metrics, which is left out.
    """
    compute = trainer.functions.compute_metrics
    figures, predictions = _run(trainer, name, dataset, predicts=compute is not None)
    if compute is None or predictions is None:
        return figures
    return {**figures, **figures_of(compute, predictions.gathered(on_all=False), prefix=prefix)}


def predict(trainer: Trainer, dataset: Packed, *, prefix: str) -> PredictionOutput:
    """Predictions and labels of all samples of a dataset, by sample id, and the figures of it; all ranks call it."""
    if not gives_packs(dataset):
        raise ConfigError(f"test_dataset is a {type(dataset).__name__}: give a PackedStreamingDataset")
    check_text(trainer.model, "predict")
    figures, predictions = _run(trainer, prefix, dataset, predicts=True)
    assert predictions is not None
    made: Any = predictions.gathered(on_all=True)
    compute = trainer.functions.compute_metrics
    if compute is not None:
        figures |= figures_of(compute, made, prefix=prefix)
    metrics = joined_figures({"": figures}, prefix=prefix)
    return PredictionOutput(made.predictions, made.label_ids, metrics)


def _run(
    trainer: Trainer, name: str, dataset: Packed, *, predicts: bool
) -> tuple[dict[str, float], Predictions | None]:
    """The losses of a dataset, and its predictions, where they are asked for."""
    loader = trainer.data.eval_loader(name, dataset)
    check_evaluated(loader)
    trainer.callbacks.given["eval_dataloader"] = loader
    model, preprocess = trainer.model, trainer.functions.preprocess_logits_for_metrics
    predictions = Predictions(model, preprocess, world=trainer.world, device=trainer.device) if predicts else None

    def step(pack: Batch) -> Sequence[torch.Tensor]:
        with predictions.taken(pack) if predictions is not None else nullcontext():
            made = trainer.evaluation_step(pack)
        trainer.callbacks.call("on_prediction_step")
        return made

    was_training = model.training
    model.eval()
    figures = mean_losses(
        loader, trainer.steps, step, device=trainer.device, world=trainer.world, name=loader.sources[0]
    )
    model.train(was_training)
    reshard(model)
    return figures, predictions


def mean_losses(
    batches: Iterable[Batch],
    steps: TaskSteps,
    step: EvaluationStep,
    *,
    device: torch.device,
    world: World,
    name: str = EVAL_NAME,
) -> dict[str, float]:
    """loss, the mean over the loss tokens of `batches`, and num_loss_tokens; all ranks call it.

    Of a task with several objectives it is their weighted sum, beside loss/OBJECTIVE. All ranks have the same number of
    packs, some without a label, so that all take part in FSDP's collectives. step: of a pack, the sums of losses of
    each objective that is logged. name: of the dataset, for an error.
    """
    sums = torch.zeros(len(steps.logged), dtype=torch.float64, device=device)
    units, num_loss_tokens = [0.0] * len(steps.objectives), 0
    for batch in batches:
        sums += torch.stack(list(step(batch)))
        units = [total + more for total, more in zip(units, steps.units([batch]), strict=True)]
        num_loss_tokens += batch.num_loss_tokens
    everyone = gather([*sums.tolist(), *units, num_loss_tokens], world.world_size)[:: world.replication]
    *totals, num_loss_tokens = everyone.sum(dim=0).tolist()
    losses, units = totals[: len(sums)], totals[len(sums) :]
    of_logged = steps.units_of_logged(units)
    if not any(of_logged):
        raise ConfigError(f"the {name} has no token that is learnt: choose another")
    figures = objective_losses(steps.logged, [EVAL_NAME], [[[loss], [0.0]] for loss in losses], of_logged)
    return {**figures, "num_loss_tokens": int(num_loss_tokens)}


def joined_figures(by_name: Mapping[str, Mapping[str, float]], *, prefix: str) -> dict[str, float]:
    """The figures of all evaluations as `prefix`_NAME_FIGURE, and those over all of them together.

    >>> joined_figures({"a": {"loss": 1.0, "num_loss_tokens": 3}, "b": {"loss": 2.0, "num_loss_tokens": 1}}, prefix="e")
    {'e_a_loss': 1.0, 'e_a_num_loss_tokens': 3, 'e_b_loss': 2.0, 'e_b_num_loss_tokens': 1, 'e_loss': 1.25, \
'e_num_loss_tokens': 4}
    """
    if set(by_name) == {""}:
        return {f"{prefix}_{figure}": value for figure, value in by_name[""].items()}
    figures = {f"{prefix}_{name}_{key}": value for name, own in by_name.items() for key, value in own.items()}
    num_tokens = sum(own["num_loss_tokens"] for own in by_name.values())
    total = sum(own["loss"] * own["num_loss_tokens"] for own in by_name.values())
    return {**figures, f"{prefix}_loss": total / num_tokens, f"{prefix}_num_loss_tokens": num_tokens}
