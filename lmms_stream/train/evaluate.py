"""Losses and predictions on whole evaluation datasets, equal for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from transformers.trainer_utils import EvalPrediction, PredictionOutput

from ..errors import ConfigError, TrainingError
from ..mds.core import gives_packs
from ..processors.base import IGNORED_LABEL
from ..types import Batch, World
from .data import EVAL_NAME, check_evaluated
from .model.choice import evaluating
from .model.model import LogitsOf, PackedModel
from .model.towers import check_text
from .parts import TrainerParts
from .report.metrics import objective_losses
from .run.distributed import cpu_group, from_rank_0, gather, gather_objects
from .run.settings import Packed
from .tasks.steps import TaskSteps

EvaluationStep = Callable[[Batch], Sequence[torch.Tensor]]


def evaluate(trainer: TrainerParts, name: str, dataset: Packed, *, prefix: str) -> dict[str, float]:
    """Return the figures of a dataset, including compute_metrics; all ranks call this.

    prefix: to cut from names of compute_metrics.
    """
    compute = trainer.functions.compute_metrics
    figures, predictions = _run(trainer, name, dataset, predicts=compute is not None)
    if compute is None or predictions is None:
        return figures
    return {**figures, **figures_of(compute, predictions.gathered(on_all=False), prefix=prefix)}


def predict(trainer: TrainerParts, dataset: Packed, *, prefix: str) -> PredictionOutput:
    """Return predictions and labels of all samples of a dataset, by sample id, and figures; all ranks call this."""
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
    trainer: TrainerParts, name: str, dataset: Packed, *, predicts: bool
) -> tuple[dict[str, float], Predictions | None]:
    """Return the losses of a dataset, and the predictions; None unless predicts."""
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

    with evaluating(model):
        packs = trainer.phases.each_pack(loader, num_packs=len(loader), name=f"evaluating {loader.sources[0]}")
        figures = mean_losses(
            packs, trainer.steps, step, device=trainer.device, world=trainer.world, name=loader.sources[0]
        )
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
    """Return loss, the mean over the loss tokens of `batches`, and num_loss_tokens; all ranks call this.

    For a task with several objectives, loss is the weighted sum, next to loss/OBJECTIVE. All ranks have the same number
    of packs, some without labels, because all ranks take part in FSDP's collectives. step: a pack -> the sum of losses
    of each logged objective. name: of the dataset, for an error.
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
        raise ConfigError(f"the {name} has no token to train on: choose another dataset")
    figures = objective_losses(steps.logged, [EVAL_NAME], [[[loss], [0.0]] for loss in losses], of_logged)
    return {**figures, "num_loss_tokens": int(num_loss_tokens)}


def joined_figures(by_name: Mapping[str, Mapping[str, float]], *, prefix: str) -> dict[str, float]:
    """Return the figures of all evaluations as `prefix`_NAME_FIGURE, and loss and loss tokens of all together.

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


# The logits and labels of evaluated samples, and the figures of compute_metrics.

Arrays = tuple[NDArray[Any], ...]  # of a sample: labels, then predictions


class Predictions:
    """Collects the logits and labels of samples on each rank.

    preprocess: logits, float[1, T, V], and labels, int64[1, T], of a sample -> the values to keep (default: the
    logits). If the model computes logits from hidden states, only a sample's logits are in memory at once.
    """

    def __init__(
        self, model: PackedModel, preprocess: Callable[..., Any] | None, *, world: World, device: torch.device
    ):
        self._model, self._preprocess = model, preprocess
        self._world, self._device = world, device
        self._samples: list[tuple[int, Arrays]] = []

    @contextmanager
    def taken(self, pack: Batch) -> Iterator[None]:
        """Take predictions of a pack from the forward pass inside; if this has no logits, from a second pass after it.

        All ranks enter this context equally often.
        """
        is_taken = False

        def read(batch: Batch, logits_of: LogitsOf) -> None:
            nonlocal is_taken
            if not is_taken and batch.num_tokens == pack.num_tokens:
                is_taken = True
                self._take(pack, logits_of)

        self._model.read_logits = read
        try:
            yield
            if not is_taken:
                with torch.no_grad():
                    self._model.logits(pack.to(self._device))
        finally:
            self._model.read_logits = None

    @torch.no_grad()
    def _take(self, pack: Batch, logits_of: LogitsOf) -> None:
        for sample_id, (start, stop) in zip(pack.sample_ids.tolist(), pack.sample_bounds, strict=True):
            labels, made = pack.labels[:, start:stop].to(self._device), logits_of(slice(start, stop))[None]
            kept = made if self._preprocess is None else self._preprocess(made, labels)
            parts = kept if isinstance(kept, tuple | list) else (kept,)
            self._samples.append((sample_id, tuple(map(_array, (labels, *parts)))))

    def gathered(self, *, on_all: bool) -> EvalPrediction | None:
        """Return predictions of all ranks, by sample id: on rank 0 (None elsewhere), or on all. All ranks call this."""
        found: list[list[tuple[int, Arrays]]] = [[] for _ in range(self._world.world_size)]
        if on_all:
            found = gather_objects(self._samples, self._world.world_size)
        else:
            dist.gather_object(self._samples, found if self._world.rank == 0 else None, group=cpu_group())
            if self._world.rank != 0:
                return None
        samples = [each for of_rank in found[:: self._world.replication] for each in of_rank]
        return _joined(sorted(samples, key=lambda each: each[0]))


def figures_of(
    compute: Callable[[Any], Mapping[str, float]], made: EvalPrediction | None, *, prefix: str
) -> dict[str, float]:
    """Return the result of compute_metrics for rank 0's predictions on every rank; `prefix` is cut from names.

    All ranks call this.
    """
    figures: dict[str, float] = {}
    failure: Exception | None = None
    said = ""
    if dist.get_rank() == 0:
        try:
            figures = {name.removeprefix(f"{prefix}_"): float(value) for name, value in compute(made).items()}
        except Exception as error:  # noqa: BLE001  # raised on all ranks below
            failure, said = error, f"{type(error).__name__}: {error}"
    figures, said = from_rank_0((figures, said))
    if said:
        raise TrainingError(f"compute_metrics failed on rank 0 ({said}): correct it") from failure
    return figures


def _array(values: torch.Tensor) -> NDArray[Any]:
    values = values.detach()
    return (values.float() if values.dtype == torch.bfloat16 else values).cpu().numpy()


def _joined(samples: Sequence[tuple[int, Arrays]]) -> EvalPrediction:
    """Join arrays like transformers: samples on axis 0, padded with -100 on axis 1."""
    labels, *predictions = [_padded(arrays) for arrays in zip(*(arrays for _, arrays in samples), strict=True)]
    made: Any = predictions[0] if len(predictions) == 1 else tuple(predictions)
    return EvalPrediction(predictions=made, label_ids=labels)


def _padded(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    if arrays[0].ndim < 2:
        return np.concatenate([np.atleast_1d(each) for each in arrays])
    rows = [torch.from_numpy(each[0]) for each in arrays]
    return pad_sequence(rows, batch_first=True, padding_value=IGNORED_LABEL).numpy()
