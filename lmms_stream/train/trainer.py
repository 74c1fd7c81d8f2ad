"""Supervised fine-tuning with FSDP2 over packed batches."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..batch_maker import Collator
from ..collate import collate, join
from ..dataset import PackedStreamingDataset
from ..errors import TrainingError
from ..loader import PackedLoader
from ..types import Batch
from .attention import prove_packing
from .checkpoint import checkpoints, load_checkpoint, read_state, save_checkpoint
from .distributed import StopSignal, build_mesh, gather, init_distributed
from .evaluate import evaluate
from .model import PackedModel
from .schedules import build_schedule, parameter_groups
from .settings import Datasets, TrainConfig
from .sharding import compile_blocks, shard_model

LOG_NAME = "train_log.jsonl"
CHECKPOINTS_NAME = "checkpoints"


class StoppedError(TrainingError):
    """The run was told to stop by a signal, and has saved a checkpoint."""


class FSDP2SFTTrainer:
    """Trains a transformers causal language model on packed samples, sharded with FSDP2.

    The loss of a step is the sum of its token losses over its loss tokens, both over the global batch, so it
    does not depend on how packs fall to ranks. Resumes from the latest checkpoint below args.output_dir when
    there is one. Raises ConfigError, CheckpointError, CursorError, TrainingError, and StoppedError after a signal.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: TrainConfig,
        train_dataset: Datasets,
        eval_dataset: PackedStreamingDataset | None = None,
        data_collator: Collator = collate,
    ):
        self.args = args
        self.world, self.device = init_distributed(args.timeout_s, replication=args.replication)
        self.output_dir = Path(args.output_dir)
        self._eval_dataset = eval_dataset
        self._collator = data_collator
        self.loader = self._loader(train_dataset, weights=args.weights, max_epochs=args.max_epochs)
        self.sources = self.loader.sources
        packed = PackedModel(model)  # type: ignore[arg-type]
        trained_on = list(train_dataset.values()) if isinstance(train_dataset, Mapping) else [train_dataset]
        for dataset in trained_on + [eval_dataset] * (eval_dataset is not None):
            packed.check_processor(dataset.processor)
        self.model = self._shard(packed)
        groups = parameter_groups(self.model, weight_decay=args.weight_decay, decay_all=args.decay_all)
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            fused=True,
        )
        self.max_steps = self._max_steps()
        self.schedule = build_schedule(args, self.max_steps)
        self.step = self.tokens_seen = self.samples_seen = self.num_skipped_steps = 0

    def train(self) -> None:
        """Run to the end, resuming first when there is a checkpoint."""
        with StopSignal() as stop:
            try:
                self._resume()
                self.model.train()
                self._run(stop)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()

    def evaluate(self) -> float:
        """The loss over all of the eval_dataset: the mean over its loss tokens; all ranks call it."""
        assert self._eval_dataset is not None
        loader = self._loader(self._eval_dataset, global_batch=self.world.num_groups)
        return evaluate(self.model, loader, device=self.device, world=self.world)

    @property
    def is_finished(self) -> bool:
        position = self.schedule.position(step=self.step, tokens_seen=self.tokens_seen)
        return position >= self.schedule.length

    def _run(self, stop: StopSignal) -> None:
        while not self.is_finished:
            self._skip()
            if self.loader.packs_left == 0:
                raise TrainingError(f"the data ended at step {self.step}: raise max_epochs, or end the run there")
            for batches in self._steps():
                is_stopped = self._train_step(batches, stop)
                if is_stopped or self.is_finished or _is_due(self.step, self.args.save_steps):
                    self._save()
                if self._eval_dataset is not None and (self.is_finished or _is_due(self.step, self.args.eval_steps)):
                    self._write({"step": self.step, "eval_loss": self.evaluate()})
                if is_stopped:
                    raise StoppedError(f"told to stop by a signal: step {self.step} is saved, the same command goes on")
                if self.is_finished or self._skip():
                    break

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

    def _train_step(self, batches: list[Batch], stop: StopSignal) -> bool:
        """One update; whether a rank was told to stop."""
        started = time.monotonic()
        mine = [
            sum(batch.num_loss_tokens for batch in batches),
            sum(int(batch.cu_seqlens[len(batch.sample_ids)]) for batch in batches),
            sum(len(batch.sample_ids) for batch in batches),
            float(stop.received is not None),
        ]
        everyone = gather(mine, self.world.world_size)
        num_loss_tokens, num_tokens, num_samples, stopping = everyone.sum(dim=0).tolist()
        losses = self._accumulate(batches, num_loss_tokens / self.world.replication)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        learning_rate = self._update(float(grad_norm))
        self.step += 1
        self.tokens_seen += int(num_tokens) // self.world.replication
        self.samples_seen += int(num_samples) // self.world.replication
        summed = gather(losses.tolist(), self.world.world_size).sum(dim=0).tolist()
        self._log(
            batches,
            loss=sum(summed[: len(self.sources)]) / max(num_loss_tokens, 1),
            **self._source_losses(summed),
            learning_rate=learning_rate,
            grad_norm=float(grad_norm),
            num_tokens=int(num_tokens) // self.world.replication,
            num_loss_tokens=int(num_loss_tokens) // self.world.replication,
            tokens_seen=self.tokens_seen,
            samples_seen=self.samples_seen,
            num_skipped_steps=self.num_skipped_steps,
            seconds=time.monotonic() - started,
        )
        return bool(stopping > 0)

    def _accumulate(self, batches: list[Batch], num_loss_tokens: float) -> torch.Tensor:
        """Gradients of all batches; the sum of their losses by source, then how many they are: float64[2 * sources]."""
        totals = torch.zeros(2, len(self.sources), dtype=torch.float64, device=self.device)
        # FSDP averages gradients over ranks, of which `replication` have the same: times their number makes a sum.
        scale = self.world.num_groups / max(num_loss_tokens, 1)
        for start in range(0, len(batches), self.args.per_device_batch):
            together = batches[start : start + self.args.per_device_batch]
            joined = join(together)
            self.model.check(joined)
            losses, logs = self.model(joined.to(self.device))
            loss = losses.sum()
            total = loss + self.args.z_loss * logs.square().sum() if self.args.z_loss else loss
            (total * scale).backward()
            counts = [batch.num_loss_tokens for batch in together]
            for batch, of_batch in zip(together, losses.detach().split(counts), strict=True):
                source = self.sources.index(batch.source) if batch.num_loss_tokens else 0
                totals[0, source] += of_batch.double().sum()
                totals[1, source] += len(of_batch)
        return totals.flatten()

    def _update(self, grad_norm: float) -> float:
        """Take the step, or pass it over when a gradient is not finite; the learning rate."""
        position = self.schedule.position(step=self.step, tokens_seen=self.tokens_seen)
        learning_rate = self.args.learning_rate * self.schedule.factor(position)
        if grad_norm == grad_norm and abs(grad_norm) != float("inf"):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        else:
            self.num_skipped_steps += 1
            if self.num_skipped_steps > self.args.max_skipped_steps:
                raise TrainingError(
                    f"the gradient norm is {grad_norm} at step {self.step + 1}, the {self.num_skipped_steps}th time: "
                    "lower learning_rate, or raise max_skipped_steps"
                )
        self.optimizer.zero_grad()
        return learning_rate

    def _source_losses(self, summed: list[float]) -> dict[str, float]:
        """The loss of each source that the step has tokens of, where there are several."""
        if len(self.sources) == 1:
            return {}
        pairs = zip(self.sources, summed[: len(self.sources)], summed[len(self.sources) :], strict=True)
        return {f"loss/{source}": loss / count for source, loss, count in pairs if count}

    def _log(self, batches: list[Batch], **values: float) -> None:
        record: dict[str, Any] = {"step": self.step, **values}
        if self.args.log_sample_ids:
            mine = [(batch.source, int(sample_id)) for batch in batches for sample_id in batch.sample_ids]
            gathered: list[list[tuple[str, int]]] = [[] for _ in range(self.world.world_size)]
            dist.all_gather_object(gathered, mine)
            several = len(self.sources) > 1
            ids = sorted(sample for samples in gathered[:: self.world.replication] for sample in samples)
            record["sample_ids"] = [f"{source}:{i}" if several else i for source, i in ids]
        self._write(record)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self.world.rank == 0:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            with (self.output_dir / LOG_NAME).open("a") as log:
                log.write(json.dumps(record) + "\n")

    def _save(self) -> None:
        cursor = self.loader.state_dict()
        if self.loader.state_is_per_rank:
            cursors: list[dict[str, Any]] = [{} for _ in range(self.world.world_size)]
            dist.all_gather_object(cursors, cursor)
            cursor = PackedLoader.merge_states(cursors[:: self.world.replication])
        state = {
            "cursor": cursor,
            "tokens_seen": self.tokens_seen,
            "samples_seen": self.samples_seen,
            "num_skipped_steps": self.num_skipped_steps,
        }
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
        self.step = state["step"]
        self.tokens_seen = state["tokens_seen"]
        self.samples_seen = state["samples_seen"]
        self.num_skipped_steps = state["num_skipped_steps"]

    def _loader(self, dataset: Datasets, **options: Any) -> PackedLoader:
        return PackedLoader(
            dataset,
            **{"global_batch": self.args.global_batch, **options},
            world=self.world,
            num_workers=self.args.num_workers,
            pad_to=self.args.pad_to,
            pin_memory=self.device.type == "cuda",
            timeout_s=self.args.timeout_s,
            collator=self._collator,
        )

    def _max_steps(self) -> int | None:
        """None for a run that ends by tokens."""
        if self.args.num_train_epochs is not None:
            return self.loader.steps_of_epochs(self.args.num_train_epochs)
        return self.args.max_steps

    def _shard(self, model: PackedModel) -> PackedModel:
        mesh = build_mesh(self.device, world_size=self.world.world_size, shard_ranks=self.args.shard_ranks)
        shard_model(model, mesh, config=self.args, device=self.device)
        prove_packing(model, device=self.device, bf16=self.args.bf16)
        if self.args.torch_compile:
            compile_blocks(model)
        return model


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
