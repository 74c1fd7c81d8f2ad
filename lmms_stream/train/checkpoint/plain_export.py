"""A model that is not transformers' -> a folder with its weights and its config, as diffusers loads its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..model.plain import DIFFUSERS_CLASS, config_of
from .store import Dtype

if TYPE_CHECKING:
    from .store import Checkpoint, Target

_MARKER = "plain_model"  # in the config of one that is neither transformers' nor diffusers'
_DIFFUSERS_STEM = "diffusion_pytorch_model"


def is_plain(model: torch.nn.Module) -> bool:
    """Whether a model is not transformers'."""
    from transformers import PreTrainedModel

    return not isinstance(model, PreTrainedModel)


def plain_config(model: torch.nn.Module) -> bytes:
    """The config.json of a model: diffusers' own, or the name of its class."""
    config = config_of(model)
    described = config if DIFFUSERS_CLASS in config else {_MARKER: type(model).__name__, **config}
    return (json.dumps(described, indent=2, sort_keys=True, default=str) + "\n").encode()


def weights_stem(config: Mapping[str, Any]) -> str | None:
    """How the files of weights beside a config are called; None for a config of transformers."""
    if DIFFUSERS_CLASS in config:
        return _DIFFUSERS_STEM
    return "model" if _MARKER in config else None


def save_plain(model: torch.nn.Module, out: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write weights and config of a model to a folder."""
    from safetensors.torch import save_file

    config = plain_config(model)
    (out / "config.json").write_bytes(config)
    kept = {name: each.clone().contiguous() for name, each in weights.items()}  # names that are tied get their own
    save_file(kept, out / f"{weights_stem(json.loads(config))}.safetensors", metadata={"format": "pt"})


def write_plain_weights(
    made: Path, found: Checkpoint, target: Target, *, stem: str, dtype: Dtype | None, average: bool
) -> None:
    """Write the weights of a checkpoint to the folder `made`, by their names in it; see export_checkpoint."""
    from ...errors import CheckpointError
    from .choice import chosen, of_average
    from .store import METADATA_NAME, TIED
    from .tensors import files_with, read_metadata, read_tensors, stored_tensors
    from .weight_files import write_weights

    metadata = read_metadata(target.fetch(found, [METADATA_NAME]))
    stored, averaged = stored_tensors(metadata, "model."), stored_tensors(metadata, "average.")
    if average and not averaged:
        raise CheckpointError(f"{found.where} holds no average of its weights: train with ema_decay, or export without")
    choice = of_average(stored, averaged if average else (), found.state.get(TIED, {}))
    folder = target.fetch(found, files_with(metadata, chosen(choice, dict.fromkeys(stored))))
    weights = {}
    for name, each in stored.items():
        of_stored = each.properties.dtype
        wanted = getattr(torch, dtype) if dtype and of_stored.is_floating_point else of_stored
        weights[name] = torch.empty(each.size, dtype=wanted, device="meta")

    def fill(tensors: dict[str, torch.Tensor]) -> None:
        read_tensors(folder, chosen(choice, tensors), metadata=metadata)
        filled = {choice[name]: tensor for name, tensor in tensors.items()}  # one of those with the same values
        for name, tensor in tensors.items():
            tensor.copy_(filled[choice[name]])

    write_weights(made, weights, fill, stem=stem)
