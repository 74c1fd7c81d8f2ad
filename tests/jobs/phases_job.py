"""A job: a run on pairs of answers of which one rank is told to stop in a long phase. Arguments: FOLDER OUTPUT PHASE.

The folder has the dataset "data". Rank 0 is told in an export, which other ranks have left; rank 1 in other phases.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from lmms_stream.plugins.tasks.dpo import DPO
from lmms_stream.train.loop import StoppedError
from lmms_stream.train.run.distributed import STOPPED_STATUS, end_distributed
from lmms_stream.train.run.phases import Phases
from transformers import TrainerCallback

from tests.train.answers import dataset_of, trainer_of


class ToldPhases(Phases):
    """Tells this process to stop in the second part of a phase."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def vote(self) -> None:
        if (self.now.name, self.now.part) == (self.name, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        super().vote()


class ToldAtEnd(TrainerCallback):
    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    folder, output, phase = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    data = dataset_of(folder / "data", most=1)
    trainer = trainer_of(
        folder, DPO(reference="stored"), train_dataset=data, eval_dataset=data, output_dir=output, max_steps=4,
        eval_steps=2, save_steps=2, export=True, lr_scheduler_type="constant", logging_steps=1,
    )  # fmt: skip
    if phase == "export":
        trainer.add_callback(ToldAtEnd())
    elif trainer.world.rank == 1:
        trainer.phases = ToldPhases(phase)
    try:
        trainer.train()
    except StoppedError as stopped:
        sys.stderr.write(f"rank {trainer.world.rank}: {stopped}\n")
        return STOPPED_STATUS
    return 0


if __name__ == "__main__":
    status = main()
    end_distributed()
    sys.exit(status)
