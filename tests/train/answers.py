"""Answers to compare, already tokenized: rows, a processor of them, and trainers whose model is not its reference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.mds.lengths import LengthIndex
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import Overlong, PackingConfig
from lmms_stream.processors.base import IGNORED_LABEL, processor_fingerprint
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.run.counts import Votes, agree
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run.settings import TrainConfig
from lmms_stream.train.tasks.task import Task
from lmms_stream.types import Processed, Sample
from streaming import MDSWriter
from torch.distributed.tensor import DTensor, distribute_tensor

VOCABULARY = 64
MODEL = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3,
}  # fmt: skip
REFERENCE = ModelConfig(config=MODEL, seed=0)
# Smaller weights predict answers that mean nothing better, so that KL is above 0.
TRAINED = ModelConfig(config=MODEL | {"initializer_range": 0.15}, seed=1)
_COLUMNS = ("input_ids", "prompts", "sequences")


class Row(NamedTuple):
    """A prompt and its answers, each with its role."""

    prompt: list[int]
    answers: list[list[int]]
    roles: list[int]


class AnswersProcessor:
    """Of rows that write_answers wrote."""

    columns = _COLUMNS
    schema = "preference"

    def __init__(self, objective: str = "dpo"):
        self.objective = objective
        self.description: Mapping[str, Any] = {"class": "AnswersProcessor", "objective": objective}

    def measure(self, sample: Sample) -> int:
        return len(sample["input_ids"])

    def process(self, sample: Sample) -> Processed:
        ids, sequences = sample["input_ids"].astype(np.int64), sample["sequences"].astype(np.int64)
        labels, start = ids.copy(), 0
        for (length, _), num_prompt in zip(sequences, sample["prompts"], strict=True):
            labels[start : start + num_prompt] = IGNORED_LABEL
            start += length
        return {"input_ids": ids, "labels": labels, "sequences": sequences}


def pairs(num: int, *, seed: int = 3) -> list[Row]:
    """Of lengths that differ; chosen answers have low tokens, rejected ones high tokens."""
    rng, half = np.random.default_rng(seed), VOCABULARY // 2
    return [
        Row(
            rng.integers(0, VOCABULARY, rng.integers(1, 9)).tolist(),
            [rng.integers(first, first + half, rng.integers(1, 12)).tolist() for first in (0, half)],
            [1, 0],
        )
        for _ in range(num)
    ]


def single_answers(num: int) -> list[Row]:
    """The chosen and the rejected answers of pairs, in turn."""
    return [Row(row.prompt, [row.answers[n % 2]], [row.roles[n % 2]]) for n, row in enumerate(pairs(num))]


def write_answers(folder: Path, rows: list[Row]) -> Path:
    """A dataset of them, with its lengths for a processor of either objective."""
    columns = dict.fromkeys(_COLUMNS, "ndarray:int32")
    lengths = []
    with MDSWriter(columns=columns, out=str(folder), hashes=["xxh3_64"], size_limit=1 << 12) as writer:
        for row in rows:
            sequences = [(len(row.prompt) + len(answer), role) for answer, role in zip(*row[1:], strict=True)]
            tokens = [token for answer in row.answers for token in row.prompt + answer]
            values = (tokens, [len(row.prompt)] * len(row.answers), sequences)
            writer.write({name: np.array(value, np.int32) for name, value in zip(_COLUMNS, values, strict=True)})
            lengths.append(len(tokens))
    for objective in ("dpo", "kto"):
        processor = AnswersProcessor(objective)
        LengthIndex.from_array(
            np.array(lengths, np.uint32),
            fingerprint=processor_fingerprint(processor),
            processor=processor.description,
        ).write(folder)
    return folder


def dataset_of(
    folder: Path,
    *,
    objective: str = "dpo",
    packing_length: int = 128,
    most: int | None = None,
    overlong: Overlong = "error",
) -> PackedStreamingDataset:
    """most: samples in one pack."""
    world, _ = init_distributed(120.0)
    return PackedStreamingDataset(
        folder, processor=AnswersProcessor(objective), world=world, order=OrderConfig(num_canonical_nodes=2),
        packing=PackingConfig(packing_length=packing_length, max_samples_per_pack=most, overlong=overlong),
    )  # fmt: skip


def trainer_of(folder: Path, task: Task | None = None, **options: Any) -> FSDP2SFTTrainer:
    """A trainer of the reference's weights on a dataset, or on answers below a folder; options: of its TrainConfig."""
    train_dataset = options.pop("train_dataset", None) or dataset_of(folder / "data")
    settings: dict[str, Any] = {
        "output_dir": str(folder / "run"), "global_batch": 4, "max_steps": 1, "num_workers": 0, "timeout_s": 120.0,
        "max_grad_norm": 1e9, "learning_rate": 1e-3, "eval_on_start": False,
    }  # fmt: skip
    given = {name: options.pop(name) for name in ("eval_dataset", "model") if name in options}
    return FSDP2SFTTrainer(
        **{"model": REFERENCE, **given}, args=TrainConfig(**settings | options), train_dataset=train_dataset, task=task
    )


def set_weights(trainer: FSDP2SFTTrainer, weights: Mapping[str, torch.Tensor]) -> None:
    """Give the sharded model of a trainer these weights, whole ones by their names."""
    with torch.no_grad():
        for name, parameter in trainer.model.model.named_parameters():
            assert isinstance(parameter, DTensor)
            parameter.copy_(distribute_tensor(weights[name], parameter.device_mesh, parameter.placements))


class Step(NamedTuple):
    """What a step gave: figures of the global batch by name, gradients by name, whole, and the order of its samples."""

    figures: dict[str, float]
    gradients: dict[str, torch.Tensor]
    sample_ids: list[int]


def one_step(trainer: FSDP2SFTTrainer) -> Step:
    """Gradients of the first step of a model that is no longer its reference; all ranks call it."""
    trainer.build(False)
    set_weights(trainer, whole_weights(TRAINED))
    packs = next(trainer.data.steps_of(iter(trainer.loader)))
    trainer.model.train()
    agreed = agree(Votes(0, 0, 0), trainer.steps.units(packs), trainer.meter.count(packs), world=trainer.world)
    trainer.meter.add(agreed.counts)
    losses = trainer.training_step(packs, agreed.units).cpu()
    trainer.meter.end_step(losses, trainer.steps.units_of_logged(agreed.units), grad_norm=0.0)
    named = ((name, each.grad) for name, each in trainer.model.model.named_parameters())
    gradients = {name: gradient.full_tensor() for name, gradient in named if isinstance(gradient, DTensor)}
    record = trainer.meter.end_record()()
    figures = {name: value for name, value in record.items() if name.startswith(("loss", "rewards/", "kl"))}
    return Step(figures, gradients, [number for pack in packs for number in pack.sample_ids.tolist()])


def whole_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    """The weights of a model, the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model: Any = config._build(None)
    return {name: each.detach() for name, each in model.named_parameters()}
