"""The starting weights, kept beside those that are trained. passes -> [frozen] -> log-probabilities.

A copy of each rank's part of the parameters that are trained lies beside them, in their number format. For the forward
passes of the reference the two change places, so that one model runs both: with the same attention and kernels, sharded
and cut in the same way. With an adapter nothing is kept: the reference is the model without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from ..model.adapters import adapter_of, without_adapter
from ..model.log_probs import OfPacks, Passes, measured_log_probs
from ..model.model import PackedModel
from ..model.sharding import reshard
from .reference import check_adapter, weights_digest


class FrozenWeights:
    """A Reference: the weights that a sharded model has now. All ranks make it, before anything is trained or resumed.

    keeps: whether they are copied; without, it is the reference as long as nothing was trained.
    """

    def __init__(self, model: PackedModel, *, keeps: bool = True):
        check_adapter(model)
        self._model, self.digest = model, weights_digest(model)
        self._has_adapter = adapter_of(model.model) is not None
        trained = [each for each in model.parameters() if each.requires_grad] if keeps and not self._has_adapter else []
        self._pairs = [(_local(each), _local(each).clone()) for each in trained]

    def log_probs(self, passes: Passes) -> OfPacks:
        """See Reference."""
        with without_adapter(self._model.model) if self._has_adapter else self._in_place():
            return measured_log_probs(self._model, passes)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Inside, the model has the starting weights."""
        reshard(self._model)  # parts that stay gathered after a forward pass have the other weights
        self._swap()
        try:
            yield
        finally:
            reshard(self._model)
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for trained, kept in self._pairs:
            before = trained.clone()
            trained.copy_(kept)
            kept.copy_(before)


def _local(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The memory of this rank's part."""
    value = parameter.detach()
    return value.to_local() if isinstance(value, DTensor) else value
