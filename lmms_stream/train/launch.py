"""A run's file -> a trainer, in the necessary order: first forks, then process groups, then models."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import build_config, load_mapping
from ..errors import LmmsStreamError, TrainingError
from ..loader.worker_server import fork_worker_server, without_blas_threads
from ..registry import imported
from ..types import World

if TYPE_CHECKING:
    from .trainer import PackedTrainer

RUN_LENGTHS = ("train.max_steps", "train.num_train_epochs", "train.max_tokens")  # a run has exactly one
_LAUNCH_KEYS = {"trainer_type", "dataset_config", "model_config", "trainer_args"}  # keys of LMMS Engine's launch file


class Prepared(NamedTuple):
    """A run with an existing process group. trainer: makes the trainer."""

    trainer: Callable[[], PackedTrainer]
    rank: int
    timeout_s: float


def prepare(path: Path, overrides: Sequence[str]) -> Prepared:
    """Prepare the run of a file, ours or LMMS Engine's."""
    with without_collections(), without_blas_threads():
        data = load_mapping(path, overrides, one_of=RUN_LENGTHS)
        return (_launched if is_launch_file(data) else _configured)(data, str(path))


def is_launch_file(data: Mapping[str, Any]) -> bool:
    """Whether a run's file has the format of LMMS Engine."""
    return bool(_LAUNCH_KEYS & data.keys())


@contextmanager
def lost_ranks_named(prepared: Prepared) -> Iterator[None]:
    """Raise a TrainingError if torch reports inside that another rank ended or did not come in time."""
    from .run.distributed import is_lost_rank

    try:
        yield
    except LmmsStreamError:
        raise
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        known = "".join(f". {note}" for note in getattr(error, "__notes__", ()))
        raise TrainingError(
            f"rank {prepared.rank} waited for another rank, which ended or was silent for {prepared.timeout_s:g} s "
            f"({' '.join(str(error).split())[:200]}): look for the first error of the other ranks, or raise "
            f"train.timeout_s{known}"
        ) from error


def _configured(data: Mapping[str, Any], source: str) -> Prepared:
    """Prepare the run of a file with dataset, model and train."""
    from .run_config import RunConfig

    config = build_config(RunConfig, data, source=source)
    if config.train.num_workers:
        fork_worker_server()  # before this process has threads, and models
    from .inputs import RunInputs
    from .run.mesh import join_world
    from .trainer import PackedTrainer

    world, _ = join_world(config.train)

    def trainer() -> PackedTrainer:
        run = RunInputs(
            config=config.train,
            model=config.model,
            train_dataset=config.build_datasets(world),
            eval_dataset=config.build_eval_dataset(world),
        )
        return PackedTrainer(run, task=config.build_task())

    return Prepared(trainer, world.rank, config.train.timeout_s)


def _launched(data: Mapping[str, Any], source: str) -> Prepared:
    """Prepare the run of LMMS Engine's launch file."""
    arguments = data.get("trainer_args")
    if isinstance(arguments, Mapping) and arguments.get("dataloader_num_workers"):
        fork_worker_server()  # before this process has threads, and models
    launch, made = imported("doors.lmms_engine.launch.run:read_launch")(data, source=source)
    launched_trainer = imported("doors.lmms_engine.launch.run:launched_trainer")
    return Prepared(lambda: launched_trainer(launch, made), World.detect().rank, float(made.ddp_timeout))


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable the garbage collector inside; objects existing at the end are never searched for garbage again.

    Imports and the model leave a million objects until the process ends. Repeated searches for garbage take a fifth of
    the CPU time of the imports, and would sometimes stop training.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
