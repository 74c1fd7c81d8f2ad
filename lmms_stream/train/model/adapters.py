"""Adapters of `peft`, for example LoRA, inside a transformers model. Only the adapter is trained and saved.

peft replaces layers of the model; the model's forward is unchanged and runs on packs like any other model's forward.
Checkpoints store a digest of the frozen weights (the base) instead of the weights.
"""

from __future__ import annotations

import enum
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash

from ...errors import ConfigError, LmmsStreamError, did_you_mean, nearest_name
from ..run.distributed import from_rank_0
from .pretrained import PretrainedTensors

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

_ATTRIBUTE = "trained_adapter"  # attribute of a model with an adapter
_OFF = "_disable_adapters"  # attribute of peft's layers
_INSIDE = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)\.")  # added to names by peft
# Kinds of adapters that the model's own forward cannot train on packs, and reasons.
_REFUSED = {
    "ADALORA": "has other ranks as it trains, by a call after each step that other adapters do not need",
    "ADAMSS": "chooses its parts as it trains, by a call after each step that other adapters do not need",
    "ADAPTION_PROMPT": "puts tokens of its own in front of a sequence, which here holds several samples",
    "POLY": "takes the number of a task with each batch, by peft's own forward",
    "SHADOW": "runs a second model, by peft's own forward",
    "TRAINABLE_TOKENS": "reads the embedding's weight from outside of the embedding, and FSDP gathers it only inside",
    "XLORA": "runs the model twice for each batch",
}
# Options of adapters that peft's own forward or loss, or a call of the user, would carry out: option -> reason.
_REFUSED_OPTIONS = {
    "alora_invocation_tokens": "finds tokens in each sequence by peft's own forward, and is a LoRA of all tokens here",
    "arrow_config": "chooses between several adapters, and a run trains a single one",
    "layer_replication": "shares weights between layers, and FSDP shards the weights of each layer alone",
    "kasa_config": "adds a loss of the adapter, which the task's loss does not have",
    "monteclora_config": "adds a loss of the adapter, which the task's loss does not have",
    "trainable_token_indices": "reads the embedding's weight from outside of the embedding, and FSDP gathers it only "
    "inside: train all rows with modules_to_save",
}


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Trained part of a model. config: of peft, in JSON values.

    tensors: names in the model's state_dict -> names in peft's file, without the prefix. base: digest of the weights
    outside `tensors`; empty before record_base.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, str]
    base: str = ""


def adapter_of(model: torch.nn.Module) -> Adapter | None:
    """Return the adapter of a model from add_adapter or take_adapter; None for a model without an adapter."""
    found: Adapter | None = getattr(model, _ATTRIBUTE, None)
    return found


def add_adapter(model: PreTrainedModel, config: Mapping[str, Any] | PeftConfig) -> PreTrainedModel:
    """Return the model with a new adapter; only the adapter is trained. See peft_model."""
    return take_adapter(peft_model(model, config))


