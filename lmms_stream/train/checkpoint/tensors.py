"""Tensors of a model and an optimizer <-> files of torch.distributed.checkpoint (DCP).

DCP's `.metadata` is a pickle: a checkpoint is trusted like the run itself. `.metadata` is read only after a check of
size and checksum.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ...errors import CheckpointError, LmmsStreamError, StorageError
from ..model.adapters import adapter_of
from ..run.copies import Stager as Stager
from ..run.copies import _leaves as _leaves
from ..run.copies import _plain as _plain
from ..run.copies import writes_saved
from ..run.optimizers import Average
from .store import METADATA_NAME, DigestedFile, FileDigest, Target, remove, write_synced

Tensors = dict[str, Any]  # by "model", "optimizer" or "average", then by the names of parameters
NOTHING: Mapping[str, bytes] = MappingProxyType({})
COPY_AHEAD_BYTES = 10_000_000  # from the device, of a save without copies; torch's default
NO_ROOM_BYTES = 1 << 16  # torch's writer gives no cause: with less free space, the cause is a full disk


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, average: Average | None = None) -> Tensors:
    """Return this rank's tensors, not copies, by the names of parameters in `model`; only the adapter's, if any.

    Settings (learning rate, betas, decay) are left out: they come from the config. Nothing changes: torch would take a
    step of an optimizer without state.
    """
    state = get_optimizer_state_dict(model, optimizer)["state"] if optimizer.state else {}
    of_model, adapter = get_model_state_dict(model), adapter_of(model)
    if adapter is not None:
        of_model = {name: tensor for name, tensor in of_model.items() if name in adapter.tensors}
    averaged = {} if average is None else {"average": average.tensors}
    return {"model": of_model, "optimizer": state, **averaged}


def room_for(model: torch.nn.Module, optimizer: torch.optim.Optimizer, average: Average | None = None) -> Tensors:
    """Return tensors to read a checkpoint into, with a state of each trained parameter; see tensors_of.

    An optimizer without state takes a step to create the state; set_tensors then replaces state and parameters.
    """
    get_optimizer_state_dict(model, optimizer)
    return tensors_of(model, optimizer, average)


@writes_saved
def set_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: Tensors, average: Average | None = None
) -> None:
    """Set the model, optimizer and average to `values`. Averages missing in the checkpoint begin at the weights."""
    set_model_state_dict(model, values["model"], options=StateDictOptions(strict=adapter_of(model) is None))
    if values["optimizer"]:
        _set_optimizer(model, optimizer, values["optimizer"])
    else:  # there was no update before the checkpoint, or the optimizer keeps no state
        optimizer.state.clear()
    if average is not None:
        average.begin(average.tensors.keys() - values["average"].keys())


def _set_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    settings: Any = get_optimizer_state_dict(model, optimizer)["param_groups"]
    # A parameter that never had a gradient has no state, and gets it at its first update.
    has_all = {name for group in settings for name in group["params"]} <= state.keys()
    set_optimizer_state_dict(
        model,
        optimizer,
        {"state": dict(state), "param_groups": settings},
        options=StateDictOptions(strict=has_all),
    )


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Return the further names of parameters with several names, each with the first of the same parameter."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def saved_part(folder: Path, values: Tensors) -> Tensors:
    """Return `values` without the optimizer state and averages missing in the checkpoint in `folder`."""
    metadata = read_metadata(folder)
    stored = {"optimizer": {name.rpartition(".")[0] for name in stored_tensors(metadata, "optimizer.")}}
    if "average" in values:
        stored["average"] = {*stored_tensors(metadata, "average.")}
    kept = {part: {name: each for name, each in values[part].items() if name in stored[part]} for part in stored}
    return {**values, **kept}


def other_optimizer(metadata: Metadata, values: Tensors, *, is_renamed: bool) -> str | None:
    """Return the difference between the optimizer's state in a checkpoint and in this run, in words; None if both fit.

    State only in this run fits, unless is_renamed: the checkpoint names another optimizer.
    """
    stored: dict[str, set[str]] = {}
    for name in stored_tensors(metadata, "optimizer."):
        parameter, _, kind = name.rpartition(".")
        stored.setdefault(parameter, set()).add(kind)
    ours = {
        parameter: {kind for kind, value in state.items() if isinstance(value, torch.Tensor)}
        for parameter, state in values["optimizer"].items()
    }
    both = [each for each in stored if each in ours]
    if stored and not both and ours:
        return None  # other parameters are trained
    differing = [each for each in both if stored[each] != ours[each]]
    if not differing and (both or not (stored or (ours and is_renamed))):
        return None
    kinds = [set().union(*(states[each] for each in differing or states)) for states in (stored, ours)]
    before, now = (", ".join(sorted(each)) or "no state" for each in kinds)
    return f"{before}, now {now}" + (f", for example of {differing[0]}" if differing else "")


def read_metadata(folder: Path) -> Metadata:
    """Read DCP's .metadata: the tensors of a checkpoint, and their files."""
    return FileSystemReader(folder).read_metadata()


