"""The logits and labels of evaluated samples, and the figures that compute_metrics makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from transformers.trainer_utils import EvalPrediction

from ..errors import ConfigError, TrainingError
from ..processors.base import IGNORED_LABEL
from ..types import Batch, World
from .model.model import LogitsOf, PackedModel
from .run.distributed import cpu_group

Arrays = tuple[NDArray[Any], ...]  # of one sample: its labels, then its predictions


def check_text(model: PackedModel, asked: str) -> None:
    """ConfigError for a model of which ranks cannot compute logits whatever their packs hold."""
    if model.family is not None:
        raise ConfigError(
            f"{asked} is given the logits of texts, and this model reads media: override evaluation_step, or leave it "
            "out"
        )


class Predictions:
    """Collects the logits and labels of samples on each rank.

    preprocess: makes of the logits, float[1, T, V], and labels, int64[1, T], of a sample what is kept (default: the
    logits), so that no more than a sample's logits are there at once where the model makes them of hidden states.
    """

    def __init__(
        self, model: PackedModel, preprocess: Callable[..., Any] | None, *, world: World, device: torch.device
    ):
        self._model, self._preprocess = model, preprocess
        self._world, self._device = world, device
        self._samples: list[tuple[int, Arrays]] = []

    @contextmanager
    def taken(self, pack: Batch) -> Iterator[None]:
        """Take those of a pack from the forward pass inside; of one without its logits, from a second afterwards.

        All ranks enter it equally often.
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
        """Those of all ranks, by sample id: on rank 0, or on all. All ranks call it."""
        found: list[list[tuple[int, Arrays]]] = [[] for _ in range(self._world.world_size)]
        if on_all:
            dist.all_gather_object(found, self._samples, group=cpu_group())
        else:
            dist.gather_object(self._samples, found if self._world.rank == 0 else None, group=cpu_group())
            if self._world.rank != 0:
                return None
        samples = [each for of_rank in found[:: self._world.replication] for each in of_rank]
        return _joined(sorted(samples, key=lambda each: each[0]))


def figures_of(
    compute: Callable[[Any], Mapping[str, float]], made: EvalPrediction | None, *, prefix: str
) -> dict[str, float]:
    """What compute_metrics says of predictions that rank 0 has, on every rank; `prefix` is cut from names.

    All ranks call it.
    """
    outcome: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            found = compute(made)
            outcome[0] = {name.removeprefix(f"{prefix}_"): float(value) for name, value in found.items()}
        except Exception as error:  # noqa: BLE001  # it is raised on all ranks below
            failure, outcome[1] = error, f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(outcome, src=0, group=cpu_group())
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
