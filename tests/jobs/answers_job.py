"""A job on answers to compare: the first step of some tasks, or a run. Its arguments: steps FOLDER, or
run OUTPUT FOLDER REFERENCE.

Of `steps` rank 0 writes `steps-<world size>.pt` into the folder: the figures, gradients and samples of each of CASES.
The folder has the datasets "data", of pairs, and "kto".
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lmms_stream.plugins.tasks.dpo import DPO
from lmms_stream.plugins.tasks.kto import KTO

from tests.train.answers import dataset_of, one_step, trainer_of

CASES: dict[str, Any] = {
    "sigmoid": DPO(),
    "ipo": DPO(loss_type="ipo", beta=0.3),
    "hinge": DPO(loss_type="hinge", beta=0.05),
    "robust": DPO(loss_type="robust", label_smoothing=0.1),
    "stored": DPO(reference="stored"),
    "unpacked": DPO(),
    "kto": KTO(beta=0.2),
}


def steps(folder: Path) -> None:
    """The first step of each case, of packs that hold a few answers."""
    made, rank = {}, 0
    for name, task in CASES.items():
        data = dataset_of(
            folder / task.name.replace("dpo", "data"), objective=task.name, packing_length=64,
            most=1 if name == "unpacked" else None,
        )  # fmt: skip
        trainer = trainer_of(folder, task, train_dataset=data, global_batch=12, output_dir=str(folder / name))
        step, rank = one_step(trainer), trainer.world.rank
        made[name] = step._replace(sample_ids=of_all_ranks(step.sample_ids))
    if rank == 0:
        torch.save(made, folder / f"steps-{trainer.world.world_size}.pt")


def of_all_ranks(sample_ids: list[int]) -> list[int]:
    """Those of every rank's packs."""
    found: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, sample_ids)
    return [number for each in found for number in each]


def run(output: Path, folder: Path, reference: Any) -> None:
    """A run of some epochs, with a checkpoint of each step."""
    trainer_of(
        folder, DPO(reference=reference), train_dataset=dataset_of(folder / "data", packing_length=64),
        output_dir=str(output), max_steps=None, num_train_epochs=4, save_steps=1, learning_rate=3e-3, global_batch=4,
        log_sample_ids=True,
    ).train()  # fmt: skip


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    if kind == "steps":
        steps(Path(arguments[0]))
    else:
        run(Path(arguments[0]), Path(arguments[1]), arguments[2])
