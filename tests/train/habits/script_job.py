"""A script as users of TRL write it, but for the import of the trainer: it trains, and rank 0 writes what came out.

Its arguments are a model's folder, a folder for the run, and SFTConfig's options as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from lmms_stream import FSDP2SFTTrainer as SFTTrainer
from lmms_stream.train.run.distributed import end_distributed
from transformers import AutoTokenizer
from trl import SFTConfig

from tests.train.habits.rows import chats


def main() -> None:
    name, folder, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    args = SFTConfig(folder, packing=True, max_length=64, use_cpu=True, bf16=False, report_to="none", **options)
    had_group = dist.is_initialized()
    trainer = SFTTrainer(
        model=name, args=args, train_dataset=chats(60), processing_class=AutoTokenizer.from_pretrained(name)
    )
    output = trainer.train()
    trainer.save_model()
    made = {"had_group": had_group, "ranks": trainer.world.world_size, "loss": output.training_loss}
    (Path(folder) / f"rank-{trainer.world.rank}.json").write_text(json.dumps(made))
    end_distributed()
    assert dist.is_initialized() is had_group  # a group that was there is left alone
    if had_group:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
