"""An optimizer that was made for a model before it was sharded -> the same over what became of its parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import ConfigError


def names_of_parameters(model: torch.nn.Module) -> dict[int, str]:
    """The name of each parameter by its id, to be asked before the model is sharded."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def adopt_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], sharded: torch.nn.Module
) -> torch.optim.Optimizer:
    """The optimizer, which has the parameters of `sharded` from now on, in its own groups and by their names.

    ConfigError for one with parameters of another model, and for one that has made updates.
    """
    if optimizer.state:
        raise ConfigError("the optimizer has made updates, whose state is not sharded: give a new one")
    parameters = dict(sharded.named_parameters())
    for group in optimizer.param_groups:
        if any(id(each) not in names for each in group["params"]):
            raise ConfigError(
                "optimizers has parameters that are none of the model's: give the model that it was made for as a "
                "module, or optimizer_cls_and_kwargs"
            )
        group["params"] = [parameters[names[id(each)]] for each in group["params"]]
    return optimizer
