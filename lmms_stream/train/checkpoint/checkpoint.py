"""Checkpoints of a run: saved while training continues; the latest whole checkpoint resumes at any world size."""

from __future__ import annotations

import datetime
import json
import logging
import shutil
import socket
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from ...errors import CheckpointError, LmmsStreamError
from ...storage.local import LocalStorage
from ..run.copies import Stager
from ..run.distributed import from_rank_0
from ..run.optimizers import Average
from .resume import Resumable, find_checkpoint, on_all_ranks, on_rank_0
from .store import (
    METADATA_NAME,
    STATE_NAME,
    TIED,
    Checkpoint,
    DamagedError,
    FolderTarget,
    Target,
    folder_name,
    open_target,
    write_evaluated,
)
from .tensors import (
    NOTHING,
    CheckpointWriter,
    Tensors,
    cause_of,
    needed_files,
    other_optimizer,
    read_metadata,
    read_tensors,
    room_for,
    saved_part,
    set_tensors,
    tensors_of,
    tied_names,
)

OPTIMIZER = "optimizer"  # in the state of a checkpoint: the class of its optimizer
logger = logging.getLogger("lmms_stream")


class Checkpointer:
    """Saves and resumes the checkpoints at `url`, a folder shared by all nodes or a URL; all ranks call each method.

    staging: a local folder for files on their way to or from a store. keep: number of latest checkpoints to keep.
    asynchronous: a thread writes copies of the tensors; the next save, `wait` and the end of the `with` block wait for
    the thread, and raise CheckpointError if the save failed. If the block ends with another error, the failed save is
    only logged. Earlier checkpoints are untouched. timeout_s: limit of each wait and each collective.
    """

    def __init__(
        self,
        url: str,
        *,
        staging: Path,
        keep: int | None = None,
        asynchronous: bool = True,
        timeout_s: float = 600.0,
        average: Average | None = None,
    ):
        self._average = average
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.timeout_s = timeout_s
        self.asynchronous = asynchronous
        self._staging = staging
        self._target = open_target(url, staging=staging / f"rank-{self.rank}")
        self.url = self._target.storage.url
        self._keep = keep
        # A group of its own: the collectives of the writing thread would mix with those of training.
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup)  # the group has all ranks, including this rank
        self._group = group
        self._stager = Stager()
        self.check_owner: Callable[[], None] = lambda: None  # on rank 0, before files are written and at the end
        self._writer: CheckpointWriter | None = None
        self._saving: Future[Any] | None = None

    def __enter__(self) -> Checkpointer:
        """Remove the files that a killed run, maybe of other ranks, left in `staging`; all ranks call this.

        The run must own its folders by now: the files of a live run would be lost.
        """
        if not self._target.reads_in_place:
            on_all_ranks(partial(shutil.rmtree, self._staging, ignore_errors=True), self._group)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.wait()
        except CheckpointError as second:
            if error is None:
                raise
            logger.error("%s", second)
        finally:
            self._stager.release()

    def save(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        step: int,
        state: Mapping[str, Any],
        documents: Mapping[str, bytes],
        best: int | None = None,
        beside: Mapping[str, bytes] = NOTHING,
    ) -> None:
        """Begin to save checkpoint `step`, or save synchronously; first wait for the previous save.

        state: JSON values of the trainer, including the cursor. documents: other files, by name. Only state and
        documents of rank 0 are saved. best: step of a checkpoint to keep, whatever `keep` is. beside: files of rank 0
        next to the checkpoints, by their keys; never removed.
        """
        self.wait()
        values = tensors_of(model, optimizer, self._average)
        state = {**state, "step": step, OPTIMIZER: type(optimizer).__name__, TIED: tied_names(model)}
        text = json.dumps(state, indent=1) + "\n"
        documents = {**documents, STATE_NAME: text.encode()}
        self._writer = CheckpointWriter(
            self._target,
            step,
            documents,
            keep=self._keep,
            best=best,
            beside=beside,
            wait_for_copies=self._stager.synchronize_staging if self.asynchronous else None,
            check_owner=self.check_owner,
        )
        options: dict[str, Any] = {
            "storage_writer": self._writer,
            # The first of several ranks with the same tensor writes it: fewer files are read later.
            "planner": DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            "process_group": self._group,
        }
        if self.asynchronous:
            self._saving = self._stager.submit(save, self._stager.stage(values), **options)
            if not values["model"].keys() <= {name for name, _ in model.named_parameters(remove_duplicate=False)}:
                self._stager.fence()  # a forward pass writes to buffers
        else:
            self._finish(lambda: save(values, **options))

    def end_evaluation(self, step: int, state: Mapping[str, Any], *, beside: Mapping[str, bytes]) -> None:
        """Add to checkpoint `step` the state after its pending evaluation; all ranks call this. beside: see save."""
        self.wait()

        def write() -> None:
            self.check_owner()
            for key, data in beside.items():
                self._target.storage.write(key, data)
            with suppress(DamagedError):  # removed meanwhile
                write_evaluated(self._target.storage, step, state)

        on_rank_0(write, self._group)

    def probe(self) -> None:
        """Raise CheckpointError on all ranks if one cannot write to the folder, or sees another folder than rank 0."""
        name = f".probe-{uuid.uuid4().hex}"

        def look() -> None:
            try:
                self._target.probe(name, is_first=self.rank == 0)
            except LmmsStreamError:
                raise
            except OSError as error:
                raise CheckpointError(
                    f"rank {self.rank} on {socket.gethostname()} cannot use {self._target.storage.url} for checkpoints "
                    f"({error.strerror}): name a folder that all nodes share, or a URL, as train.checkpoint_dir"
                ) from error

        name = from_rank_0(name, self._group)
        try:
            on_rank_0(look, self._group)
            on_all_ranks(lambda: None if self.rank == 0 else look(), self._group)
        finally:
            if self.rank == 0 and self._target.reads_in_place:
                with suppress(NotADirectoryError):  # the error of the probe names it
                    Path(self._target.storage.url, name).unlink(missing_ok=True)

    @property
    def has_failed(self) -> bool:
        """Whether a save of this rank failed since the last `wait`; the next `wait` raises the error."""
        return self._saving is not None and self._saving.done() and self._saving.exception() is not None

    @property
    def is_saving(self) -> bool:
        """Whether this rank is writing; other ranks may have finished."""
        return self._saving is not None and not self._saving.done()

    def wait(self) -> None:
        """Wait for the save in flight; raise CheckpointError, with the path, if the save failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            self._finish(lambda: saving.result(self.timeout_s))

    def _finish(self, result: Callable[[], object]) -> None:
        assert self._writer is not None
        where = f"{self._target.storage.url}/{folder_name(self._writer.step)}"
        try:
            result()
        except TimeoutError as error:
            raise CheckpointError(
                f"checkpoint {where} was not written within {self.timeout_s:g} s: look at the disk or the network, or "
                "raise timeout_s"
            ) from error
        except (CheckpointException, RuntimeError, OSError, LmmsStreamError) as error:
            if self.rank == 0 or not self._target.reads_in_place:
                self._target.discard(self._writer.step)
            raise CheckpointError(
                f"checkpoint {where} was not saved; earlier checkpoints are unchanged: {cause_of(error)}"
            ) from error
        for message in self._writer.warnings if self.rank == 0 else ():
            logger.warning("%s", message)

    def find(self, choice: str) -> Resumable | None:
        """See find_checkpoint."""
        return find_checkpoint(self.url, choice=choice, staging=self._staging, group=self._group)

    def resume(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        found: Resumable,
        *,
        check: Callable[[Checkpoint], None] = lambda _: None,
        resets_other_optimizer: bool = False,
    ) -> Checkpoint:
        """Fill model and optimizer from a checkpoint; if files are damaged, from the latest whole checkpoint before.

        check may refuse the checkpoint before tensors are read. resets_other_optimizer: leave out the state of
        another optimizer, and begin this optimizer without state; otherwise an error. Raises CheckpointError.
        """
        values = room_for(model, optimizer, self._average)
        while True:
            target, checkpoint = found.target, found.checkpoint
            check(checkpoint)
            part = partial(
                _saved_part, values=values, checkpoint=checkpoint, optimizer=optimizer, resets=resets_other_optimizer
            )
            try:
                folder, saved = self._fetch(target, checkpoint, part)
            except DamagedError as error:
                found = found.pass_over(error, self._group)
                continue
            on_all_ranks(partial(read_tensors, folder, saved), self._group)
            set_tensors(model, optimizer, saved, self._average)
            if not target.reads_in_place:
                target.discard(checkpoint.step)
            return checkpoint

    def steps(self) -> list[int]:
        """Return the steps of the existing checkpoints, in ascending order; all ranks call this."""
        return on_rank_0(self._target.candidates, self._group)

    def _fetch(self, target: Target, checkpoint: Checkpoint, part: Callable[[Path], Tensors]) -> tuple[Path, Tensors]:
        """Return the folder with all files needed by this rank, and the tensors to read from the folder.

        part: the folder -> the tensors to read. Each file is checked by a single rank, or by each rank after fetching.
        """
        if target.reads_in_place:
            share = sorted(checkpoint.files)[self.rank :: self.world_size]
            folder = on_all_ranks(lambda: target.fetch(checkpoint, share), self._group)
            return folder, on_all_ranks(lambda: part(folder), self._group)
        folder = on_all_ranks(lambda: target.fetch(checkpoint, [METADATA_NAME]), self._group)
        saved = on_all_ranks(lambda: part(folder), self._group)

        def fetch() -> Path:
            return target.fetch(checkpoint, needed_files(read_metadata(folder), saved))

        return on_all_ranks(fetch, self._group), saved


def _saved_part(
    folder: Path, *, values: Tensors, checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, resets: bool
) -> Tensors:
    """Return the tensors to read. State of another optimizer is left out if resets, otherwise CheckpointError."""
    found = saved_part(folder, values)
    now = type(optimizer).__name__
    saved = checkpoint.state.get(OPTIMIZER, "another optimizer")  # unknown in checkpoints of earlier versions
    is_renamed = OPTIMIZER in checkpoint.state and saved != now
    difference = other_optimizer(read_metadata(folder), values, is_renamed=is_renamed)
    if difference is None:
        return found
    if resets:
        return {**found, "optimizer": {}}
    raise CheckpointError(
        f"checkpoint {checkpoint.where} has the state of {saved}, and this run's optimizer is {now} (its state was "
        f"{difference}): restore train.optim and train.optim_args, or set train.on_other_optimizer to reset, to begin "
        "the optimizer without state"
    )


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints below a folder, oldest first."""
    return [folder / folder_name(step) for step in FolderTarget(LocalStorage(folder)).candidates()]