def new_peft_model(model: PreTrainedModel, config: Mapping[str, Any] | PeftConfig) -> PeftModel:
    """Add a new adapter for training; see peft_model.

    ConfigError also for options and names in the config without effect on the model.
    """
    options: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    modules, parameters = dict(model.named_modules()).keys(), dict(model.named_parameters()).keys()
    _check_options(options)
    try:
        _check_names(options, modules=modules, targets=modules, parameters=parameters)
    except re.error as error:
        raise ConfigError(
            f"model.adapter has no regular expression in {error.pattern!r} ({error.msg}): correct it"
        ) from error
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = peft_model(model, config)
    own = {name for name, value in options.items() if value}  # transformers adds patterns for experts
    for each in caught:
        text = " ".join(str(each.message).split())
        if "ignored" in text and not ({"rank_pattern", "alpha_pattern"} - own) & {*text.split()}:
            raise ConfigError(f"peft ignores an option of the adapter: {text}")
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    tuner: Any = made.base_model
    if targets := [*getattr(tuner, "targeted_module_names", ()), *getattr(tuner, "targeted_parameter_names", ())]:
        _check_names(options, modules=modules, targets=targets, parameters=parameters)
    return made


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown option of peft, and for an option that needs a call before training."""
    if find_spec("peft") is None:
        return
    import peft

    kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING.get(_plain(options.get("peft_type", "LORA")))
    known = [] if kind is None else [each.name for each in fields(kind)]
    for name in options if known else ():
        if name not in known:
            remedy = did_you_mean(name, known, otherwise=f"the nearest is {nearest_name(name, known)!r}")
            raise ConfigError(f"model.adapter has {name!r}, which no {kind.__name__} has: {remedy}")
    if (first := options.get("init_lora_weights")) in ("eva", "lora_ga"):
        raise ConfigError(
            f"init_lora_weights {first} of an adapter reads data in a call before training: choose another"
        )
    if (task := _plain(options.get("task_type"))) in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS"):
        raise ConfigError(f"model.adapter task_type {task} trains a head that the model does not have: leave it out")


def _check_names(
    options: Mapping[str, Any], *, modules: Iterable[str], targets: Iterable[str], parameters: Iterable[str]
) -> None:
    """Raise ConfigError for a name or layer without a match, by peft's rules. targets: of the adapter."""

    def in_any(paths: Iterable[str]) -> Callable[[str], bool]:
        return lambda name: any(path == name or path.endswith(f".{name}") for path in paths)

    def by_pattern(name: str) -> bool:
        return any(re.match(rf"(.*\.)?({name})$", path) for path in targets)

    rules: dict[str, Callable[[str], bool]] = {
        "target_modules": in_any(targets),
        "feedforward_modules": in_any(targets),
        "exclude_modules": in_any(modules),
        "modules_to_save": lambda name: any(path.endswith(name) for path in modules),
        "target_parameters": in_any(parameters),
        "rank_pattern": by_pattern,
        "alpha_pattern": by_pattern,
        "layers_pattern": lambda name: any(re.search(rf"(^|\.){name}\.\d+(\.|$)", path) for path in targets),
        "layers_to_transform": lambda name: any(f".{name}." in f".{path}." for path in targets),
    }
    tails = dict.fromkeys(part for path in modules for part in path.split("."))
    for option, matches in rules.items():
        names = options.get(option) or []
        if isinstance(names, str) and option == "modules_to_save":
            raise ConfigError(f"model.adapter modules_to_save is {names!r}: write a list, [{names}]")
        if isinstance(names, str) and option != "layers_pattern":
            continue  # a pattern, or a word of peft: peft raises an error if it matches nothing
        for name in [names] if isinstance(names, str | int) else sorted(names):
            if not matches(str(name)):
                known = parameters if option == "target_parameters" else tails
                known = [each for each in known if each and each.isdigit() == isinstance(name, int)]
                remedy = did_you_mean(name, known, otherwise=f"the nearest is {nearest_name(str(name), known)!r}")
                raise ConfigError(f"model.adapter {option} has {name!r}, which matches nothing in the model: {remedy}")


def peft_model(model: PreTrainedModel, config: Mapping[str, Any] | PeftConfig) -> PeftModel:
    """Add a new adapter to a model; return peft's model around the model.

    config: a peft config, or its fields with peft_type (default: LORA). ConfigError for a config rejected by peft, and
    for kinds that cannot be trained on packs.
    """
    if find_spec("peft") is None:
        raise ConfigError("adapters need peft: pip install 'lmms-stream[lora]'")
    import peft

    try:
        if isinstance(config, Mapping):
            config = peft.get_peft_config({"peft_type": "LORA", "task_type": "CAUSAL_LM", **config})
        _check_kind(config)
        made = peft.get_peft_model(model, config)
    except LmmsStreamError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, NotImplementedError, ImportError, re.error) as error:
        raise ConfigError(f"the adapter cannot be added: {' '.join(str(error).split())}") from error
    assert isinstance(made, peft.PeftModel)
    return made


def take_adapter(model: Any) -> PreTrainedModel:
    """Return the transformers model inside peft's model, or the model itself; adapter_of then returns its adapter.

    ConfigError for several adapters, and for an adapter loaded without is_trainable.
    """
    inner: PreTrainedModel = model
    if "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel):
        _check_kind(model.active_peft_config)
        inner = model.get_base_model()
    configs: Mapping[str, Any] = getattr(inner, "peft_config", {})
    if not configs or adapter_of(inner) is not None:
        return inner
    if len(configs) > 1:
        raise ConfigError(
            f"the model has adapters {' and '.join(configs)}: only one can be trained, pass a model with a single "
            "adapter"
        )
    ((name, config),) = configs.items()
    _check_kind(config)
    if not any(parameter.requires_grad for parameter in inner.parameters()):
        raise ConfigError(
            "the model's adapter is not to be trained: load it with PeftModel.from_pretrained(…, is_trainable=True)"
        )
    tensors = _tensors(inner, name, config)
    found = Adapter(config=_plain(config.to_dict()), tensors=tensors)
    setattr(inner, _ATTRIBUTE, found)
    return inner


