"""The adapter of a checkpoint -> the folder that peft loads, or the model with its base's weights and the adapter's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file

from ...errors import CheckpointError
from ...versions.transformers import without_progress
from ..model.adapters import adapter_of, add_adapter, base_digest, peft_model, take_adapter
from ..model.pretrained import PretrainedTensors, WholeOnlyError, find_tensors
from .choice import chosen, weights_or_average
from .empty import empty_model, model_class_of
from .merge import MergedTensors, check_by_parts, write_merged
from .names import ADAPTER_NAME, BASE_CONFIGS, Dtype
from .store import METADATA_NAME, Checkpoint, Target
from .tensors import files_with, read_metadata, read_tensors, stored_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("lmms_stream")
_PREFIX = "base_model.model."  # of the names in peft's files


def write_adapter(
    made: Path,
    found: Checkpoint,
    target: Target,
    *,
    dtype: Dtype | None,
    merge: bool,
    average: bool,
    trust_remote_code: bool,
) -> None:
    """Write the adapter's weights to the folder `made`, which has its config, or with `merge` the whole model."""
    config = json.loads((made / ADAPTER_NAME).read_text())
    name, config["inference_mode"] = config.pop("base_model_name_or_path"), False
    if not merge:
        model = add_adapter(empty_model(made, found, trust_remote_code), config)
        save_adapter(model, made, _read(model, found, target, average=average), dtype=dtype)
        for file in BASE_CONFIGS:
            (made / file).unlink(missing_ok=True)
        return
    if not name:
        raise CheckpointError(
            f"the model under the adapter of {found.where} was made from a config, and is in no folder: save it, and "
            "train the adapter with model.pretrained, to merge them"
        )
    parts = _Parts(made, found, target, str(name), config, average, trust_remote_code)
    try:
        _merge_by_parts(parts, dtype)
    except WholeOnlyError as reason:
        logger.warning("%s is loaded whole to merge an adapter into it: %s", name, reason)
        _merge_whole(parts, dtype)


class _Parts(NamedTuple):
    """What is merged. base: the folder or repository of the model under the adapter."""

    made: Path
    found: Checkpoint
    target: Target
    base: str
    config: Mapping[str, Any]
    average: bool
    trust_remote_code: bool


def _merge_by_parts(parts: _Parts, dtype: Dtype | None) -> None:
    """Write the merged model, a few tensors at a time; WholeOnlyError where it cannot be."""
    made, found, target, *_ = parts

    def empty() -> PreTrainedModel:
        model: Any = empty_model(made, found, parts.trust_remote_code)
        model.to(model.config.dtype)
        return model

    check_by_parts(parts.config)
    base, model = empty(), add_adapter(empty(), parts.config)
    of_base = find_tensors(parts.base, base)
    read = _reader(model, found, target, average=parts.average)
    merged = MergedTensors(base, model, of_base=of_base, of_adapter=lambda name: read([name])[name])
    _check_base(model, found, parts.base, unread=of_base)
    write_merged(made, base, merged, dtype=dtype)


def _merge_whole(parts: _Parts, dtype: Dtype | None) -> None:
    """Write the merged model, of which all is in memory."""
    made, found, target, *_ = parts
    wrapped = peft_model(_base(parts), parts.config)
    model = take_adapter(wrapped)
    _check_base(model, found, parts.base)
    model.load_state_dict(_read(model, found, target, average=parts.average), strict=False)
    merged: Any = wrapped.merge_and_unload()
    if dtype is not None:
        merged = merged.to(getattr(torch, dtype))
    for name in (ADAPTER_NAME, *BASE_CONFIGS):
        (made / name).unlink(missing_ok=True)
    with without_progress():
        merged.save_pretrained(made)


def save_adapter(
    model: PreTrainedModel, folder: Path, tensors: Mapping[str, torch.Tensor], *, dtype: Dtype | None = None
) -> None:
    """Write the weights of a model's adapter as peft does."""
    adapter = adapter_of(model)
    assert adapter is not None
    typed = tensors if dtype is None else {name: each.to(getattr(torch, dtype)) for name, each in tensors.items()}
    named = {f"{_PREFIX}{adapter.tensors[name]}": tensor.contiguous() for name, tensor in typed.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _check_base(
    model: PreTrainedModel, found: Checkpoint, name: str, *, unread: PretrainedTensors | None = None
) -> None:
    """Raise CheckpointError if the base weights differ from those that the adapter was trained on."""
    adapter = adapter_of(model)
    assert adapter is not None
    digest, saved = base_digest(model, adapter, unread=unread), found.state["fingerprint"]["adapter"]["base"]
    if digest != saved:
        raise CheckpointError(
            f"{name} is not what the adapter of {found.where} was trained on (digest {digest}, then {saved}): restore "
            "it there"
        )


def _base(parts: _Parts) -> PreTrainedModel:
    """The model under an adapter, from where it was loaded."""
    name, found = parts.base, parts.found
    model_class, of_model = model_class_of(parts.made, found, parts.trust_remote_code)
    try:
        base: PreTrainedModel = model_class.from_pretrained(name, config=of_model, dtype=of_model.dtype)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{name}, the model under the adapter of {found.where}, cannot be loaded ({' '.join(str(error).split())}): "
            "put it there"
        ) from error
    return base


def _read(model: PreTrainedModel, found: Checkpoint, target: Target, *, average: bool) -> dict[str, torch.Tensor]:
    """The tensors of a model's adapter, or their average, by their names in the model."""
    adapter = adapter_of(model)
    assert adapter is not None
    return _reader(model, found, target, average=average)(sorted(adapter.tensors))


def _reader(
    model: PreTrainedModel, found: Checkpoint, target: Target, *, average: bool
) -> Callable[[Sequence[str]], dict[str, torch.Tensor]]:
    """Reads tensors of a model's adapter, or their average, by their names in the model."""
    adapter = adapter_of(model)
    assert adapter is not None
    metadata = read_metadata(target.fetch(found, [METADATA_NAME]))
    stored = stored_tensors(metadata, "model.")
    if missing := sorted(adapter.tensors.keys() - stored.keys()):
        raise CheckpointError(f"{found.where} lacks {missing[0]} and {len(missing) - 1} more tensors of its adapter")
    choice = weights_or_average(metadata, found, model, average=average)
    folder = target.fetch(found, files_with(metadata, chosen(choice, dict.fromkeys(adapter.tensors))))

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        tensors = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in names}
        read_tensors(folder, chosen(choice, tensors), metadata=metadata)
        return tensors

    return read