def needed_files(metadata: Metadata, values: Tensors) -> list[str]:
    """Return the names of the files with the data of `values`."""
    _, plan = _plan(metadata, values)
    return sorted({metadata.storage_data[item.storage_index].relative_path for item in plan.items})


def files_with(metadata: Metadata, values: Tensors) -> list[str]:
    """Return the names of the files with tensors of the names in `values`."""
    wanted = {f"{part}.{name}" for part, named in values.items() for name in named}
    return sorted({file.relative_path for index, file in metadata.storage_data.items() if index.fqn in wanted})


@writes_saved
def read_tensors(folder: Path, values: Tensors, *, metadata: Metadata | None = None) -> None:
    """Read into the tensors of `values`, without other ranks. CheckpointError if names or shapes differ.

    metadata: of `folder`, if already read.
    """
    metadata = metadata or read_metadata(folder)
    planner, plan = _plan(metadata, values)
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.finish_plan(plan), planner).wait()


def stored_tensors(metadata: Metadata, prefix: str) -> dict[str, TensorStorageMetadata]:
    """Return sizes and types of the tensors with a prefix, by their names without the prefix."""
    return {
        name.removeprefix(prefix): each
        for name, each in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(each, TensorStorageMetadata)
    }


def _plan(metadata: Metadata, values: Tensors) -> tuple[DefaultLoadPlanner, LoadPlan]:
    planner = DefaultLoadPlanner()
    try:
        planner.set_up_planner(values, metadata, is_coordinator=True)
        return planner, planner.create_local_plan()
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint does not fit this model and optimizer ({' '.join(str(error).split())[:300]}): "
            "restore the model settings, or start over in another output_dir"
        ) from error


@dataclass(frozen=True)
class _Written(WriteResult):
    """First result of a rank, with the files written by the rank."""

    files: Mapping[str, FileDigest]


class _Files(FileSystem):
    """Files of a checkpoint on this node, with digests by name."""

    def __init__(self) -> None:
        self.digests: dict[str, FileDigest] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[DigestedFile]:
        assert mode == "wb"
        with DigestedFile(Path(path)) as file:
            yield file
        self.digests[Path(path).name] = file.digest


