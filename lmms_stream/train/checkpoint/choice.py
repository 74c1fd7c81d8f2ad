"""Which tensors of a checkpoint an export takes: the weights, or their average where they have one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ...errors import CheckpointError
from .store import Checkpoint
from .tensors import Tensors, stored_tensors

Choice = Mapping[str, tuple[str, str]]  # name in the model -> part of the checkpoint, and name there


def weights_or_average(metadata: Metadata, found: Checkpoint, model: torch.nn.Module, *, average: bool) -> Choice:
    """By the names of a model's state_dict. What is frozen has no average. CheckpointError where nothing has one."""
    names = list(model.state_dict())
    if not average:
        return {name: ("model", name) for name in names}
    averaged = stored_tensors(metadata, "average.")
    if not averaged:
        raise CheckpointError(f"{found.where} holds no average of its weights: train with ema_decay, or export without")
    first = {id(parameter): name for name, parameter in model.named_parameters()}  # of what is tied, one name
    parameters = dict(model.named_parameters(remove_duplicate=False))
    name_of = {name: first.get(id(parameters.get(name)), name) for name in names}
    return {name: ("average", name_of[name]) if name_of[name] in averaged else ("model", name) for name in names}


def chosen(choice: Choice, values: Mapping[str, Any]) -> Tensors:
    """Values by the names of the model, as they lie in the checkpoint."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        part, stored = choice[name]
        found.setdefault(part, {})[stored] = value
    return found