def run_module(module: torch.nn.Module | None) -> torch.nn.Module | None:
    """Return the module; for peft's modules_to_save the trained copy, or the original while the adapter is off."""
    copies = getattr(module, "modules_to_save", None)
    if isinstance(copies, torch.nn.ModuleDict) and len(copies) == 1:
        original: Any = getattr(module, "original_module", None)
        return original if getattr(module, _OFF, False) else next(iter(copies.values()))
    return module


@contextmanager
def without_adapter(model: torch.nn.Module) -> Iterator[None]:
    """Run the model without the adapter inside this context.

    peft's disable_adapter also changes requires_grad of parameters, a state tracked by FSDP.
    """
    layers = [module for module in model.modules() if hasattr(module, _OFF)]
    before = [getattr(layer, _OFF) for layer in layers]
    try:
        for layer in layers:
            setattr(layer, _OFF, True)
        yield
    finally:
        for layer, was_off in zip(layers, before, strict=True):
            setattr(layer, _OFF, was_off)


def record_base(model: torch.nn.Module) -> None:
    """Put the digest of the weights under a model's adapter, if any, into the Adapter; all ranks call it.

    Only rank 0 needs weights. Call this function before sharding.
    """
    if (adapter := adapter_of(model)) is None:
        return
    base = from_rank_0(base_digest(model, adapter) if dist.get_rank() == 0 else "")
    setattr(model, _ATTRIBUTE, replace(adapter, base=base))


def base_digest(model: torch.nn.Module, adapter: Adapter, *, unread: PretrainedTensors | None = None) -> str:
    """Return xxh3 of names, dtypes, shapes and bytes of the weights under an adapter. unread: weights still in files.

    Memory holds a single unread tensor at a time. Tensors on the meta device do not count.
    """
    digest = xxhash.xxh3_64()
    for name, each in model.state_dict().items():
        if name in adapter.tensors:
            continue
        tensor = each if unread is None or name_under(name) not in unread else unread.read(name_under(name))
        if not tensor.is_meta:
            add_tensor(digest, name, tensor)
    return digest.hexdigest()


def add_tensor(digest: xxhash.xxh3_64, name: str, tensor: torch.Tensor) -> None:
    """Add name, dtype, shape and bytes of a tensor to a digest."""
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def name_under(name: str) -> str:
    """Return the name of a tensor of the base in the model without an adapter.

    >>> name_under("model.layers.0.mlp.up_proj.base_layer.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    return _INSIDE.sub(".", name)


def _check_kind(config: PeftConfig) -> None:
    kind = _plain(config.peft_type)
    reason = _REFUSED["ADAPTION_PROMPT"] if config.is_prompt_learning else _REFUSED.get(kind)
    if reason is not None:
        raise ConfigError(f"an adapter of peft_type {kind} {reason}: choose LORA")
    for option, reason in _REFUSED_OPTIONS.items():
        if getattr(config, option, None):
            raise ConfigError(f"the adapter's option {option} {reason}: leave it out")


def _tensors(model: PreTrainedModel, name: str, config: PeftConfig) -> dict[str, str]:
    """Return names in the state_dict -> names in peft's file; ConfigError if peft leaves out or computes a tensor."""
    from peft import get_peft_model_state_dict

    state = model.state_dict()
    name_of = {id(tensor): key for key, tensor in state.items()}
    try:
        saved = get_peft_model_state_dict(model, state_dict=state, adapter_name=name, save_embedding_layers=False)
    except (KeyError, ValueError) as error:  # for example projections that peft keeps outside of the model
        raise ConfigError(
            f"peft cannot save an adapter of type {_plain(config.peft_type)} from the model that is trained: "
            f"{' '.join(str(error).split())}"
        ) from error
    found = {name_of.get(id(tensor), ""): key for key, tensor in saved.items()}
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    if "" in found or not trained <= found.keys():
        raise ConfigError(
            f"peft saves an adapter of type {_plain(config.peft_type)} differently from its training form "
            f"({', '.join(sorted(trained - found.keys())[:1]) or 'its tensors are computed'}): choose LORA"
        )
    return found


def _plain(value: Any) -> Any:
    """Return a JSON value; sets become sorted lists."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
