"""A job: a run of which rank 1 stands still in its third step, in a collator. Arguments: how, then as of a run.

sleep: in Python, so that its threads go on. stop: all of its threads, as by SIGSTOP. fail: by an error. build, resume:
it sleeps before its first step, as it makes its optimizer, or reads where it stood. disk: it does not stand still, but
its disk may.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.errors import LmmsStreamError
from lmms_stream.loader.collate import collate
from lmms_stream.train.launch import Prepared, lost_ranks_named
from lmms_stream.types import Batch

from tests.train.runs import trainer_of


def sleep_on_rank_1(how: str) -> None:
    """What the stacks of rank 1 name."""
    if how == "fail":
        raise ZeroDivisionError("rank 1 fails here")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so that the job ends it at once
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait(300)


def collate_until_step_2(*args: Any, step: int, **options: Any) -> Batch:
    """What collate gives, until it stands still."""
    if os.environ["RANK"] == "1" and step == 2 and sys.argv[1] in ("sleep", "stop", "fail"):
        sleep_on_rank_1(sys.argv[1])
    return collate(*args, step=step, **options)


class SleepsBefore(FSDP2SFTTrainer):
    """Of which rank 1 does not come to its first step."""

    def create_optimizer(self) -> torch.optim.Optimizer:
        if self.world.rank == 1 and sys.argv[1] == "build":
            sleep_on_rank_1("sleep")
        return super().create_optimizer()

    def set_length(self) -> None:
        if self.world.rank == 1 and sys.argv[1] == "resume":
            sleep_on_rank_1("sleep")
        super().set_length()


def main() -> None:
    trainer = trainer_of(Path(sys.argv[2]), *sys.argv[3:], kind=SleepsBefore, data_collator=collate_until_step_2)
    rank = trainer.world.rank
    try:
        with lost_ranks_named(Prepared(lambda: trainer, rank, trainer.config.timeout_s)):
            trainer.train()
    except (LmmsStreamError, ZeroDivisionError) as error:
        sys.stderr.write(f"rank {rank}: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
