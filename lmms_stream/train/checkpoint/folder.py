"""The model as it is now -> a transformers folder, by all ranks.

Rank 0 writes. It gathers a few tensors at a time from the other ranks, so that no rank holds the whole model.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from ...errors import LmmsStreamError, StorageError
from ...storage.failures import disk_errors
from ..model.adapters import adapter_of
from ..run.distributed import cpu_group
from .configs import save_config
from .export_adapter import save_adapter
from .plain_export import is_plain, save_plain
from .store import BASE_CONFIGS
from .weight_files import write_weights


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
