"""The model argument of a trainer -> a ModelConfig, or the model itself."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import ConfigError
from ...train.model.adapters import new_peft_model
from ...train.model.build import ModelConfig
from .arguments import option

if TYPE_CHECKING:
    from transformers import TrainingArguments

_OPTIONS = {"dtype": "dtype", "torch_dtype": "dtype", "attn_implementation": "attention"}
# Arguments of from_pretrained for the device of weights, or for generation.
_WITHOUT_EFFECT = frozenset({"device_map", "use_cache", "low_cpu_mem_usage"})
logger = logging.getLogger("lmms_stream")


def model_of(
    given: Any, arguments: TrainingArguments | None, peft_config: Any = None
) -> ModelConfig | torch.nn.Module | None:
    """Return a named model as a ModelConfig, with model_init_kwargs; other models unchanged; None with a model_init.

    peft_config: adapter to add. ConfigError for an invalid model, and for a model that already has an adapter.
    """
    model = _model_of(given, arguments)
    if peft_config is None:
        return model
    if model is None:
        raise ConfigError("peft_config is for a model that is given: add the adapter in model_init")
    if isinstance(model, ModelConfig):
        if model.adapter is not None:
            raise ConfigError("peft_config and the model's adapter both choose the trained weights: leave one out")
        return replace(model, adapter=_fields(peft_config))
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "peft_config is set, but the model already has an adapter: leave peft_config out, or merge the adapter "
            "first"
        )
    made: torch.nn.Module = new_peft_model(model, peft_config)
    return made


def _fields(peft_config: Any) -> dict[str, Any]:
    """Return the fields of a config of peft as JSON values, without fields of None."""
    if not hasattr(peft_config, "to_dict"):
        raise ConfigError(f"peft_config is a {type(peft_config).__name__}: give a peft.PeftConfig, as peft.LoraConfig")
    values = {name: _plain(value) for name, value in peft_config.to_dict().items()}
    return {name: value for name, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    value = getattr(value, "value", value)  # value of an enum
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
            raise ConfigError(
                "args.use_liger_kernel changes a model while it is built: pass the model's name, or a ModelConfig"
            )
        return _dequantized(given)
    trusts = options.pop("trust_remote_code", None)
    if arguments is not None:
        trusts = option(arguments, "trust_remote_code") if trusts is None else trusts
    values: dict[str, Any] = {} if arguments is None else {"seed": arguments.seed}
    name, revision = str(given), options.pop("revision", None)
    moot = [key for key in sorted(_WITHOUT_EFFECT & options.keys()) if options.pop(key) not in (None, False, True)]
    if moot:
        logger.warning("args.model_init_kwargs %s: each rank has its part of the model, so it is not used", moot)
    check_quantization(options.pop("quantization_config", None))
    for key, value in options.items():
        if value is None:
            continue
        if key not in _OPTIONS:
            raise ConfigError(
                f"args.model_init_kwargs has {key}, which is not known: set {', '.join(_OPTIONS)} or revision alone, "
                "or give the model itself"
            )
        values[_OPTIONS[key]] = str(value).removeprefix("torch.")
    if values.get("dtype") == "auto":
        values["dtype"] = _stored_dtype(name, bool(trusts))
    if trusts:
        values["trust_remote_code"] = True
    if arguments is not None and arguments.use_liger_kernel:
        values["use_liger_kernel"] = True
    if values.get("dtype", "float32") not in ("float32", "bfloat16"):
        raise ConfigError(f"args.model_init_kwargs dtype {values['dtype']} is not float32 or bfloat16: choose one")
    return ModelConfig(pretrained=_at_revision(name, revision), **values)


def check_quantization(config: Any) -> None:
    """Raise ConfigError for a quantization config."""
    if config is not None:
        raise ConfigError(
            f"quantization_config is a {type(config).__name__}: quantized weights are not supported; weights are "
            "float32 or bfloat16, sharded over ranks. Leave it out (--load_in_4bit, --load_in_8bit), and train on "
            "more ranks"
        )


def _dequantized(given: ModelConfig | torch.nn.Module | None) -> ModelConfig | torch.nn.Module | None:
    """Return the model; remove the mark of quantisation from a model loaded with `dequantize`."""
    config = getattr(given, "config", None)
    said = getattr(config, "quantization_config", None)
    if not getattr(said, "dequantize", False) or not isinstance(given, torch.nn.Module):
        return given
    if all(each.is_floating_point() for each in given.parameters()):
        delattr(config, "quantization_config")
        for name in ("hf_quantizer", "quantization_method", "is_quantized"):
            vars(given).pop(name, None)
    return given


def _at_revision(name: str, revision: str | None) -> str:
    """Return a model's name, or the hub cache folder of another revision."""
    if revision in (None, "main") or Path(name).exists():
        return name
    from huggingface_hub import snapshot_download

    return str(snapshot_download(name, revision=revision))


def _stored_dtype(name: str, trust_remote_code: bool) -> str:
    """Return the dtype in the config of a model's files."""
    from transformers import AutoConfig

    found = getattr(AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code), "dtype", None)
    return "float32" if found is None else str(found).removeprefix("torch.")


def attention_of(model: ModelConfig | torch.nn.Module | None) -> str | None:
    """Return the known attention of a model; None if the trainer or a model_init chooses it."""
    if isinstance(model, ModelConfig):
        return None if model.attention == "auto" else model.attention
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


def name_of(model: Any) -> str | None:
    """Return the folder or hub id of a model; None without either."""
    if isinstance(model, str | Path):
        return str(model)
    if isinstance(model, ModelConfig):
        return model.pretrained
    return getattr(getattr(model, "config", None), "_name_or_path", None) or None
