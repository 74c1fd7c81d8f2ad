"""A job: a run of which only rank 1 is told to stop, in the third pack of its evaluations. Arguments: of a run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.train.loop import StoppedError
from lmms_stream.train.run.distributed import STOPPED_STATUS, end_distributed
from lmms_stream.types import Batch

from tests.train.runs import trainer_of


class Told(FSDP2SFTTrainer):
    num_packs = 0

    def evaluation_step(self, pack: Batch) -> Sequence[torch.Tensor]:
        self.num_packs += 1
        if self.num_packs == 3 and self.world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().evaluation_step(pack)


def main() -> int:
    trainer = trainer_of(Path(sys.argv[1]), *sys.argv[2:], kind=Told)
    assert isinstance(trainer, Told)
    try:
        trainer.train()
    except StoppedError as stopped:
        sys.stderr.write(f"rank {trainer.world.rank}, {trainer.num_packs} packs: {stopped}\n")
        return STOPPED_STATUS
    return 0


if __name__ == "__main__":
    status = main()
    end_distributed()
    sys.exit(status)
