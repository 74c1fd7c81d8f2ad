"""`torchrun … -m lmms_stream.train CONFIG.yaml key.sub=value …`; without torchrun, a run of one process."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import build_config, load_mapping
from ..errors import LmmsStreamError, TrainingError
from ..loader.worker_server import fork_worker_server, without_blas_threads
from ..processes.ending import end_process
from ..types import World

if TYPE_CHECKING:
    from .trainer import FSDP2SFTTrainer

_LAUNCH_KEYS = {"trainer_type", "dataset_config", "model_config", "trainer_args"}  # of LMMS Engine's launch file
USAGE = """usage: torchrun [--nproc-per-node N …] -m lmms_stream.train CONFIG.yaml [key.sub=value …]

example:
  torchrun --nproc-per-node 2 -m lmms_stream.train run.yaml train.max_steps=100
"""


def main(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & {*arguments}:
        sys.stdout.write(USAGE)
        return 0 if arguments else 2
    try:
        return run(Path(arguments[0]), arguments[1:])
    except LmmsStreamError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def run(path: Path, overrides: Sequence[str]) -> int:
    """Train as the config says; the exit status."""
    try:
        return _train(path, overrides)
    finally:
        gc.unfreeze()  # so that libraries can clean up where the process ends as others do


def _train(path: Path, overrides: Sequence[str]) -> int:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lmms_stream").setLevel(logging.INFO)
    with _without_collections(), without_blas_threads():
        data = load_mapping(path, overrides)
        prepared = (_launched if _LAUNCH_KEYS & data.keys() else _configured)(data, str(path))
        from .loop import StoppedError
        from .run.distributed import STOPPED_STATUS, end_distributed, is_lost_rank
    try:
        with _without_collections():
            trainer = prepared.trainer()
            trainer.build(None)  # to train as its settings say
        trainer.train()
    except StoppedError as stopped:
        sys.stderr.write(f"{stopped}\n")
        return STOPPED_STATUS
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise TrainingError(
            f"rank {prepared.rank} waited for another rank, which ended or was silent for {prepared.timeout_s:g} s "
            f"({' '.join(str(error).split())[:200]}): look for the first error of the others, or raise train.timeout_s"
        ) from error
    finally:
        end_distributed()
    return 0


class _Prepared(NamedTuple):
    """A run whose process group is there. trainer: makes its trainer."""

    trainer: Callable[[], FSDP2SFTTrainer]
    rank: int
    timeout_s: float


def _configured(data: Mapping[str, Any], source: str) -> _Prepared:
    """A run of a file with dataset, model and train."""
    from .run_config import RunConfig

    config = build_config(RunConfig, data, source=source)
    if config.train.num_workers:
        fork_worker_server()  # before this process has threads, and models
    from .run.distributed import init_distributed
    from .trainer import FSDP2SFTTrainer

    world, _ = init_distributed(config.train.timeout_s, replication=config.train.replication)

    def trainer() -> FSDP2SFTTrainer:
        return FSDP2SFTTrainer(
            model=config.model,
            args=config.train,
            train_dataset=config.build_datasets(world),
            eval_dataset=config.build_eval_dataset(world),
            task=config.build_task(),
        )

    return _Prepared(trainer, world.rank, config.train.timeout_s)


def _launched(data: Mapping[str, Any], source: str) -> _Prepared:
    """A run of LMMS Engine's launch file."""
    arguments = data.get("trainer_args")
    if isinstance(arguments, Mapping) and arguments.get("dataloader_num_workers"):
        fork_worker_server()  # before this process has threads, and models
    from .launched import launched_trainer, read_launch

    launch, made = read_launch(data, source=source)
    return _Prepared(lambda: launched_trainer(launch, made), World.detect().rank, float(made.ddp_timeout))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Inside, the garbage collector does not run; objects that are there at the end it passes over from then on.

    Imports and the model leave a million objects that stay until the process ends. To search them for garbage again and
    again is a fifth of the CPU time of the imports, and would stop training at times.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _main() -> int:
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:  # torchrun did not start this process
        faulthandler.enable()
        return main(sys.argv[1:])
    from torch.distributed.elastic.multiprocessing.errors import record  # a rank's traceback reaches torchrun's report

    return record(main)(sys.argv[1:]) or 0


if __name__ == "__main__":
    end_process(_main())
