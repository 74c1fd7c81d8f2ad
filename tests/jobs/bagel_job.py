"""A job: a run of texts and images in one sequence, on packs that hold other media each.

Its arguments: a folder with `data`, `rows` and `words` (tests/train/bagel.py), the output, then settings of the run as
NAME=VALUE. With `streamed` as the output's name it reads the rows as bagel_iterable does, else the data. With `whole`
it writes beside the output the gradients and packs of its first step. killed_at=N: each rank is killed when it has
done so many steps.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lmms_stream.datasets import MultiModalIterableDataset
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run.settings import TrainConfig
from lmms_stream.types import World

from tests.train.bagel import build_model, build_processor, dataset_of

from .sharding_job import whole

TIMEOUT_S = 60.0


def trainer_of(folder: Path, output: Path, settings: dict[str, Any]) -> FSDP2SFTTrainer:
    world, _ = init_distributed(TIMEOUT_S)
    dataset: Any = (
        MultiModalIterableDataset(dataset_of(folder, "bagel_iterable", num_canonical_nodes=4))
        if output.name == "streamed"
        else shards_of(folder, world)
    )
    args = TrainConfig(
        **{
            "output_dir": str(output), "global_batch": 4, "num_workers": 0, "max_grad_norm": 1e9, "seed": 5,
            "timeout_s": TIMEOUT_S, "log_sample_ids": True, "learning_rate": 1e-3, **settings,
        }
    )  # fmt: skip
    return FSDP2SFTTrainer(build_model(), args, dataset)  # the task is the one that the processor asks for


def shards_of(folder: Path, world: World) -> PackedStreamingDataset:
    return PackedStreamingDataset(
        str(folder / "data"),
        processor=build_processor(folder / "words", text_dropout=0.2, vit={"dropout": 0.2}, vae={"dropout": 0.2}),
        packing=PackingConfig(packing_length=160, overlong="error"),
        order=OrderConfig(num_canonical_nodes=2),
        world=world,
    )


def keep_first_step(trainer: FSDP2SFTTrainer, output: Path) -> None:
    """Have the run write its first step."""
    packs: list[Any] = [None] * trainer.world.world_size
    run = trainer.training_step

    def training_step(batches: Any, units: Any) -> torch.Tensor:
        if trainer.step == 0:
            dist.all_gather_object(packs, [(batch.source, batch.sample_ids.tolist()) for batch in batches])
        return run(batches, units)

    def write(*_: Any) -> None:
        if trainer.step:
            return
        gradients: dict[str, torch.Tensor] = {}
        for name, parameter in trainer.model.model.named_parameters():
            assert parameter.grad is not None
            gradients[name] = whole(parameter.grad)
        if trainer.world.rank == 0:
            torch.save({"gradients": gradients, "packs": packs}, output.with_suffix(".pt"))

    trainer.training_step = training_step  # type: ignore[assignment, method-assign]
    trainer.optimizer.register_step_pre_hook(write)


def main() -> None:
    folder, output = map(Path, sys.argv[1:3])
    settings = {name: json.loads(value) for name, _, value in (each.partition("=") for each in sys.argv[3:])}
    killed_at = settings.pop("killed_at", None)
    trainer = trainer_of(folder, output, settings)
    if killed_at is not None:
        trainer.build()
        trainer.optimizer.register_step_pre_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGKILL) if trainer.step == killed_at else None
        )
    if output.name == "whole":
        keep_first_step(trainer, output)
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
