"""The checkpoint to resume from: the named or the latest whole checkpoint. Chosen once, by all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import xxhash

from ...errors import CheckpointError, LmmsStreamError
from ..run.distributed import from_rank_0
from .store import (
    ADAPTER_NAME,
    MODEL_FOLDER,
    Checkpoint,
    DamagedError,
    Target,
    folder_name,
    open_target,
    read_checkpoint,
    refuse_theirs,
    split_path,
)
from .tensors import cause_of

T = TypeVar("T")
CONFIGS = ("config.json", "generation_config.json")
logger = logging.getLogger("lmms_stream")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumable:
    """A checkpoint to resume from. target: reads the files. earlier: steps to try if tensors prove damaged."""

    checkpoint: Checkpoint
    target: Target
    earlier: Sequence[int]

    def pass_over(self, damage: DamagedError, group: dist.ProcessGroup) -> Resumable:
        """Return the latest whole checkpoint before this damaged one, or raise CheckpointError; all ranks call this."""
        _warn_of(damage, self.checkpoint.step)
        if not self.target.reads_in_place:
            self.target.discard(self.checkpoint.step)
        return _latest_whole(self.target, self.earlier, group, damage=damage)


def find_checkpoint(url: str, *, choice: str, staging: Path, group: dist.ProcessGroup) -> Resumable | None:
    """Choose the checkpoint to resume from; None without checkpoints. All ranks call this, and get the same checkpoint.

    choice: "auto"; "never", an error if checkpoints exist; or the path or URL of a checkpoint. Names and sizes of the
    files are checked here, checksums when the files are read. A damaged checkpoint is passed over with a warning about
    the file. Raises CheckpointError, also if all checkpoints are damaged.
    """
    staging = staging / f"rank-{dist.get_rank()}"
    if choice not in ("auto", "never"):
        folder, step = split_path(choice)
        target = open_target(folder, staging=staging)
        if step is None or step not in on_rank_0(target.candidates, group):
            refuse_theirs([Path(choice)])
            raise CheckpointError(
                f"{choice} is no complete checkpoint: name one (…/{folder_name(step or 100)}) as train.resume, or "
                "resume_from_checkpoint, or set it to auto"
            )
        return _latest_whole(target, [step], group)
    target = open_target(url, staging=staging)
    steps = on_rank_0(target.candidates, group)
    if steps and choice == "never":
        raise CheckpointError(
            f"{target.storage.url} has checkpoints, the latest of step {steps[-1]}, and train.resume is never: set it "
            "to auto, or call train(resume_from_checkpoint=True), to resume from it, or name another output_dir or "
            "checkpoint_dir"
        )
    return _latest_whole(target, steps, group) if steps else None


def _latest_whole(
    target: Target, steps: Sequence[int], group: dist.ProcessGroup, *, damage: DamagedError | None = None
) -> Resumable:
    """Return the latest whole checkpoint of some ascending steps. damage: found in the checkpoint after these steps."""
    for index, step in reversed([*enumerate(steps)]):
        try:
            checkpoint = on_rank_0(partial(read_checkpoint, target.storage, step), group)
        except DamagedError as error:
            damage = error
            _warn_of(error, step)
        else:
            return Resumable(checkpoint=checkpoint, target=target, earlier=steps[:index])
    raise CheckpointError(
        f"no checkpoint is complete, and the oldest remaining checkpoint is damaged ({damage}): restore one, or start "
        "over in another output_dir"
    )


def _warn_of(damage: DamagedError, step: int) -> None:
    if dist.get_rank() == 0:
        logger.warning("%s: the checkpoint of step %d is passed over", damage, step)


def configs_of(found: Resumable, group: dist.ProcessGroup) -> dict[str, bytes]:
    """Return the configs in the checkpoint's model folder, by name; all ranks call this.

    The result is empty if the checkpoint holds only an adapter, or if a config is damaged: Checkpointer.resume then
    passes the checkpoint over.
    """

    def read() -> dict[str, bytes]:
        files, folder = found.checkpoint.files, folder_name(found.checkpoint.step)
        if f"{MODEL_FOLDER}/{ADAPTER_NAME}" in files:
            return {}
        keys = {name: f"{MODEL_FOLDER}/{name}" for name in CONFIGS if f"{MODEL_FOLDER}/{name}" in files}
        try:
            configs = {name: found.target.storage.read(f"{folder}/{key}") for name, key in keys.items()}
        except (LmmsStreamError, OSError):
            return {}
        is_whole = all(files[key].xxh3 == xxhash.xxh3_64(configs[name]).hexdigest() for name, key in keys.items())
        return configs if is_whole else {}

    return on_rank_0(read, group)


# Results and errors of rank 0, or of all ranks, on all ranks.


def on_rank_0(action: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Run the action on rank 0; return the result, or raise the error, on all ranks."""
    outcome = from_rank_0(_attempt(action) if dist.get_rank() == 0 else None, group)
    if isinstance(outcome, LmmsStreamError):
        raise outcome
    result: T = outcome  # type: ignore[assignment]
    return result


def on_all_ranks(action: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Return this rank's result. If a rank fails, all raise the same error: a DamagedError only without others."""
    outcome = _attempt(action)
    failed: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failed, outcome if isinstance(outcome, LmmsStreamError) else None, group=group)
    errors = sorted(filter(None, failed), key=lambda error: isinstance(error, DamagedError))
    if errors:
        raise errors[0]
    assert not isinstance(outcome, LmmsStreamError)
    return outcome


def _attempt(action: Callable[[], T]) -> T | LmmsStreamError:
    try:
        return action()
    except LmmsStreamError as error:
        return error
    except (OSError, RuntimeError, AssertionError) as error:  # torch raises these for unreadable files
        return CheckpointError(f"a checkpoint cannot be read: {cause_of(error)}")
