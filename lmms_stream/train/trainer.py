"""Supervised fine-tuning with FSDP2 over packed batches."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import get_scheduler

from ..batch_maker import Collator
from ..collate import collate
from ..dataset import PackedStreamingDataset
from ..dataset_config import DatasetConfig
from ..errors import ConfigError, TrainingError
from ..loader import PackedLoader
from ..types import Batch, World
from .checkpoint import checkpoints, load_checkpoint, read_state, save_checkpoint
from .loss import token_loss_sum
from .model import ModelConfig, blocks_to_shard, packed_logits

Datasets = PackedStreamingDataset | Mapping[str, PackedStreamingDataset]

LOG_NAME = "train_log.jsonl"
CHECKPOINTS_NAME = "checkpoints"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How to train. global_batch counts packs per optimizer step, over all ranks.

    Exactly one of max_steps and num_train_epochs. weights and max_epochs mix several datasets (see Mixture); weights
    are shares of the tokens by dataset, or a schedule of them by first step. skip_steps: steps [first, stop) whose
    packs are passed over, around a spike of the loss. save_steps: steps between checkpoints, 0 for one at the end only.
    log_sample_ids: write the sample ids of each global batch to the log, to compare runs.
    """

    output_dir: str
    global_batch: int
    weights: dict[int, dict[str, float]] | dict[str, float] | None = None
    max_epochs: dict[str, int] | None = None
    skip_steps: list[tuple[int, int]] = field(default_factory=list)
    max_steps: int | None = None
    num_train_epochs: int | None = None
    learning_rate: float = 2e-5
    lr_scheduler_type: str = "cosine"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    bf16: bool = False
    save_steps: int = 0
    save_total_limit: int | None = None
    num_workers: int = 1
    pad_to: int | None = None
    timeout_s: float = 600.0
    log_sample_ids: bool = False

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.num_train_epochs is None):
            raise ConfigError("train needs exactly one of max_steps and num_train_epochs")
        if self.weights is not None and self.num_train_epochs is not None:
            raise ConfigError("with train.weights each dataset has epochs of its own: set train.max_steps")
        for first, stop in self.skip_steps:
            if not 0 <= first < stop:
                raise ConfigError(f"train.skip_steps must be ranges [first, stop), got [{first}, {stop}]")
        for name in ("global_batch", "max_steps", "num_train_epochs", "save_total_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"train.{name} must be at least 1, got {value}")
        for name in ("save_steps", "num_workers", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"train.{name} must be 0 or more, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A training run as one YAML file, with one dataset or several by name."""

    dataset: DatasetConfig | None = None
    datasets: dict[str, DatasetConfig] = field(default_factory=dict)
    model: ModelConfig
    train: TrainConfig

    def __post_init__(self) -> None:
        if (self.dataset is None) == (not self.datasets):
            raise ConfigError("a run needs exactly one of dataset and datasets")

    def build_datasets(self, world: World) -> Datasets:
        if self.dataset is not None:
            return self.dataset.build(world)
        return {name: config.build(world) for name, config in self.datasets.items()}


def init_distributed(timeout_s: float) -> tuple[World, torch.device]:
    """Join torchrun's process group (or make one of this process alone): nccl with CUDA, else gloo."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        options: dict[str, Any] = {}
        if "RANK" not in os.environ:
            options = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
        backend: Literal["cpu:gloo,cuda:nccl", "gloo"] = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s), **options)
    world_size = dist.get_world_size()
    num_nodes = world_size // int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    return World(rank=dist.get_rank(), world_size=world_size, num_nodes=num_nodes), device


class FSDP2SFTTrainer:
    """Trains a transformers causal language model on packed samples, sharded with FSDP2.

    The loss of a step is the sum of its token losses over its loss tokens, both over the global batch, so it
    does not depend on how packs fall to ranks. Resumes from the latest checkpoint below args.output_dir when
    there is one. Raises ConfigError, CheckpointError, CursorError, TrainingError.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: TrainConfig,
        train_dataset: Datasets,
        data_collator: Collator = collate,
    ):
        self.args = args
        self.world, self.device = init_distributed(args.timeout_s)
        self.output_dir = Path(args.output_dir)
        self.loader = PackedLoader(
            train_dataset,
            global_batch=args.global_batch,
            weights=args.weights,
            max_epochs=args.max_epochs,
            world=self.world,
            num_workers=args.num_workers,
            pad_to=args.pad_to,
            pin_memory=self.device.type == "cuda",
            timeout_s=args.timeout_s,
            collator=data_collator,
        )
        self.model = self._shard(model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay
        )
        self.max_steps = args.max_steps or self.loader.steps_of_epochs(args.num_train_epochs or 0)
        self.scheduler = get_scheduler(
            args.lr_scheduler_type, self.optimizer, args.warmup_steps, num_training_steps=self.max_steps
        )
        self.step = 0

    def train(self) -> None:
        """Run to the last step, resuming first when there is a checkpoint."""
        self._resume()
        self.model.train()
        try:
            while self.step < self.max_steps:
                self._skip()
                if self.loader.packs_left == 0:
                    raise TrainingError(f"the data ended at step {self.step} of {self.max_steps}: raise max_epochs")
                for batches in self._steps():
                    self._train_step(batches)
                    if self._is_save_step():
                        self._save()
                    if self.step == self.max_steps or self._skip():
                        break
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _skip(self) -> bool:
        """Pass over the packs of the next step if it is to be skipped, again and again; whether any was."""
        skipped = False
        while any(first <= self.loader.step < stop for first, stop in self.args.skip_steps):
            self.loader.skip_steps(1)
            skipped = True
        return skipped

    def _steps(self) -> Iterator[list[Batch]]:
        """The batches of each step left in the epoch."""
        batches: list[Batch] = []
        for batch in self.loader:
            batches.append(batch)
            if len(batches) == self.loader.micro_batches:
                yield batches
                batches = []

    def _train_step(self, batches: list[Batch]) -> None:
        started = time.monotonic()
        counts = torch.tensor(
            [sum(b.num_loss_tokens for b in batches), sum(b.num_tokens for b in batches)], dtype=torch.float64
        )
        dist.all_reduce(counts)
        num_loss_tokens, num_tokens = (int(count) for count in counts)
        loss_sum = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            on_device = batch.to(self.device)
            logits = packed_logits(self.model, on_device.input_ids, on_device.position_ids)
            loss = token_loss_sum(logits, on_device.labels)
            # FSDP averages gradients over ranks: times world_size makes that the sum.
            (loss * (self.world.world_size / max(num_loss_tokens, 1))).backward()
            loss_sum += loss.detach().double().cpu()
        dist.all_reduce(loss_sum)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        if not torch.isfinite(grad_norm):
            raise TrainingError(f"the gradient norm is {grad_norm.item()} at step {self.step + 1}: lower learning_rate")
        learning_rate = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        self._log(
            batches,
            loss=float(loss_sum) / max(num_loss_tokens, 1),
            learning_rate=learning_rate,
            grad_norm=float(grad_norm),
            num_tokens=num_tokens,
            num_loss_tokens=num_loss_tokens,
            seconds=time.monotonic() - started,
        )

    def _log(self, batches: list[Batch], **values: float) -> None:
        record: dict[str, Any] = {"step": self.step, **values}
        if self.args.log_sample_ids:
            mine = [(batch.source, int(sample_id)) for batch in batches for sample_id in batch.sample_ids]
            gathered: list[list[tuple[str, int]]] = [[] for _ in range(self.world.world_size)]
            dist.all_gather_object(gathered, mine)
            several = len(self.loader.sources) > 1
            ids = sorted(sample for samples in gathered for sample in samples)
            record["sample_ids"] = [f"{source}:{i}" if several else i for source, i in ids]
        if self.world.rank == 0:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            with (self.output_dir / LOG_NAME).open("a") as log:
                log.write(json.dumps(record) + "\n")

    def _is_save_step(self) -> bool:
        every = self.args.save_steps
        return self.step == self.max_steps or (every > 0 and self.step % every == 0)

    def _save(self) -> None:
        cursor = self.loader.state_dict()
        if self.loader.state_is_per_rank:
            cursors: list[dict[str, Any]] = [{} for _ in range(self.world.world_size)]
            dist.all_gather_object(cursors, cursor)
            cursor = PackedLoader.merge_states(cursors)
        state = {"cursor": cursor, "scheduler": self.scheduler.state_dict()}
        save_checkpoint(
            self.output_dir / CHECKPOINTS_NAME,
            self.model,
            self.optimizer,
            step=self.step,
            state=state,
            keep=self.args.save_total_limit,
        )

    def _resume(self) -> None:
        found = checkpoints(self.output_dir / CHECKPOINTS_NAME)
        if not found:
            return
        state = read_state(found[-1])
        self.loader.load_state_dict(state["cursor"])
        load_checkpoint(found[-1], self.model, self.optimizer)
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]

    def _shard(self, model: torch.nn.Module) -> torch.nn.Module:
        mesh = init_device_mesh(self.device.type, (self.world.world_size,))
        dtype = torch.bfloat16 if self.args.bf16 else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        model.to(self.device)
        for block in blocks_to_shard(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
