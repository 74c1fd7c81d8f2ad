"""A job: a step of FSDP2SFTTrainer on two sources with media, for each of some cases, some after an evaluation.

Its argument is a JSON file: {"datasets": {model: {source: folder}}, "cases": {name: {"model": …, "sources": […],
"train": …, "on": […], "is_evaluated": …}}}, where "on" are world sizes. Beside it come `<name>-<world size>.pt` with
gradients, the source and samples of each reading rank's packs, the rows that towers of Qwen-VL read on each rank, the
record of the step and the evaluation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.errors import ConfigError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.families.qwen_vl import QwenVL
from lmms_stream.signals import StopSignal
from lmms_stream.train.loop import Loop
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run.settings import TrainConfig
from lmms_stream.types import World

from tests.train import families

from .sharding_job import whole

TIMEOUT_S = 60.0


def open_dataset(folder: str, name: str, model: Any, source: str, world: World) -> PackedStreamingDataset:
    return PackedStreamingDataset(
        folder,
        processor=families.processor_of(name, model, source),
        packing=PackingConfig(packing_length=families.packing_length_of(name)),
        order=OrderConfig(num_canonical_nodes=2),
        world=world,
    )


def run(name: str, case: dict[str, Any], folders: dict[str, str], folder: Path) -> dict[str, Any]:
    world, _ = init_distributed(TIMEOUT_S)
    model = families.build(case["model"], **({"attention": case["attention"]} if "attention" in case else {}))
    datasets = {
        source: open_dataset(folders[source], case["model"], model, source, world) for source in case["sources"]
    }
    if case.get("is_reversed"):
        for each in datasets.values():
            each.processor.family.pieces = reversed_pieces  # type: ignore[union-attr]
    output = folder / f"{name}-{world.world_size}"
    settings = {"output_dir": str(output), "global_batch": 2, "max_steps": 1, "num_workers": 0, "max_grad_norm": 1e9}
    settings["optim"] = "sgd"  # as in sharding_job
    args = TrainConfig(
        **{**settings, "timeout_s": TIMEOUT_S, "weights": dict.fromkeys(case["sources"], 1.0), **case.get("train", {})}
    )
    trainer = FSDP2SFTTrainer(model, args, datasets, eval_dataset=datasets[case["sources"][0]])
    evaluated = trainer.evaluate() if case["is_evaluated"] else None
    gradients: dict[str, torch.Tensor] = {}

    def keep_gradients(*_: Any) -> None:
        for key, parameter in trainer.model.model.named_parameters():
            if parameter.grad is not None:
                gradients[key] = whole(parameter.grad)

    rows = 0

    def count_rows(_: Any, inputs: tuple[torch.Tensor, ...], __: dict[str, Any]) -> None:
        nonlocal rows
        rows += sum(map(len, inputs))

    trainer.optimizer.register_step_pre_hook(keep_gradients)
    for tower in {*trainer.model.towers.values()}:
        tower.register_forward_pre_hook(count_rows, with_kwargs=True)
    with StopSignal() as stop, trainer.run_log.running(trainer.schedule, step=0, position=0):
        trainer.model.train()
        batches = next(trainer.data.steps_of(iter(trainer.loader)))
        loop = Loop(trainer, stop)
        loop.train_step(batches)
        loop.log()
        loop.read()
    mine = [(batch.source, batch.sample_ids.tolist(), sorted(batch.inputs)) for batch in batches]
    packs: list[Any] = [None] * world.world_size
    dist.all_gather_object(packs, (mine, rows))
    (record,) = read_log(output) if world.rank == 0 else [{}]
    return {
        "gradients": gradients,
        "packs": [pack for pack, _ in packs[:: trainer.world.replication]],
        "rows": [each for _, each in packs],
        "record": record,
        "evaluated": evaluated,
    }


def reversed_pieces(kind: str, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[int]]:
    """Pieces as of a wrong family: not in the order of their tokens."""
    inputs, patches = QwenVL.pieces(kind, inputs)
    return {name: values.flip(0) for name, values in inputs.items()}, patches[::-1]


def main() -> None:
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    world, _ = init_distributed(TIMEOUT_S)
    for name, case in job["cases"].items():
        if world.world_size in case["on"]:
            try:
                made = run(name, case, job["datasets"][case["model"]], path.parent)
            except ConfigError as error:
                made = {"error": str(error)}
            if world.rank == 0:
                torch.save(made, path.parent / f"{name}-{world.world_size}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
