"""Supervised fine-tuning with FSDP2 over packed batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..errors import ConfigError, TrainingError
from ..loader.loader import PackedLoader
from ..loader.worker_end import is_of_worker_code
from ..mds.core import core_of
from ..signals import StopSignal
from ..types import Batch
from .checkpoint.saving import RunSaver
from .evaluate import EVAL_NAME, check_evaluated, evaluate
from .model.flops import model_flops
from .model.model import PackedModel
from .model.sharding import compile_blocks, shard_model
from .model.towers import family_of
from .report.meter import Meter
from .report.overlong import tell_overlong
from .report.run_log import RunLog
from .run.distributed import build_mesh, init_distributed, seed_step
from .run.optimizers import build_optimizer
from .run.schedules import Schedule, num_kept
from .run.settings import Datasets, TrainConfig
from .tasks.causal import CausalLanguageModelling
from .tasks.steps import TaskSteps
from .tasks.task import Task


class StoppedError(TrainingError):
    """The run was told to stop by a signal, and has saved a checkpoint."""


class FSDP2SFTTrainer:
    """Trains a transformers model on packed samples, sharded with FSDP2.

    The loss of a step is that of the task (default: causal language modelling, the sum of its token losses over its
    loss tokens), both sums over the global batch, so it does not depend on how packs fall to ranks. Resumes from the
    latest checkpoint below args.output_dir when there is one. Raises ConfigError, CheckpointError, CursorError,
    TrainingError, and StoppedError after a signal.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Any = None,
        task: Task | None = None,
        processing_class: Any = None,
        model_init: Callable[[], Any] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., Mapping[str, float]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], Mapping[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        peft_config: Any = None,
        formatting_func: Callable[..., Any] | None = None,
    ):
        if not isinstance(args, TrainConfig):
            raise ConfigError(f"args must be a TrainConfig, got {type(args).__name__}: make one of its settings")
        self.args = args
        self.task = task or CausalLanguageModelling(z_loss=args.z_loss)
        self.world, self.device = init_distributed(args.timeout_s, replication=args.replication)
        self.output_dir = Path(args.output_dir)
        self.log = RunLog(args, world=self.world)
        self._eval_dataset = eval_dataset
        self._collator = data_collator or self.task.collate
        self.loader = self._loader(train_dataset, weights=args.weights, max_epochs=args.max_epochs)
        self.sources = self.loader.sources
        self._tell_overlong(self.loader)
        if eval_dataset is not None:  # raise its errors now, not when the first evaluation is due
            eval_loader = self._eval_loader()
            check_evaluated(eval_loader)
            self._tell_overlong(eval_loader)
        trained_on = list(train_dataset.values()) if isinstance(train_dataset, Mapping) else [train_dataset]
        read = [core_of(each).processor for each in [*trained_on, *([] if eval_dataset is None else [eval_dataset])]]
        packed = PackedModel(model, family_of(read, model.config))
        for processor in read:
            packed.check_processor(processor)
        self.model = self._shard(packed)
        self.steps = TaskSteps(
            self.task,
            self.model,
            world=self.world,
            device=self.device,
            sources=self.sources,
            per_device_batch=args.per_device_batch,
        )
        self.meter = Meter(
            self.loader,
            objectives=self.steps.logged,
            world=self.world,
            device=self.device,
            flops=model_flops(self.model.model, tower=self.model.tower),
            peak=args.peak_tflops,
        )
        self.optimizer = build_optimizer(self.model.model, args)
        self.saver = RunSaver(self.model.model, self.optimizer, args, datasets=train_dataset)
        self.step = self.tokens_seen = self.samples_seen = self.num_skipped_steps = 0
        self.schedule = Schedule(args, self.optimizer, max_steps=self._max_steps())

    def train(self) -> None:
        """Run to the end, resuming first when there is a checkpoint."""
        with StopSignal() as stop:
            try:
                with self.saver:
                    self._resume()
                    self.model.train()
                    with self.log.running(self.schedule, step=self.step, position=self.position):
                        self.saver.probe()
                        self.meter.start()
                        self._run(stop)
                self.saver.export()
            except RuntimeError as error:  # torch's signal handler raises the death of a loader worker at any line
                if "DataLoader worker" not in str(error) or is_of_worker_code(error):
                    raise
                raise self.loader.worker_error(error) from error

    def evaluate(self) -> dict[str, float]:
        """The loss over all of the eval_dataset: the mean over its loss tokens; all ranks call it."""
        return evaluate(self.model, self._eval_loader(), self.steps, device=self.device, world=self.world)

    @property
    def position(self) -> int:
        """The position of the run in its schedule, in steps or tokens."""
        return self.schedule.position(step=self.step, tokens_seen=self.tokens_seen)

    @property
    def is_finished(self) -> bool:
        return self.position >= self.schedule.length

    def _run(self, stop: StopSignal) -> None:
        num_empty = 0
        while not self.is_finished:
            self._skip()
            if self.loader.packs_left == 0:
                raise TrainingError(f"the data ended at step {self.step}: raise max_epochs, or end the run there")
            before = self.loader.step
            for batches in self._steps():
                is_stopped = self._train_step(batches, stop)
                if is_stopped or self.is_finished or _is_due(self.step, self.args.save_steps):
                    with self.meter.aside():
                        self._save()
                if is_stopped:
                    self.saver.wait()
                    raise StoppedError(f"told to stop by a signal: step {self.step} is saved, the same command goes on")
                if self._eval_dataset is not None and (self.is_finished or _is_due(self.step, self.args.eval_steps)):
                    with self.meter.aside():
                        self._write({"step": self.step, **self.evaluate()})
                if self.is_finished or self._skip():
                    break
            num_empty = num_empty + 1 if self.loader.step == before else 0
            if num_empty == 2:
                raise TrainingError(
                    f"the loader gave no batch twice at step {self.step}, and has {self.loader.packs_left} packs left: "
                    "this is a defect of the loader; please report it with the cursor of the latest checkpoint"
                )

    def _skip(self) -> bool:
        """Pass over the packs of the next steps that are to be skipped; whether there were any."""
        skipped = False
        while any(first <= self.loader.step < stop for first, stop in self.args.skip_steps):
            self.loader.skip_steps(1)
            skipped = True
        return skipped

    def _steps(self) -> Iterator[list[Batch]]:
        """The batches of each step left in the epoch."""
        batches: list[Batch] = []
        for batch in self.meter.waiting(self.loader):
            batches.append(batch)
            if len(batches) == self.loader.micro_batches:
                yield batches
                batches = []

    def _train_step(self, batches: list[Batch], stop: StopSignal) -> bool:
        """Do one step; returns whether a rank was told to stop."""
        counts, units = self.meter.begin_step(
            batches, self.steps.units(batches), told_to_stop=stop.is_received, save_failed=self.saver.has_failed
        )
        if counts.num_failed_saves:
            self.saver.tell_failure()
        seed_step(self.args.seed, step=self.step, group=self.world.group)
        losses = self.steps.backward(batches, units)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        learning_rate = self.schedule.learning_rate
        self._update(float(grad_norm))
        self.step += 1
        self.tokens_seen += int(counts.num_tokens)
        self.samples_seen += int(counts.num_samples)
        self.schedule.move(self.position)
        of_logged = [count for each, count in zip(self.steps.objectives, units, strict=True) if each.is_logged]
        self.meter.end_step(losses, of_logged, grad_norm=float(grad_norm))
        self.log.end_step(self.position)
        is_stopped = counts.num_told_to_stop > 0
        is_last = is_stopped or self.is_finished
        if is_last or self.args.log_sample_ids or _is_due(self.step, self.args.logging_steps):
            self._log(batches, learning_rate)
        return is_stopped

    def _update(self, grad_norm: float) -> None:
        """Update the parameters, or leave them where a gradient is not finite."""
        if math.isfinite(grad_norm):
            self.optimizer.step()
        else:
            self.num_skipped_steps += 1
            if self.num_skipped_steps > self.args.max_skipped_steps:
                raise TrainingError(
                    f"the gradient norm is {grad_norm} at step {self.step + 1}, the {self.num_skipped_steps}th time: "
                    "lower learning_rate, or raise max_skipped_steps"
                )
        self.optimizer.zero_grad()

    def _log(self, batches: list[Batch], learning_rate: float) -> None:
        """Write the record of the steps since the last record. batches: of the latest step."""
        record: dict[str, Any] = {
            "step": self.step,
            **self.meter.record(),
            "learning_rate": learning_rate,
            "tokens_seen": self.tokens_seen,
            "samples_seen": self.samples_seen,
            "num_skipped_steps": self.num_skipped_steps,
        }
        if self.args.log_sample_ids:
            mine = [(batch.source, int(sample_id)) for batch in batches for sample_id in batch.sample_ids]
            gathered: list[list[tuple[str, int]]] = [[] for _ in range(self.world.world_size)]
            dist.all_gather_object(gathered, mine)
            several = len(self.sources) > 1
            ids = sorted(sample for samples in gathered[:: self.world.replication] for sample in samples)
            record["sample_ids"] = [f"{source}:{i}" if several else i for source, i in ids]
        self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        self.log.write(record, position=self.position)

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
        self.saver.save(self.step, state)

    def _resume(self) -> None:
        state = self.saver.resume(lambda state: self.loader.load_state_dict(state["cursor"]))
        if state is not None:
            self.step = state["step"]
            self.tokens_seen = state["tokens_seen"]
            self.samples_seen = state["samples_seen"]
            self.num_skipped_steps = state["num_skipped_steps"]
        if self.args.num_train_epochs is not None:  # the global batch or skipped steps may have changed
            self.schedule.set_length(self._max_steps() or 0)
        self.schedule.move(self.position)

    def _eval_loader(self) -> PackedLoader:
        assert self._eval_dataset is not None
        return self._loader({EVAL_NAME: self._eval_dataset}, global_batch=self.world.num_groups)

    def _tell_overlong(self, loader: PackedLoader) -> None:
        """Warn once of samples that are longer than a pack. (In lanes their number is not known beforehand.)"""
        if self.world.rank or loader.state_is_per_rank:
            return
        tell_overlong(loader.mixture.plans)

    def _loader(self, dataset: Datasets, **options: Any) -> PackedLoader:
        return PackedLoader(
            dataset,
            **{"global_batch": self.args.global_batch, **options},
            world=self.world,
            num_workers=self.args.num_workers,
            pad_to=self.args.pad_to,
            pin_memory=self.device.type == "cuda",
            timeout_s=self.args.timeout_s,
            start_method="server",
            collator=self._collator,
        )

    def _max_steps(self) -> int | None:
        """Steps to the end of the run, those that are done among them; None for a run that ends by tokens."""
        if self.args.num_train_epochs is None:
            return self.args.max_steps
        first = self.loader.step
        stop = first + self.loader.steps_to_epoch(self.args.num_train_epochs)
        return self.step + num_kept(first, stop, skipped=self.args.skip_steps)

    def _shard(self, model: PackedModel) -> PackedModel:
        args = self.args
        mesh = build_mesh(
            self.device, world_size=self.world.world_size, shard_ranks=args.shard_ranks, timeout_s=args.timeout_s
        )
        shard_model(model, mesh, config=self.args, device=self.device)
        self.task.check(model, device=self.device, bf16=args.bf16, is_compiled=False)
        if args.torch_compile:
            compile_blocks(model)
            self.task.check(model, device=self.device, bf16=args.bf16, is_compiled=True)
        return model


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
