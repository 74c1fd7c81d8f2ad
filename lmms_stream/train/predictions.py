"""What compute_metrics is given of an evaluation, and the figures that it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from transformers.trainer_utils import EvalPrediction

from ..errors import ConfigError, TrainingError
from ..processors.base import IGNORED_LABEL
from ..types import Batch, World
from .model.model import PackedModel

Arrays = tuple[NDArray[Any], ...]  # of one sample: its labels, then its predictions


def check_text(model: PackedModel) -> None:
    """ConfigError for a model of which ranks cannot compute logits whatever their packs hold."""
    if model.family is not None:
        raise ConfigError(
            "compute_metrics is given the logits of texts, and this model reads media: override evaluation_step, or "
            "leave it out"
        )


class Predictions:
    """Collects the logits and labels of samples, and has compute_metrics make figures of them on rank 0.

    preprocess: makes of the logits, float[1, T, V], and labels, int64[1, T], of a sample what is kept (default: the
    logits). Each rank keeps those of its samples, and rank 0 gathers all.
    """

    def __init__(
        self,
        model: PackedModel,
        compute: Callable[[Any], Mapping[str, float]],
        preprocess: Callable[..., Any] | None,
        *,
        world: World,
        device: torch.device,
    ):
        self._model, self._compute, self._preprocess = model, compute, preprocess
        self._world, self._device = world, device
        self._samples: list[tuple[int, Arrays]] = []

    @torch.no_grad()
    def add(self, pack: Batch) -> None:
        """All ranks call it equally often."""
        batch = pack.to(self._device)
        logits = self._model.logits(batch)
        bounds = pack.cu_seqlens[: len(pack.sample_ids) + 1].tolist()
        for sample_id, (start, stop) in zip(pack.sample_ids.tolist(), pairwise(bounds), strict=True):
            labels, made = batch.labels[:, start:stop], logits[:, start:stop]
            kept = made if self._preprocess is None else self._preprocess(made, labels)
            parts = kept if isinstance(kept, tuple | list) else (kept,)
            self._samples.append((sample_id, tuple(map(_array, (labels, *parts)))))

    def figures(self, *, prefix: str) -> dict[str, float]:
        """What compute_metrics says of all samples, on every rank; `prefix` is cut from names. All ranks call it."""
        is_first, gathered = self._world.rank == 0, [[] for _ in range(self._world.world_size)]  # type: ignore[var-annotated]
        dist.gather_object(self._samples, gathered if is_first else None)
        outcome: list[Any] = [None, None]
        failure: Exception | None = None
        if is_first:
            samples = [each for of_rank in gathered[:: self._world.replication] for each in of_rank]
            try:
                made = self._compute(_joined(sorted(samples, key=lambda each: each[0])))
                outcome[0] = {name.removeprefix(f"{prefix}_"): float(value) for name, value in made.items()}
            except Exception as error:  # noqa: BLE001  # it is raised on all ranks below
                failure, outcome[1] = error, f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise TrainingError(f"compute_metrics failed on rank 0 ({outcome[1]}): mend it") from failure
        figures: dict[str, float] = outcome[0]
        return figures


def _array(values: torch.Tensor) -> NDArray[Any]:
    values = values.detach()
    return (values.float() if values.dtype == torch.bfloat16 else values).cpu().numpy()


def _joined(samples: Sequence[tuple[int, Arrays]]) -> EvalPrediction:
    """As transformers has it: samples on axis 0, padded with -100 on axis 1."""
    labels, *predictions = [_padded(arrays) for arrays in zip(*(arrays for _, arrays in samples), strict=True)]
    made: Any = predictions[0] if len(predictions) == 1 else tuple(predictions)
    return EvalPrediction(predictions=made, label_ids=labels)


def _padded(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    if arrays[0].ndim < 2:
        return np.concatenate([np.atleast_1d(each) for each in arrays])
    longest = max(each.shape[1] for each in arrays)
    made = np.full((len(arrays), longest, *arrays[0].shape[2:]), IGNORED_LABEL, arrays[0].dtype)
    for row, each in zip(made, arrays, strict=True):
        row[: each.shape[1]] = each[0]
    return made
