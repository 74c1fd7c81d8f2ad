"""`torchrun … -m lmms_stream.train CONFIG.yaml key.sub=value …`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ..config import load_config
from ..errors import LmmsStreamError, TrainingError

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
    from .run.distributed import STOPPED_STATUS, init_distributed, is_lost_rank
    from .run.settings import RunConfig
    from .trainer import FSDP2SFTTrainer, StoppedError

    config = load_config(RunConfig, path, overrides)
    world, _ = init_distributed(config.train.timeout_s, replication=config.train.replication)
    try:
        trainer = FSDP2SFTTrainer(
            model=config.model.build(),
            args=config.train,
            train_dataset=config.build_datasets(world),
            eval_dataset=config.eval_dataset.build(world) if config.eval_dataset else None,
        )
        trainer.train()
    except StoppedError as stopped:
        sys.stderr.write(f"{stopped}\n")
        return STOPPED_STATUS
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise TrainingError(
            f"rank {world.rank} waited for another rank, which ended or was silent for {config.train.timeout_s:g} s "
            f"({' '.join(str(error).split())[:200]}): look for the first error of the others, or raise train.timeout_s"
        ) from error
    return 0


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record  # a rank's traceback reaches torchrun's report

    sys.exit(record(main)(sys.argv[1:]))
