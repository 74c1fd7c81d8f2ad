"""Which tensors of a checkpoint an export takes: the weights, or their average where they have one."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.checkpoint.metadata import Metadata
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ...errors import CheckpointError, ConfigError
from ..model.build import class_of_family, class_of_slow_frames
from .store import Checkpoint
from .tensors import Tensors, stored_tensors, tied_names

Choice = Mapping[str, tuple[str, str]]  # name in the model -> part of the checkpoint, and name there


def weights_or_average(metadata: Metadata, found: Checkpoint, model: torch.nn.Module, *, average: bool) -> Choice:
    """By the names of a model's state_dict. What is frozen has no average. CheckpointError where nothing has one."""
    names = list(model.state_dict())
    if not average:
        return {name: ("model", name) for name in names}
    averaged = stored_tensors(metadata, "average.")
    if not averaged:
        raise CheckpointError(f"{found.where} holds no average of its weights: train with ema_decay, or export without")
    return of_average(names, averaged, tied_names(model))


def of_average(names: Iterable[str], averaged: Container[str], tied: Mapping[str, str]) -> Choice:
    """Choose the average of the names that have one. tied: see tied_names; a tied name has that of the first."""
    first = {name: tied.get(name, name) for name in names}
    return {name: ("average", first[name]) if first[name] in averaged else ("model", name) for name in first}


def chosen(choice: Choice, values: Mapping[str, Any]) -> Tensors:
    """Values by the names of the model, as they lie in the checkpoint."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        part, stored = choice[name]
        found.setdefault(part, {})[stored] = value
    return found


# The model of a checkpoint without weights, from its config.


def model_class_of(folder: Path, found: Checkpoint, trust_remote_code: bool) -> tuple[type[PreTrainedModel], Any]:
    """The class and the config of the model of a checkpoint, whose config is in `folder`."""
    own = json.loads((folder / "config.json").read_text()).get("auto_map") or {}
    if own and not trust_remote_code:
        raise ConfigError(
            f"{found.where} is of a model with Python files of its own, which can do anything here: read them, and "
            "export with --trust-remote-code if you trust them"
        )
    said = json.loads((folder / "config.json").read_text())
    family_class = class_of_family(said.get("model_type", "")) or class_of_slow_frames(said)
    if family_class is not None:
        return family_class, family_class.config_class.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    for auto, name in own.items():
        if auto.startswith("AutoModel"):
            of_files: type[PreTrainedModel] = get_class_from_dynamic_module(name, folder)
            return of_files, config
    name = (config.architectures or [""])[0]
    model_class = getattr(transformers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise CheckpointError(f"{found.where}: transformers {transformers.__version__} has no model {name!r}")
    return model_class, config


def empty_model(folder: Path, found: Checkpoint, trust_remote_code: bool) -> PreTrainedModel:
    """The model on the meta device."""
    model_class, config = model_class_of(folder, found, trust_remote_code)
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config)
    if (folder / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model
