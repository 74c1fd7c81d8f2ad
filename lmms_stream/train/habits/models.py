"""A model as it was given -> a ModelConfig, or the model itself."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import ConfigError
from ..model.adapters import peft_model
from ..model.build import ModelConfig
from .arguments import option

if TYPE_CHECKING:
    from transformers import TrainingArguments

_OPTIONS = {"dtype": "dtype", "torch_dtype": "dtype", "attn_implementation": "attention"}
logger = logging.getLogger("lmms_stream")


def model_of(
    given: Any, arguments: TrainingArguments | None, peft_config: Any = None
) -> ModelConfig | torch.nn.Module | None:
    """A model that is named, with model_init_kwargs; others as they are. None where a model_init makes it.

    peft_config: of an adapter that it gets. ConfigError for what is no model, and for one that has an adapter already.
    """
    model = _model_of(given, arguments)
    if peft_config is None:
        return model
    if model is None:
        raise ConfigError("peft_config is for a model that is given: add the adapter in model_init")
    if isinstance(model, ModelConfig):
        if model.adapter is not None:
            raise ConfigError("peft_config and the model's adapter both say what is trained: leave one out")
        return replace(model, adapter=_fields(peft_config))
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "peft_config is given for a model that has an adapter already: leave it out, or merge that adapter before"
        )
    made: torch.nn.Module = peft_model(model, peft_config)
    return made


def _fields(peft_config: Any) -> dict[str, Any]:
    """The fields of a config of peft's as JSON values, without those that are None."""
    if not hasattr(peft_config, "to_dict"):
        raise ConfigError(f"peft_config is a {type(peft_config).__name__}: give a peft.PeftConfig, as peft.LoraConfig")
    values = {name: _plain(value) for name, value in peft_config.to_dict().items()}
    return {name: value for name, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    value = getattr(value, "value", value)  # of an enum
    return sorted(value) if isinstance(value, set | frozenset) else value


def _model_of(given: Any, arguments: TrainingArguments | None) -> ModelConfig | torch.nn.Module | None:
    options = {} if arguments is None else dict(option(arguments, "model_init_kwargs") or {})
    if not isinstance(given, str | Path):
        if options:
            logger.warning("args.model_init_kwargs are for a model that is named, and this one is made: not used")
        if given is not None and not isinstance(given, ModelConfig | torch.nn.Module):
            raise ConfigError(
                f"model is a {type(given).__name__}: give a name, a folder, a ModelConfig or a model of transformers'"
            )
        if arguments is not None and arguments.use_liger_kernel:
            if isinstance(given, ModelConfig):
                return replace(given, use_liger_kernel=True)
            raise ConfigError("args.use_liger_kernel changes a model as it is built: give its name, or a ModelConfig")
        return given
    trusts = options.pop("trust_remote_code", None)
    if arguments is not None:
        trusts = option(arguments, "trust_remote_code") if trusts is None else trusts
    values: dict[str, Any] = {} if arguments is None else {"seed": arguments.seed}
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ConfigError(
                f"args.model_init_kwargs has {name}, which is not known: set {', '.join(_OPTIONS)} alone, or "
                "give the model itself"
            )
        values[_OPTIONS[name]] = str(value).removeprefix("torch.")
    if trusts:
        values["trust_remote_code"] = True
    if arguments is not None and arguments.use_liger_kernel:
        values["use_liger_kernel"] = True
    if values.get("dtype", "float32") not in ("float32", "bfloat16"):
        raise ConfigError(f"args.model_init_kwargs dtype {values['dtype']} is not float32 or bfloat16: choose one")
    return ModelConfig(pretrained=str(given), **values)


def attention_of(model: ModelConfig | torch.nn.Module | None) -> str | None:
    """The attention that a model is known to have; None where the trainer chooses it, or model_init makes it."""
    if isinstance(model, ModelConfig):
        return None if model.attention == "auto" else model.attention
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


def name_of(model: Any) -> str | None:
    """The folder or hub id of a model, where it has one."""
    if isinstance(model, str | Path):
        return str(model)
    if isinstance(model, ModelConfig):
        return model.pretrained
    return getattr(getattr(model, "config", None), "_name_or_path", None) or None
