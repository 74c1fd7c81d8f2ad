"""The model as it is now -> a transformers folder, by all ranks."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from ...errors import LmmsStreamError, StorageError
from ...storage.disk_errors import disk_errors
from ..model.adapters import adapter_of
from ..run.distributed import cpu_group
from .export_adapter import save_adapter
from .names import BASE_CONFIGS
from .plain_export import is_plain, save_plain


def save_folder(model: Any, out: Path, files: Mapping[str, bytes]) -> None:
    """Write what from_pretrained loads: weights and configs, and besides them `files`, by name; all ranks call it.

    Of a model with an adapter, what peft loads.

    model: a sharded PreTrainedModel. Rank 0 holds all its weights on the CPU meanwhile: where that is too much, export
    a checkpoint. StorageError, on all ranks, where the disk refuses.
    """
    adapter = adapter_of(model)
    weights = _weights(model, None if adapter is None else adapter.tensors)
    failure: list[LmmsStreamError | None] = [None]
    if dist.get_rank() == 0:
        try:
            with disk_errors(str(out)):
                out.mkdir(parents=True, exist_ok=True)
                if adapter is not None:
                    save_adapter(model, out, weights)
                elif is_plain(model):
                    save_plain(model, out, weights)
                else:
                    model.save_pretrained(out, state_dict=_tied(model, weights))
                for name, data in files.items():
                    if not (out / name).exists() and not (adapter is not None and name in BASE_CONFIGS):
                        (out / name).write_bytes(data)
        except LmmsStreamError as error:
            failure = [error]
        except Exception as error:  # noqa: BLE001  # of transformers, which raises many kinds: the other ranks wait
            failure = [StorageError(f"{out}: the model cannot be written: {' '.join(str(error).split())[:300]}")]
    dist.broadcast_object_list(failure, src=0, group=cpu_group())
    if failure[0] is not None:
        raise failure[0]


def _weights(model: torch.nn.Module, names: Container[str] | None) -> dict[str, torch.Tensor]:
    """The whole tensors on rank 0; names: those that are asked for (default: all)."""
    if names is None:
        whole: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        return dict(whole)
    asked: Any = {name: tensor for name, tensor in get_model_state_dict(model).items() if name in names}
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each).cpu() for name, each in asked.items()}


def _tied(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights, where names of one parameter have one tensor, as transformers expects it."""
    first: dict[int, str] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: weights[first.setdefault(id(parameters.get(name, name)), name)] for name in weights}
