"""A job: runs of texts and images in one sequence, on packs that hold other media each.

Its arguments: a folder with `data` and `words` (tests/train/bagel.py), the output, then settings of the run as
NAME=VALUE. With `gradients` as the output's name it makes one step, and writes gradients, record and packs beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run.settings import TrainConfig
from lmms_stream.train.trainer import FSDP2SFTTrainer

from tests.train.bagel import build_model, build_processor

from .sharding_job import whole

TIMEOUT_S = 60.0


def trainer_of(folder: Path, output: Path, settings: dict[str, Any]) -> FSDP2SFTTrainer:
    world, _ = init_distributed(TIMEOUT_S)
    dataset = PackedStreamingDataset(
        str(folder / "data"),
        processor=build_processor(folder / "words", text_dropout=0.2, vit_dropout=0.2, vae_dropout=0.2),
        packing=PackingConfig(packing_length=160, overlong="error"),
        order=OrderConfig(num_canonical_nodes=2),
        world=world,
    )
    args = TrainConfig(
        **{
            "output_dir": str(output), "global_batch": 4, "num_workers": 0, "max_grad_norm": 1e9, "seed": 5,
            "timeout_s": TIMEOUT_S, "log_sample_ids": True, "learning_rate": 1e-3, **settings,
        }
    )  # fmt: skip
    return FSDP2SFTTrainer(build_model(), args, dataset)  # the task is the one that the processor asks for


def one_step(trainer: FSDP2SFTTrainer, output: Path) -> None:
    gradients: dict[str, torch.Tensor] = {}
    packs: list[Any] = [None] * trainer.world.world_size
    run = trainer.training_step

    def training_step(batches: Any, units: Any) -> torch.Tensor:
        mine = [(batch.source, batch.sample_ids.tolist(), sorted(batch.inputs)) for batch in batches]
        dist.all_gather_object(packs, mine)
        return run(batches, units)

    def keep_gradients(*_: Any) -> None:
        for name, parameter in trainer.model.model.named_parameters():
            assert parameter.grad is not None
            gradients[name] = whole(parameter.grad)

    trainer.training_step = training_step  # type: ignore[method-assign]
    trainer.optimizer.register_step_pre_hook(keep_gradients)
    trainer.train()
    if trainer.world.rank == 0:
        made = {"gradients": gradients, "packs": packs, "record": read_log(output)[0]}
        torch.save(made, output.with_suffix(f".{trainer.world.world_size}.pt"))


def main() -> None:
    folder, output = map(Path, sys.argv[1:3])
    settings = {name: json.loads(value) for name, _, value in (each.partition("=") for each in sys.argv[3:])}
    trainer = trainer_of(folder, output, settings)
    if output.name.startswith("gradients"):
        one_step(trainer, output)
    else:
        trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
