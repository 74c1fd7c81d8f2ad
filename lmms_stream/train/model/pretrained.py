"""Weights of a pretrained folder or repository -> a tensor at a time, by name in a model.

`from_pretrained` makes all weights of a model at once. Here a model is built without weights, and each tensor is read
from safetensors files on request. Tensors are copied, or converted by transformers' rules for weights in files. Models
with further steps in from_pretrained are refused (WholeOnlyError): a tensor equals from_pretrained's, or is not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...errors import ConfigError, LmmsStreamError
from ...versions.transformers import HAS_RULES_FOR_NAMES, made_of_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTRIBUTE = "unread_weights"  # attribute of a model built without weights
_FLOATS = {"F64", "F32", "F16", "BF16"}  # safetensors' names of number formats


class WholeOnlyError(ConfigError):
    """Reason against reading the weights of a model tensor by tensor."""


class _InFile(NamedTuple):
    file: str
    key: str
    shape: tuple[int, ...]
    is_float: bool


class _Held(NamedTuple):
    """Parts of a model's tensor in files. make: files' tensors -> the model's tensor; None: copy the only part."""

    parts: tuple[_InFile, ...]
    shape: tuple[int, ...]
    is_float: bool
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None


class _Stored(NamedTuple):
    """Place of a tensor in files, and the number format in the model."""

    held: _Held
    dtype: torch.dtype


class PretrainedTensors:
    """Tensors of a model by name in the state_dict; tied names have the same tensor."""

    def __init__(self, stored: Mapping[str, _Stored]):
        self._stored = stored

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor, on the CPU, in new memory, in the model's number format; KeyError for an unknown name."""
        held, dtype = self._stored[name]
        tensors = [_read(part, dtype) for part in held.parts]
        return tensors[0] if held.make is None else held.make(tensors).clone(memory_format=torch.contiguous_format)


def _read(part: _InFile, dtype: torch.dtype) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(part.file, framework="pt") as opened:  # opened for each tensor: read bytes stay mapped while open
        found: torch.Tensor = opened.get_tensor(part.key)
    return found.to(dtype, copy=True) if found.is_floating_point() else found.clone()


def unread_weights(model: torch.nn.Module) -> PretrainedTensors | None:
    """Return the unread weights of a model built without weights; None for a model with weights."""
    found: PretrainedTensors | None = getattr(model, _ATTRIBUTE, None)
    return found


def leave_unread(model: PreTrainedModel, tensors: PretrainedTensors) -> None:
    """Set unread weights of a model built without weights."""
    setattr(model, _ATTRIBUTE, tensors)


def find_tensors(source: str, model: PreTrainedModel) -> PretrainedTensors:
    """Find the weights of a model in a folder or repository, without reading them.

    model: without weights, in the number format to read. WholeOnlyError if from_pretrained does more than copy and
    convert tensors, and for a missing folder: `from_pretrained` then reports the error.
    """
    from safetensors import SafetensorError

    _check_class(model)
    try:
        held = _held(_files(source))
    except LmmsStreamError:
        raise
    except (OSError, ValueError, LookupError, ImportError, SafetensorError) as error:
        raise WholeOnlyError(f"its files cannot be listed ({' '.join(str(error).split())[:200]})") from error
    faults = []
    for name in [_by_rules_of_5] if HAS_RULES_FOR_NAMES else [partial(_renamed, each) for each in _renames(model)]:
        try:
            return PretrainedTensors(_stored(model, name(model, held)))
        except WholeOnlyError as fault:
            faults.append(fault)
    raise faults[0]


def _check_class(model: PreTrainedModel) -> None:
    """Raise WholeOnlyError for a class with its own steps of loading, and for weights kept in float32 beside others."""
    from transformers import PreTrainedModel

    kind: Any = type(model)
    if kind._auto_class is not None or not kind.__module__.startswith("transformers."):
        raise WholeOnlyError("its class does not belong to transformers")
    if kind.from_pretrained.__func__ is not PreTrainedModel.from_pretrained.__func__:
        raise WholeOnlyError(f"{kind.__name__} has its own from_pretrained")
    for path, module in model.named_modules():
        own = type(module)._load_from_state_dict is not torch.nn.Module._load_from_state_dict
        if own or module._load_state_dict_pre_hooks:
            raise WholeOnlyError(f"{path} changes what is loaded into it")
    if model.dtype == torch.float32:
        return
    in_float32 = model._keep_in_fp32_modules_strict or (model.dtype == torch.float16 and model._keep_in_fp32_modules)
    if in_float32:
        raise WholeOnlyError(f"some of its weights stay in float32, next to weights in {model.dtype}")


