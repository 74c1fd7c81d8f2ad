"""The adapter of a checkpoint -> the folder that peft loads, or the model with its base's weights and the adapter's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from ...errors import CheckpointError
from ..model.adapters import Adapter, adapter_of, add_adapter, base_digest, peft_model, take_adapter
from .export import ADAPTER_NAME, Dtype, empty_model, model_class_of
from .store import METADATA_NAME, Checkpoint, Target
from .tensors import files_with, read_metadata, read_tensors, stored_tensors

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

_PREFIX = "base_model.model."  # of the names in peft's files


def write_adapter(
    made: Path, found: Checkpoint, target: Target, *, dtype: Dtype | None, merge: bool, trust_remote_code: bool
) -> None:
    """Write the adapter's weights to the folder `made`, which has its config, or with `merge` the whole model."""
    config = json.loads((made / ADAPTER_NAME).read_text())
    base, config["inference_mode"] = config.pop("base_model_name_or_path"), False
    if merge:
        wrapped = peft_model(_base(made, found, base, trust_remote_code), config)
        _merge(wrapped, made, found, target, base=base, dtype=dtype)
        return
    adapter = adapter_of(add_adapter(empty_model(made, found, trust_remote_code), config))
    assert adapter is not None
    tensors = _read(found, target, adapter)
    if dtype is not None:
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    named = {f"{_PREFIX}{adapter.tensors[name]}": tensor for name, tensor in tensors.items()}
    save_file(named, made / "adapter_model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        (made / name).unlink(missing_ok=True)  # they are the base's


def _merge(
    wrapped: PeftModel, made: Path, found: Checkpoint, target: Target, *, base: str | None, dtype: Dtype | None
) -> None:
    model = take_adapter(wrapped)
    adapter = adapter_of(model)
    assert adapter is not None
    digest, saved = base_digest(model, adapter), found.state["fingerprint"]["adapter"]["base"]
    if digest != saved:
        raise CheckpointError(
            f"{base} is not what the adapter of {found.where} was trained on (digest "
            f"{digest}, then {saved}): restore it there"
        )
    model.load_state_dict(_read(found, target, adapter), strict=False)
    merged: Any = wrapped.merge_and_unload()
    if dtype is not None:
        merged = merged.to(getattr(torch, dtype))
    for name in (ADAPTER_NAME, "config.json", "generation_config.json"):
        (made / name).unlink(missing_ok=True)
    merged.save_pretrained(made)


def _base(made: Path, found: Checkpoint, name: str | None, trust_remote_code: bool) -> PreTrainedModel:
    """The model under an adapter, from where it was loaded."""
    if not name:
        raise CheckpointError(
            f"the model under the adapter of {found.where} was made from a config, and is in no folder: save it, and "
            "train the adapter with model.pretrained, to merge them"
        )
    model_class, of_model = model_class_of(made, found, trust_remote_code)
    try:
        base: PreTrainedModel = model_class.from_pretrained(name, config=of_model, dtype=of_model.dtype)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{name}, the model under the adapter of {found.where}, cannot be loaded ({' '.join(str(error).split())}): "
            "put it there"
        ) from error
    return base


def _read(found: Checkpoint, target: Target, adapter: Adapter) -> dict[str, torch.Tensor]:
    """The adapter's tensors, by their names in the model."""
    metadata = read_metadata(target.fetch(found, [METADATA_NAME]))
    stored = stored_tensors(metadata, "model.")
    if missing := sorted(adapter.tensors.keys() - stored.keys()):
        raise CheckpointError(f"{found.where} lacks {missing[0]} and {len(missing) - 1} more tensors of its adapter")
    tensors = {
        name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in sorted(adapter.tensors)
    }
    read_tensors(target.fetch(found, files_with(metadata, tensors)), {"model": tensors}, metadata=metadata)
    return tensors
