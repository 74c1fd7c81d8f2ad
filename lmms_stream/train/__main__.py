"""`torchrun … -m lmms_stream.train CONFIG.yaml key.sub=value …`"""

from __future__ import annotations

import sys
from pathlib import Path

from ..config import load_config
from ..errors import LmmsStreamError

USAGE = """usage: torchrun [--nproc-per-node N …] -m lmms_stream.train CONFIG.yaml [key.sub=value …]

example:
  torchrun --nproc-per-node 2 -m lmms_stream.train run.yaml train.max_steps=100
"""


def main(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & {*arguments}:
        sys.stdout.write(USAGE)
        return 0 if arguments else 2
    try:
        from .distributed import STOPPED_STATUS, init_distributed
        from .settings import RunConfig
        from .trainer import FSDP2SFTTrainer, StoppedError

        config = load_config(RunConfig, Path(arguments[0]), arguments[1:])
        world, _ = init_distributed(config.train.timeout_s, replication=config.train.replication)
        trainer = FSDP2SFTTrainer(
            model=config.model.build(),
            args=config.train,
            train_dataset=config.build_datasets(world),
            eval_dataset=config.eval_dataset.build(world) if config.eval_dataset else None,
        )
        try:
            trainer.train()
        except StoppedError as stopped:
            sys.stderr.write(f"{stopped}\n")
            return STOPPED_STATUS
    except LmmsStreamError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record  # a rank's traceback reaches torchrun's report

    sys.exit(record(main)(sys.argv[1:]))
