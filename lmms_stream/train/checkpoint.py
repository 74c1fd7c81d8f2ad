"""Checkpoints: a folder `step-NNNNNNNN` with the model and optimizer (torch DCP) and `trainer.json`.

A checkpoint is written under a temporary name and renamed, so a folder with the final name is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..errors import CheckpointError

STATE_NAME = "trainer.json"
_FOLDER = re.compile(r"step-(\d{8})")


def save_checkpoint(
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    state: Mapping[str, Any],
    keep: int | None = None,
) -> Path:
    """Write checkpoint `step` below `folder` and return its path; all ranks call it.

    state: JSON values of the trainer (the cursor among them). keep: how many of the latest checkpoints stay.
    """
    final = folder / f"step-{step:08d}"
    temporary = folder / f".step-{step:08d}.tmp"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(temporary))
    if dist.get_rank() == 0:
        (temporary / STATE_NAME).write_text(json.dumps({**state, "step": step}, indent=1) + "\n")
        _sync(temporary)
        if final.exists():  # an earlier run got here and its checkpoint was passed over at resume
            shutil.rmtree(final)
        temporary.rename(final)
        for old in checkpoints(folder)[: -keep if keep else 0]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints below `folder`, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir())


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What `save_checkpoint` was given as `state`, and "step"; CheckpointError when it cannot be read."""
    try:
        state = json.loads((checkpoint / STATE_NAME).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} cannot be read ({error}): remove it to resume from an earlier one"
        ) from error
    return dict(state)


def load_checkpoint(checkpoint: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load model and optimizer in place, at any world size; all ranks call it."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    values: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    try:
        load(values, checkpoint_id=str(checkpoint))
        set_state_dict(model, optimizer, model_state_dict=values["model"], optim_state_dict=values["optimizer"])
    except (RuntimeError, KeyError, ValueError, OSError, CheckpointException) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} does not fit this model and optimizer ({' '.join(str(error).split())[:300]}): "
            "restore the model settings, or start over in another output_dir"
        ) from error


def _sync(folder: Path) -> None:
    """Force a folder's files to disk, so that the rename that follows never names what a crash may lose."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
