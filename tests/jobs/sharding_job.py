"""A job: one step of FSDP2SFTTrainer for each of some cases, and what it did.

Its argument is a JSON file: {"dataset": folder, "cases": {name: {"model": …, "train": …, "on": […]}}}, where "on" are
world sizes; a case may have a dataset of its own. Beside the file come `<name>-<world size>-<rank>.pt` with weights,
gradients, packs (the sample ids of each), and how the model was built and ran; or with the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.errors import ConfigError
from lmms_stream.mds.dataset_config import DatasetConfig
from lmms_stream.processors import ProcessorConfig
from lmms_stream.signals import StopSignal
from lmms_stream.train.loop import Loop
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run.settings import TrainConfig
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

TIMEOUT_S = 120.0  # a rank may wait for another one that compiles


def run(name: str, case: dict[str, Any], dataset: str, folder: Path) -> dict[str, Any]:
    """The step of a case; what there is to tell of it."""
    world, _ = init_distributed(TIMEOUT_S)
    packing_length = case.get("packing_length", 128)
    data = DatasetConfig(
        remote=dataset, processor=ProcessorConfig(type="tokens"), packing_length=packing_length, num_canonical_nodes=4
    ).build(world)
    model = ModelConfig(**case["model"]).build()
    built_on = sorted({parameter.device.type for parameter in model.parameters()})
    if case.get("real"):  # whatever its values on other ranks
        torch.manual_seed(world.rank)
        model = type(model)(model.config) if world.rank else model
    if case.get("empty"):
        torch.nn.Module.to(model, "meta")
    if case.get("differing") and world.rank:
        model.model.norm.register_buffer("other", torch.zeros(3))
    settings: dict[str, Any] = {"output_dir": str(folder / name), "global_batch": 4, "max_steps": 1}
    settings |= {"num_workers": 0, "optim": "sgd"}  # whose step finds out little about shards
    args = TrainConfig(**{**settings, "max_grad_norm": 1e9, "timeout_s": TIMEOUT_S, **case.get("train", {})})
    if case.get("older_torch") and hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        del FSDPModule.set_reduce_scatter_unused_params
    trainer = FSDP2SFTTrainer(model=model, args=args, train_dataset=data)
    weights = {key: whole(value) for key, value in trainer.model.named_parameters()}
    held = {key: tuple(value.to_local().shape) for key, value in trainer.model.named_parameters()}  # type: ignore[attr-defined]
    gradients: dict[str, torch.Tensor] = {}

    def keep_gradients(*_: Any) -> None:
        for key, parameter in trainer.model.named_parameters():
            if parameter.grad is not None:
                gradients[key] = whole(parameter.grad)

    trainer.optimizer.register_step_pre_hook(keep_gradients)
    with StopSignal() as stop, trainer.run_log.running(trainer.schedule, step=0, position=0):
        trainer.model.train()
        batches = next(trainer.data.steps_of(iter(trainer.loader)))
        loop = Loop(trainer, stop)
        loop.train_step(batches)
        loop.log()
        loop.read()
    packs: list[list[list[int]]] = [[] for _ in range(world.world_size)]
    dist.all_gather_object(packs, [batch.sample_ids.tolist() for batch in batches])
    everywhere: list[list[str]] = [[] for _ in range(world.world_size)]
    dist.all_gather_object(everywhere, built_on)
    return {
        "weights": weights,
        "held": held,
        "gradients": gradients,
        "loss": read_log(folder / name)[-1]["loss"],
        "attention": trainer.model.model.config._attn_implementation,
        "packs": [pack for of_rank in packs[:: trainer.world.replication] for pack in of_rank],
        "built_on": everywhere,
        "grad_norm": read_log(folder / name)[-1]["grad_norm"],
        "logits_way": trainer.model.logits_way,
        "mesh": tuple(next(trainer.model.parameters()).device_mesh.shape),  # type: ignore[attr-defined]
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach().clone()


def main() -> None:
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    world, _ = init_distributed(TIMEOUT_S)
    for name, case in job["cases"].items():
        if world.world_size not in case["on"]:
            continue
        try:
            made = run(name, case, case.get("dataset") or job["dataset"], path.parent)
        except ConfigError as error:
            made = {"error": str(error)}
        torch.save(made, path.parent / f"{name}-{world.world_size}-{world.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