def _files(source: str) -> Sequence[str]:
    """Return paths of the safetensors files that from_pretrained chooses; download the files of a repository.

    WholeOnlyError for an adapter, and without safetensors files.
    """
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    def find(name: str) -> str | None:
        path: str | None = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        return path

    if find("adapter_config.json") is not None:
        raise WholeOnlyError("it is an adapter next to its base model")
    if (single := find("model.safetensors")) is not None:
        return [single]
    if (index := find("model.safetensors.index.json")) is not None:
        paths, _ = get_checkpoint_shard_files(source, index)
        return [str(path) for path in paths]
    raise WholeOnlyError("it has no files of safetensors")


def _held(files: Sequence[str]) -> list[_InFile]:
    from safetensors import safe_open

    held = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118  # not a mapping
                part = opened.get_slice(key)
                held.append(_InFile(file, key, tuple(part.get_shape()), part.get_dtype() in _FLOATS))
    return held


def _renames(model: Any) -> list[Callable[[str], str]]:
    """Return functions from names in files to names in a model: unchanged, by the class's rules, with a prefix."""
    rules: Mapping[str, str] = getattr(type(model), "_checkpoint_conversion_mapping", None) or {}

    def by_rules(key: str) -> str:
        for pattern, replacement in rules.items():
            new, num_replaced = re.subn(pattern, replacement, key)
            if num_replaced:
                return new
        return key

    return [lambda key: key, by_rules, lambda key: f"{model.base_model_prefix}.{key}"]


def _renamed(rename: Callable[[str], str], _: torch.nn.Module, held: Sequence[_InFile]) -> dict[str, _Held]:
    return _distinct((rename(each.key), _Held((each,), each.shape, each.is_float)) for each in held)


def _by_rules_of_5(model: torch.nn.Module, held: Sequence[_InFile]) -> dict[str, _Held]:
    """Return parts in files by name in a model. Conversions run on tensors without values, to find shapes."""
    by_key = {each.key: each for each in held}
    found: list[tuple[str, _Held]] = []
    for name, (keys, convert) in made_of_files(model, by_key):
        parts = tuple(by_key[key] for key in keys)
        if convert is None:
            found.append((name, _Held(parts, parts[0].shape, parts[0].is_float)))
            continue
        try:
            made = convert([torch.empty(part.shape, device="meta") for part in parts])
        except Exception as error:  # conversions in transformers raise many kinds of errors
            raise WholeOnlyError(f"{name} cannot be made of {keys[0]} and others by itself ({error})") from error
        is_float = all(part.is_float for part in parts)
        found += [
            (each, _Held(parts, tuple(made[each].shape), is_float, partial(_one_of, convert, each))) for each in made
        ]
    return _distinct(found)


def _one_of(
    convert: Callable[[Sequence[torch.Tensor]], Mapping[str, torch.Tensor]], name: str, tensors: Sequence[torch.Tensor]
) -> torch.Tensor:
    return convert(tensors)[name]


def _distinct(named: Iterable[tuple[str, _Held]]) -> dict[str, _Held]:
    found: dict[str, _Held] = {}
    for name, each in named:
        if name in found:
            raise WholeOnlyError("its files hold several tensors of one name")
        found[name] = each
    return found


def _stored(model: torch.nn.Module, named: Mapping[str, _Held]) -> dict[str, _Stored]:
    """Return the place of each tensor of a model.

    WholeOnlyError if files lack a tensor, repeat a tied tensor, have further tensors, or other shapes.
    """
    state = model.state_dict()
    if strange := sorted(named.keys() - state.keys()):
        raise WholeOnlyError(f"its files hold {strange[0]}, which {type(model).__name__} does not have")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied: dict[int, list[str]] = {}
    for name, tensor in state.items():
        tied.setdefault(id(parameters.get(name, tensor)), []).append(name)
    found: dict[str, _Stored] = {}
    for names in tied.values():
        held = [name for name in names if name in named]
        if len(held) != 1:
            what = f"{held[0]} and {held[1]}, which are one" if held else f"no {names[0]}, which is made anew"
            raise WholeOnlyError(f"its files hold {what}")
        each, tensor = named[held[0]], state[names[0]]
        if each.is_float != tensor.is_floating_point():
            kind = "whole numbers" if tensor.is_floating_point() else "floating point numbers"
            raise WholeOnlyError(f"its {held[0]} holds {kind}, unlike the model's")
        if each.shape != tuple(tensor.shape):
            raise WholeOnlyError(f"its {held[0]} of shape {list(each.shape)} is {list(tensor.shape)} in the model")
        found |= dict.fromkeys(names, _Stored(each, tensor.dtype))
    return found
