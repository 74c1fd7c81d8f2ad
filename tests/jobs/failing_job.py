"""A job: a run of which rank 1 fails: in its third step, as nobody foresaw, or in the proof. Arguments: as of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.loader.collate import collate
from lmms_stream.types import Batch
from torch.distributed.elastic.multiprocessing.errors import record

from tests.train.runs import trainer_of


def fail_on_rank_1(*args: Any, step: int, **options: Any) -> Batch:
    """What collate gives, until it fails."""
    if dist.get_rank() == 1 and step == 2:
        raise ZeroDivisionError("rank 1 fails here")
    return collate(*args, step=step, **options)


class OfLittleMemory(FSDP2SFTTrainer):
    """A trainer whose rank 1 has no memory left in the first layer of the model."""

    def create_model(self) -> torch.nn.Module:
        def run_out(*_: Any) -> None:
            if self.world.rank == 1:
                raise torch.OutOfMemoryError("out of memory")

        model = super().create_model()
        next(each for name, each in model.named_modules() if name.endswith("mlp")).register_forward_pre_hook(run_out)
        return model


@record
def main() -> None:
    config, *overrides = sys.argv[1:]
    if overrides[-1] == "proof":
        trainer_of(Path(config), *overrides[:-1], kind=OfLittleMemory).train()
    trainer_of(Path(config), *overrides, data_collator=fail_on_rank_1).train()


if __name__ == "__main__":
    main()
