"""The model as it is now -> a transformers folder, by all ranks.

Rank 0 writes. It gathers a few tensors at a time from the other ranks, so that no rank holds the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from ...errors import LmmsStreamError, StorageError
from ...storage.failures import disk_errors
from ..model.adapters import adapter_of
from ..model.plain import DIFFUSERS_CLASS, config_of
from ..run.distributed import cpu_group
from .export_adapter import save_adapter
from .store import BASE_CONFIGS, Dtype
from .weight_files import save_config, write_weights

if TYPE_CHECKING:
    from .store import Checkpoint, Target


def save_folder(model: Any, out: Path, files: Mapping[str, bytes]) -> None:
    """Write what from_pretrained loads: weights and configs, and besides them `files`, by name; all ranks call it.

    Of a model with an adapter, what peft loads.

    model: a sharded PreTrainedModel. StorageError, on all ranks, where the disk refuses.
    """
    adapter = adapter_of(model)
    tensors = _Gathered(model, None if adapter is None else adapter.tensors)
    failure: list[LmmsStreamError | None] = [None]
    if dist.get_rank() == 0:
        try:
            with disk_errors(str(out)):
                out.mkdir(parents=True, exist_ok=True)
                if adapter is not None:
                    save_adapter(model, out, tensors.gather(tensors.names))
                elif is_plain(model):
                    save_plain(model, out, tensors.gather(tensors.names))
                else:
                    _save_pretrained(model, out, tensors)
                for name, data in files.items():
                    # transformers has written the configs; of an adapter's base none are saved
                    if name not in BASE_CONFIGS or (adapter is None and not (out / name).exists()):
                        (out / name).parent.mkdir(exist_ok=True)
                        (out / name).write_bytes(data)
        except LmmsStreamError as error:
            failure = [error]
        except Exception as error:  # noqa: BLE001  # of transformers, which raises many kinds: the other ranks wait
            failure = [StorageError(f"{out}: the model cannot be written: {' '.join(str(error).split())[:300]}")]
        tensors.end()
    else:
        tensors.serve()
    dist.broadcast_object_list(failure, src=0, group=cpu_group())
    if failure[0] is not None:
        raise failure[0]


def _save_pretrained(model: Any, out: Path, tensors: _Gathered) -> None:
    saved = save_config(model, out, {name: tensors.empty(name) for name in tensors.names})

    def fill(wanted: dict[str, torch.Tensor]) -> None:
        found = tensors.gather([*wanted])
        for name, tensor in wanted.items():
            tensor.copy_(found[name])

    write_weights(out, saved.empty, saved.filled_by(fill))


class _Gathered:
    """The whole tensors of a sharded model, some at a time: rank 0 asks for names, the others answer until it ends.

    names: those that are asked for (default: all).
    """

    def __init__(self, model: torch.nn.Module, names: Container[str] | None):
        every: Any = get_model_state_dict(model)
        self._tensors = {name: each for name, each in every.items() if names is None or name in names}
        self.names = list(self._tensors)

    def empty(self, name: str) -> torch.Tensor:
        """A tensor's shape and type, on the meta device."""
        tensor = self._tensors[name]
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def gather(self, names: list[str]) -> dict[str, torch.Tensor]:
        """These tensors, on the CPU of rank 0, which asks."""
        dist.broadcast_object_list([names], src=0, group=cpu_group())
        return {name: self._whole(name).cpu() for name in names}

    def end(self) -> None:
        """Rank 0 has all that it asks for."""
        dist.broadcast_object_list([None], src=0, group=cpu_group())

    def serve(self) -> None:
        """Take part in what rank 0 asks for, to its end."""
        while True:
            asked: list[Any] = [None]
            dist.broadcast_object_list(asked, src=0, group=cpu_group())
            if asked[0] is None:
                return
            for name in asked[0]:
                self._whole(name)

    def _whole(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# A model that is not transformers' -> a folder.


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
    from .store import METADATA_NAME, TIED
    from .tensors import files_with, read_metadata, read_tensors, stored_tensors
    from .weight_files import chosen, of_average, write_weights

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
