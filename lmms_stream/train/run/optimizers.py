"""Optimizers by name, and their groups of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ...errors import ConfigError, LmmsStreamError
from .muon import Muon, hidden_matrices
from .settings import TrainConfig

Groups = list[dict[str, Any]]
Maker = Callable[[Groups, TrainConfig, torch.nn.Module], torch.optim.Optimizer]
_OF_TORCH = {"sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop"}  # without the settings of AdamW
_OF_CONFIG = {  # an optimizer's own names of what TrainConfig has
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "betas": "adam_beta1 and adam_beta2",
    "eps": "adam_epsilon",
}


def build_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that train.optim names, over the parameters of a model that are trained.

    ConfigError for a name that is none, for what is not installed, and for arguments that it does not have.
    """
    make = _MAKERS.get(config.optim)
    if config.optim == "adafactor":
        raise ConfigError(
            "train.optim adafactor: torch's does not run on sharded matrices; for less memory take muon or adamw_8bit"
        )
    if make is None:
        raise ConfigError(f"train.optim {config.optim!r} is none of {', '.join(_MAKERS)}")
    groups = groups_of(model, config)
    _check_args(config)
    try:
        made = make(groups, config, model)
    except LmmsStreamError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"train.optim {config.optim} with optim_args {dict(config.optim_args)}: {' '.join(str(error).split())}"
        ) from error
    for pattern, values in config.groups.items():
        if strange := sorted(values.keys() - made.defaults.keys()):
            raise ConfigError(
                f"train.groups {pattern!r} has {strange[0]}, which {config.optim} does not have for a group: name some "
                f"of {', '.join(made.defaults)}"
            )
    return made


def _check_args(config: TrainConfig) -> None:
    """ConfigError for arguments that are settings, and for settings that the optimizer does not have."""
    is_adam = config.optim not in _OF_TORCH
    settings = {name: setting for name, setting in _OF_CONFIG.items() if is_adam or not setting.startswith("adam_")}
    if clashing := sorted(settings.keys() & config.optim_args.keys()):
        raise ConfigError(f"train.optim_args has {clashing[0]}: set train.{settings[clashing[0]]}")
    for each in fields(config):
        if each.name.startswith("adam_") and not is_adam and getattr(config, each.name) != each.default:
            raise ConfigError(
                f"train.{each.name} is a setting of AdamW, and train.optim is {config.optim}: leave it out; what "
                f"{config.optim} takes is set in optim_args"
            )


def groups_of(model: torch.nn.Module, config: TrainConfig) -> Groups:
    """Parameter groups as a config has them."""
    return parameter_groups(
        model,
        weight_decay=config.weight_decay,
        decay_all=config.decay_all,
        learning_rates=config.learning_rates,
        groups=config.groups,
    )


def parameter_groups(
    model: torch.nn.Module,
    *,
    weight_decay: float,
    decay_all: bool,
    learning_rates: Mapping[str, float] | None = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
) -> Groups:
    """Parameter groups of an optimizer: matrices decay, vectors (biases, norms) only with decay_all.

    groups: what parameters have whose names match a pattern (fnmatch); the others come first, and have the optimizer's.
    A weight_decay there is of vectors too. learning_rates: those whose `lr` is another. ConfigError for a pattern that
    matches none that is trained, and for a parameter of two patterns.
    """
    values = {pattern: {"lr": rate} for pattern, rate in (learning_rates or {}).items()} | dict(groups or {})
    setting_of = dict.fromkeys(learning_rates or (), "learning_rates") | dict.fromkeys(groups or (), "groups")
    pattern_of = _patterns(model, setting_of)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made: Groups = []
    for pattern in (None, *values):
        mine = [each for each in trained if pattern_of.get(id(each)) == pattern]
        own = {} if pattern is None else dict(values[pattern])
        decayed = [each for each in mine if decay_all or each.ndim >= 2]
        others = [each for each in mine if not decay_all and each.ndim < 2]
        made.append({"params": decayed, "weight_decay": weight_decay, **own})
        made.append({"params": others, "weight_decay": 0.0, **own})
    return [group for group in made if group["params"]]


def _patterns(model: torch.nn.Module, setting_of: Mapping[str, str]) -> dict[int, str]:
    """The pattern of each parameter that has one, by id; one that is tied has several names."""
    found: dict[int, str] = {}
    named = [(name, each) for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad]
    for pattern, setting in setting_of.items():
        matched = [(name, each) for name, each in named if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(
                f"train.{setting} {pattern!r} matches no parameter that is trained: they are named like "
                f"{next(name for name, _ in named)!r}"
            )
        for name, each in matched:
            if (before := found.setdefault(id(each), pattern)) != pattern:
                raise ConfigError(
                    f"train.{setting_of[before]} {before!r} and {pattern!r} both match {name}: a parameter has one rate"
                )
    return found


def _adam_settings(config: TrainConfig) -> dict[str, Any]:
    return {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}


def _adamw(groups: Groups, config: TrainConfig, model: torch.nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"fused": True} if fused else {}
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, **{**options, **_adam_settings(config), **config.optim_args}
    )


def _adamw_8bit(groups: Groups, config: TrainConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """torchao's: that of bitsandbytes takes no parameters that are sharded."""
    if find_spec("torchao") is None:
        raise ConfigError(f"train.optim {config.optim} needs torchao: pip install torchao, or set it to adamw")
    made: torch.optim.Optimizer = import_module("torchao.optim").AdamW8bit(
        groups, lr=config.learning_rate, **{**_adam_settings(config), **config.optim_args}
    )
    return made


def _muon(groups: Groups, config: TrainConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Matrices inside the model by Muon; embeddings, the head and vectors by AdamW."""
    inner = hidden_matrices(model)
    split = [
        {**group, "params": [each for each in group["params"] if (id(each) in inner) is is_inner], "is_muon": is_inner}
        for group in groups
        for is_inner in (True, False)
    ]
    found = [group for group in split if group["params"]]
    return Muon(found, lr=config.learning_rate, **{**_adam_settings(config), **config.optim_args})


def _torch(name: str) -> Maker:
    """One of torch.optim, which takes a learning rate and what optim_args say."""

    def make(groups: Groups, config: TrainConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, name)(groups, lr=config.learning_rate, **config.optim_args)
        return made

    return make


_MAKERS: dict[str, Maker] = {
    "adamw": _adamw,
    "adamw_torch_fused": _adamw,
    "adamw_torch": partial(_adamw, fused=False),
    "adamw_8bit": _adamw_8bit,
    "adamw_bnb_8bit": _adamw_8bit,
    "adamw_torch_8bit": _adamw_8bit,
    "muon": _muon,
    **{name: _torch(class_name) for name, class_name in _OF_TORCH.items()},
}
