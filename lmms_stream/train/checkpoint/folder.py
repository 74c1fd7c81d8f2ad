"""The model as it is now -> a transformers folder, by all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ...errors import LmmsStreamError, StorageError
from ...storage.disk_errors import disk_errors


def save_folder(model: Any, out: Path, files: Mapping[str, bytes]) -> None:
    """Write what from_pretrained loads: weights and configs, and besides them `files`, by name; all ranks call it.

    model: a sharded PreTrainedModel. Rank 0 holds all its weights on the CPU meanwhile: where that is too much, export
    a checkpoint. StorageError, on all ranks, where the disk refuses.
    """
    weights: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    failure: list[LmmsStreamError | None] = [None]
    if dist.get_rank() == 0:
        try:
            with disk_errors(str(out)):
                out.mkdir(parents=True, exist_ok=True)
                model.save_pretrained(out, state_dict=_tied(model, weights))
                for name, data in files.items():
                    if not (out / name).exists():
                        (out / name).write_bytes(data)
        except LmmsStreamError as error:
            failure = [error]
        except Exception as error:  # noqa: BLE001  # of transformers, which raises many kinds: the other ranks wait
            failure = [StorageError(f"{out}: the model cannot be written: {' '.join(str(error).split())[:300]}")]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise failure[0]


def _tied(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights, where names of one parameter have one tensor, as transformers expects it."""
    first: dict[int, str] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: weights[first.setdefault(id(parameters.get(name, name)), name)] for name in weights}
