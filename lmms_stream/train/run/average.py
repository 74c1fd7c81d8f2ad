"""An exponential moving average of the weights (EMA), beside those that are trained."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Average:
    """The average of a model's trained parameters: float32, of each rank the part that it holds.

    It begins as the weights are. tensors: by the names of parameters, to be saved, and filled where a run resumes.
    """

    def __init__(self, model: torch.nn.Module, *, decay: float):
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.tensors = {name: each.detach().to(torch.float32, copy=True) for name, each in self._parameters.items()}
        self._move = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self) -> None:
        """After a step: decay times the average, the rest of the weights; one fused operation on a rank's part."""
        weights = [_local(each).to(torch.float32) for each in self._parameters.values()]
        self._move([_local(each) for each in self.tensors.values()], weights, 0)

    @torch.no_grad()
    def begin(self, names: set[str]) -> None:
        """Begin anew, as the weights are now, for some of the parameters."""
        for name in names:
            self.tensors[name].copy_(self._parameters[name])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