class CheckpointWriter(FileSystemWriter):
    """Writes a checkpoint: each rank writes tensors, then rank 0 writes `documents` and complete.json.

    documents: further files of rank 0 in the checkpoint, by name. keep: number of latest checkpoints to keep. best:
    step of the best checkpoint, see remove_old. beside: files of rank 0 next to the checkpoints, by their keys.
    wait_for_copies: returns when the tensors can be read; None: they are no copies, and may be on a device.
    check_owner: raises an error if another run took over.
    """

    def __init__(
        self,
        target: Target,
        step: int,
        documents: Mapping[str, bytes],
        *,
        keep: int | None,
        best: int | None = None,
        beside: Mapping[str, bytes] = NOTHING,
        wait_for_copies: Callable[[], None] | None = None,
        check_owner: Callable[[], None] = lambda: None,
    ):
        # torch would wait for all work of the device again and again, also for copies on the CPU.
        copy_ahead = COPY_AHEAD_BYTES if wait_for_copies is None else 0
        super().__init__(target.writing(step), per_thread_copy_ahead=copy_ahead)
        self.fs = self._files = _Files()
        self.target = target
        self.step = step
        self.warnings: list[str] = []  # failures to remove old checkpoints
        self._folder = target.writing(step)
        self._documents = documents
        self._keep, self._best, self._beside = keep, best, beside
        self._wait_for_copies, self._check_owner = wait_for_copies, check_owner

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the folder is created later, once for all ranks

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with _failures():
            self._check_owner()
            self.target.prepare(self.step)
        prepared: list[SavePlan] = super().prepare_global_plan(plans)
        return prepared

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        results: list[WriteResult] = []
        with _failures(self._folder):
            if self._wait_for_copies is not None:
                self._wait_for_copies()
            self.target.begin(self.step)
            if plan.items:
                write = super().write_data
                first, *others = [each for part in _parts(plan) for each in write(part, planner).value()]
                names = {result.storage_data.relative_path for result in (first, *others)}
                files = {name: self._files.digests[name] for name in sorted(names)}
                self.target.publish(self.step, files)
                results = [_Written(first.index, first.size_in_bytes, first.storage_data, files), *others]
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        firsts = [first for first, *_ in filter(None, results) if isinstance(first, _Written)]
        files = {name: digest for first in firsts for name, digest in first.files.items()}
        with _failures(self._folder):
            super().finish(metadata, results)
            for name, data in self._documents.items():
                write_synced(self._folder / name, data)
            own = {name: FileDigest.of(self._folder / name) for name in (METADATA_NAME, *self._documents)}
            self.target.publish(self.step, own)
            for key, data in self._beside.items():
                self.target.storage.write(key, data)
            self._check_owner()
            self.target.commit(self.step, {**files, **own})
        try:
            remove_old(self.target, self.step, keep=self._keep, best=self._best)
        except StorageError as error:  # the new one is complete: old ones may stay
            self.warnings.append(f"old checkpoints stay: {error}")


def _parts(plan: SavePlan) -> list[SavePlan]:
    """Split the tensors written by a rank into files by reader.

    An export fetches the files with the model's tensors, not the optimizer's. Single numbers, equal on all ranks (for
    example the optimizer's counts of steps), are written by rank 0 and read by all ranks: they have their own file, and
    ranks do not fetch rank 0's part of the optimizer for single numbers.
    """
    alike: list[WriteItem] = []
    of_model: list[WriteItem] = []
    others: list[WriteItem] = []
    for item in plan.items:
        data = item.tensor_data
        is_alike = item.type is WriteItemType.TENSOR and data is not None and data.size.numel() == 1
        (alike if is_alike else of_model if item.index.fqn.startswith("model.") else others).append(item)
    prefix = plan.storage_data.prefix  # the names of a rank's files begin with it: __3_0.distcp, __3_10.distcp
    parts = [replace(plan, items=of_model)]
    for digit, items in (("1", others), ("2", alike)):
        parts.append(replace(plan, items=items, storage_data=replace(plan.storage_data, prefix=f"{prefix}{digit}")))
    return [part for part in parts if part.items]


def remove_old(target: Target, newest: int, *, keep: int | None, best: int | None = None) -> None:
    """Delete all but the last `keep` checkpoints up to step `newest`; later checkpoints, of another run, stay.

    best: step of a checkpoint to keep always; counts towards `keep` if `keep` is more than 1.
    """
    if keep is None:
        return
    steps = [step for step in target.candidates() if step <= newest]
    if best in steps[:-keep]:
        steps.remove(best)
        keep = max(1, keep - 1)
    for step in (*steps[:-keep], *(step for step in target.unfinished() if step < newest)):
        remove(target.storage, step)


@contextmanager
def _failures(folder: Path | None = None) -> Iterator[None]:
    """Convert errors to CheckpointErrors: they can be sent to other ranks, and name a full disk of `folder`."""
    try:
        yield
    except LmmsStreamError:
        raise
    except (OSError, RuntimeError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if not full and folder is not None and folder.is_dir():
            full = isinstance(error, RuntimeError) and shutil.disk_usage(folder).free < NO_ROOM_BYTES
        if full:
            raise CheckpointError(
                f"no room on the disk of {folder}: free some, lower save_total_limit, or name another checkpoint_dir"
            ) from None
        raise CheckpointError(" ".join(str(error).split())[:300]) from error


def cause_of(error: BaseException) -> str:
    """Return the cause of a failed save as a single line."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return " ".join(str(error).split())[:500] or type(error).__name__
