"""Before a model is built: the documents of the checkpoint that will fill it, if there is one."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from ...errors import LmmsStreamError
from ..run.distributed import cpu_group
from .store import ADAPTER_NAME, MODEL_FOLDER, DamagedError, open_target, read_checkpoint, split_path

CONFIGS = ("config.json", "generation_config.json")


def configs_to_resume(url: str, *, choice: str, staging: Path) -> dict[str, bytes]:
    """The configs in the model's folder of the checkpoint that a run goes on from, by name; all ranks call it.

    None are given where a run has nothing to go on from, or what it has holds an adapter alone. Whatever is wrong with
    the checkpoints is left for Checkpointer.resume to tell. choice: see there.
    """
    found: list[dict[str, bytes]] = [{}]
    if dist.get_rank() == 0:
        try:
            found = [_configs(url, choice=choice, staging=staging)]
        except (LmmsStreamError, OSError):
            found = [{}]
    dist.broadcast_object_list(found, src=0, group=cpu_group())
    return found[0]


def _configs(url: str, *, choice: str, staging: Path) -> dict[str, bytes]:
    if choice == "never":
        return {}
    named = None
    if choice != "auto":
        url, named = split_path(choice)
    target = open_target(url, staging=staging)
    for step in reversed(target.candidates()):
        if choice != "auto" and step != named:
            continue
        try:
            checkpoint = read_checkpoint(target.storage, step)
        except DamagedError:
            continue
        if f"{MODEL_FOLDER}/{ADAPTER_NAME}" in checkpoint.files:
            return {}
        keys = [f"{MODEL_FOLDER}/{name}" for name in CONFIGS if f"{MODEL_FOLDER}/{name}" in checkpoint.files]
        folder = target.fetch(checkpoint, keys)
        configs = {Path(key).name: (folder / key).read_bytes() for key in keys}
        if not target.reads_in_place:
            target.discard(step)
        return configs
    return {}
