"""A job: gradients of a step of several micro-batches, summed over ranks in each way, and the collectives of it.

Its argument is a folder, with the datasets "text", "short" and "media". There come `<case>-<rank>.pt`, each a list with
one item for each way: gradients, collectives, and whether each pack of the rank has media.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.train.model import loss
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.run.counts import Votes, agree
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run.settings import TrainConfig

from tests.rounds import LONG
from tests.train import vision
from tests.train.step_costs import collectives

from .divided_cases import EXPERTS
from .sharding_job import whole
from .test_sharding import LORA, SIZES, TIED

TIMEOUT_S = 60.0
UNTIED = {"config": {"model_type": "qwen2", **SIZES}, "seed": 3}
LOGITS_AT_ONCE = loss.LOGITS_AT_ONCE
WAYS: tuple[dict[str, Any], ...] = (
    {"fsdp": {"accumulate": "sharded"}},
    {"fsdp": {"accumulate": "unsharded"}},
    {"fsdp": {"accumulate": "unsharded", "reshard_after_forward": False, "prefetch_blocks": 2}},
)
GRADIENTS = {"micro_batches": 2, "is_counted": False}  # of cases of which no collectives are compared
CASES: dict[str, dict[str, Any]] = {
    "text": {"model": TIED},
    "untied": {"model": UNTIED, "logits_at_once": 1, "packing_length": 300},
    "auto": {"model": TIED, "ways": ({"fsdp": {"accumulate": "auto"}},)},
    "frozen": {"model": TIED, "train": {"frozen": ["lm_head.*", "*.layers.0.*"]}},
    "lora": {"model": LORA},
    "experts": {"model": EXPERTS, "data": "short", "packing_length": 8, **GRADIENTS},
    "copies": {"model": TIED, "train": {"shard_ranks": 1}, "ways": WAYS[:2]},
    "again": {"model": TIED, "train": {"gradient_checkpointing": True}, "ways": WAYS[1:]},
    "vision": {"model": None, "data": "media", "packing_length": 46, **GRADIENTS},
}
if not LONG:  # what stays gathered is tried on "text" alone
    CASES = {
        name: {"ways": WAYS[:2], **case} if name in ("experts", "vision") else case for name, case in CASES.items()
    }
    CASES = {name: case for name, case in CASES.items() if name not in ("frozen", "lora", "again")}
NUM_MICRO_BATCHES = 4


def run(case: dict[str, Any], way: dict[str, Any], folder: Path) -> dict[str, Any]:
    world, _ = init_distributed(TIMEOUT_S)
    loss.LOGITS_AT_ONCE = case.get("logits_at_once", LOGITS_AT_ONCE)
    model = vision.build("qwen2_5_vl") if case["model"] is None else ModelConfig(**case["model"]).build()
    processor = vision.Processor(model, "both") if case["model"] is None else TokensProcessor()
    dataset = PackedStreamingDataset(
        folder / case.get("data", "text"), processor=processor, world=world,
        packing=PackingConfig(packing_length=case.get("packing_length", 128)), order=OrderConfig(num_canonical_nodes=2),
    )  # fmt: skip
    num_packs = 2 * case.get("micro_batches", NUM_MICRO_BATCHES)
    settings = {"global_batch": num_packs, "max_steps": 1, "num_workers": 0, "timeout_s": TIMEOUT_S}
    args = TrainConfig(**{"output_dir": str(folder / "out"), **settings, **case.get("train", {}), **way})
    trainer = FSDP2SFTTrainer(model, args, dataset)
    trainer.build()
    trainer.model.train()
    batches = next(trainer.data.steps_of(iter(trainer.loader)))
    agreed = agree(Votes(0, 0, 0), trainer.steps.units(batches), trainer.meter.count(batches), world=trainer.world)
    trainer.meter.add(agreed.counts)
    inner = trainer.model.model
    is_summed: list[bool] = []  # the gradient of the head, as that of the embedding's output is known

    def listen(_: Any, __: Any, embeddings: torch.Tensor) -> None:
        embeddings.register_hook(lambda _: is_summed.append(inner.get_output_embeddings().weight.grad is not None))

    inner.get_input_embeddings().register_forward_hook(listen)
    counting: AbstractContextManager[Any] = collectives() if case.get("is_counted", True) else nullcontext({})
    with counting as counts:
        trainer.training_step(batches, agreed.units)
    kinds = ("reduce_scatter", "all_reduce", "all_gather")
    return {
        "gradients": {
            name: whole(value.grad) for name, value in trainer.model.named_parameters() if value.grad is not None
        },
        "collectives": {kind: counts[kind] for kind in kinds if counts},
        "is_summed": is_summed,
        "has_media": [bool(batch.inputs) for batch in batches],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    world, _ = init_distributed(TIMEOUT_S)
    for name, case in CASES.items():
        torch.save([run(case, way, folder) for way in case.get("ways", WAYS)], folder / f"{name}-{world.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
