"""What a trainer builds when it is first asked for: the model, and what goes on with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.optim.lr_scheduler import LRScheduler

from ..errors import ConfigError, LmmsStreamError
from ..loader.collate import join
from ..mds.core import core_of, opens_loader
from ..processors.base import processor_fingerprint
from ..types import Batch
from .checkpoint.saving import RunSaver
from .data import check_evaluated, eval_source
from .evaluate import check_text
from .model.accumulation import accumulation_of
from .model.flops import ImageFlops, ModelFlops, image_flops, model_flops
from .model.model import PackedModel
from .model.sharding import compile_blocks, freeze, shard_model
from .model.sharing import share_tokens
from .model.tensor_parallel import cut_heads_told
from .model.towers import family_of
from .protocol import Trainer
from .reference.frozen import FrozenWeights
from .reference.reference import Reference
from .reference.stored import StoredLogProbs, StoredReference, folder_of
from .report.meter import Compilations, Meter
from .run.distributed import cpu_group, gather
from .run.mesh import Meshes, build_meshes
from .run.optimizers import Average, names_of_parameters
from .run.precision import set_tf32
from .run.schedules import Schedule, num_kept
from .run.settings import Packed
from .tasks.preference import StepPasses
from .tasks.steps import TaskSteps


class Parts:
    """Parts of a trainer, each built once, of what the trainer creates. All ranks ask for them in the same order.

    create: gives the model that a run begins with.
    """

    def __init__(self, trainer: Trainer, create: Callable[[], torch.nn.Module]):
        self._trainer, self._create = trainer, create
        self.names: dict[int, str] = {}  # of parameters as they were before the model was sharded, by id
        self._image_flops: ImageFlops | None = None  # of a task whose units are images
        # Those that were made last: an overridden method may set them instead of returning them, and read them again.
        self.set_optimizer: torch.optim.Optimizer | None = None
        self.set_scheduler: LRScheduler | None = None
        self.empty: torch.nn.Module | None = None  # the model without weights, which a checkpoint will fill

    def build(self) -> None:
        """Build all, and those that others need first."""
        _ = (self.model, self.steps, self.meter, self.optimizer, self.saver, self.schedule)

    @cached_property
    def model(self) -> PackedModel:
        """The model that the trainer creates with its losses on packs, sharded."""
        trainer = self._trainer
        made: Any = self._create() if self.empty is None else self.empty
        processors = trainer.data.processors
        wrap = getattr(trainer.task, "wrap", None)  # see Task
        packed_model = getattr(trainer.task, "packed_model", PackedModel)
        packed = packed_model(made, family_of(processors, made.config)) if wrap is None else wrap(made)
        for processor in processors:
            packed.check_processor(processor)
        if trainer.functions.compute_metrics is not None:
            check_text(packed, "compute_metrics")
        self.names = names_of_parameters(packed)
        freeze(packed.model, trainer.config.frozen)
        if (run_one := getattr(trainer.task, "run_one", None)) is not None:
            self._image_flops = image_flops(packed.model, run_one)
        self._shard(packed)
        return packed

    def _shard(self, model: PackedModel) -> None:
        """Shard the model, and prove that it keeps samples apart, if it has its weights."""
        config, device = self._trainer.config, self._trainer.device
        set_tf32(config, device)
        share_tokens(model, self.meshes)
        shard_model(model, self.meshes, config=config, device=device, is_filled_later=self.empty is not None)
        if self.empty is None:
            self._prove(model)

    def begin_filled(self) -> None:
        """Go on with a model that a checkpoint has filled by now; all ranks call it."""
        if self.empty is not None:
            self.empty = None
            self._prove(self.model)

    def _prove(self, model: PackedModel) -> None:
        """Prove that a model keeps samples apart, once more where it is compiled."""
        config, task, device = self._trainer.config, self._trainer.task, self._trainer.device
        with cut_heads_told(config.tensor_parallel):
            task.check(model, device=device, bf16=bool(config.bf16), is_compiled=False)
        if config.torch_compile:
            compile_blocks(model)
            task.check(model, device=device, bf16=bool(config.bf16), is_compiled=True)

    @cached_property
    def meshes(self) -> Meshes:
        trainer = self._trainer
        return build_meshes(trainer.device, world_size=trainer.world.world_size, config=trainer.config)

    @cached_property
    def steps(self) -> TaskSteps:
        """The task on packs, with the losses that the trainer computes."""
        trainer, config = self._trainer, self._trainer.config
        accumulation = accumulation_of(
            self.model, config, device=trainer.device, world_size=trainer.world.world_size,
            num_micro_batches=-(-trainer.loader.micro_batches // config.per_device_batch),
        )  # fmt: skip
        return TaskSteps(
            trainer.task,
            self.model,
            device=trainer.device,
            sources=trainer.loader.sources,
            per_device_batch=config.per_device_batch,
            num_averaged=self.meshes.fsdp.size(),
            losses=trainer.compute_loss,
            between=lambda: trainer.callbacks.call("on_substep_end"),
            begin_pass=lambda is_last: accumulation.begin(is_last=is_last),
            seed=config.seed,
            phases=trainer.phases,
            reference=self.reference,
        )

    @cached_property
    def reference(self) -> Reference | None:
        """The starting weights, for a task that compares the model with them; ask for it before these change."""
        return reference_of(self._trainer, self.model)

    @cached_property
    def meter(self) -> Meter:
        trainer = self._trainer
        return Meter(
            trainer.loader,
            objectives=self.steps.logged,
            world=trainer.world,
            device=trainer.device,
            flops=self._flops,
            peak=trainer.config.peak_tflops,
            compilations=Compilations(tells=trainer.world.rank == 0) if trainer.config.torch_compile else None,
        )

    @property
    def _flops(self) -> ModelFlops | ImageFlops | None:
        """None for models whose arithmetic is not known here."""
        model: torch.nn.Module = self.model
        if not isinstance(model, PackedModel):
            return self._image_flops
        return model_flops(model.model, towers=model.towers)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        _ = self.model  # a create_optimizer may ask for it on some ranks only
        made = self._trainer.create_optimizer() or self.set_optimizer
        if made is None:
            raise ConfigError("create_optimizer made no optimizer: return it")
        self.set_optimizer = made
        return made

    @cached_property
    def saver(self) -> RunSaver:
        return RunSaver(
            self.model.model,
            self.optimizer,
            self._trainer.config,
            datasets=self._trainer.data.train_dataset,
            average=self.average,
        )

    @cached_property
    def average(self) -> Average | None:
        """Of the weights, where one is kept."""
        decay = self._trainer.config.ema_decay
        return None if decay is None else Average(self.model.model, decay=decay)

    @cached_property
    def schedule(self) -> Schedule:
        """Sets the learning rate, by the schedulers that the trainer creates."""
        return Schedule(self._trainer.config, self.optimizer, max_steps=self._max_steps(), create=self._new_scheduler)

    def _new_scheduler(self, length: int) -> LRScheduler:
        self.set_scheduler = None
        made = self._trainer.create_scheduler(length, self.optimizer) or self.set_scheduler
        if made is None:
            raise ConfigError("create_scheduler made no scheduler: return it")
        self.set_scheduler = made
        return made

    def set_length(self) -> None:
        """Have the schedule end where the run ends, after what is left of the data may have changed."""
        if self._trainer.config.num_train_epochs is not None:
            self.schedule.set_length(self._max_steps() or 0)
        self.schedule.move(self._trainer.position)

    def _max_steps(self) -> int | None:
        """Steps to the end of the run, those that are done among them; None for a run that ends by tokens."""
        config, loader = self._trainer.config, self._trainer.loader
        if config.num_train_epochs is None:
            return config.max_steps
        first = loader.step
        stop = first + loader.steps_to_epoch(config.num_train_epochs)
        return self._trainer.step + num_kept(first, stop, skipped=config.skip_steps)


class HasParts:
    """A trainer's parts by their names, each of which is built when it is first asked for."""

    parts: Parts

    @property
    def model(self) -> PackedModel:
        return self.parts.model

    @property
    def steps(self) -> TaskSteps:
        return self.parts.steps

    @property
    def meter(self) -> Meter:
        return self.parts.meter

    @property
    def saver(self) -> RunSaver:
        return self.parts.saver

    @property
    def average(self) -> Average | None:
        return self.parts.average

    @property
    def schedule(self) -> Schedule:
        return self.parts.schedule

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.parts.set_optimizer or self.parts.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.parts.set_optimizer = optimizer

    @property
    def lr_scheduler(self) -> LRScheduler:
        return self.parts.set_scheduler or self.parts.schedule.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: LRScheduler) -> None:
        self.parts.set_scheduler = scheduler


# The reference of a run's task: its starting weights, or what they gave to the answers of its datasets.

STEPS_AT_ONCE = 16  # packs of each rank that are measured before what they gave is kept
logger = logging.getLogger("lmms_stream")


def reference_of(trainer: Trainer, model: PackedModel) -> Reference | None:
    """None for a task that compares with none. All ranks call it, before the weights change.

    With a stored reference, what is not yet measured of the run's datasets is measured here.
    """
    kind = getattr(trainer.task, "reference", None)
    if kind is None:
        return None
    frozen = FrozenWeights(model, keeps=kind == "model")
    if kind == "model":
        return frozen
    datasets = {name: (name, each) for name, each in _training_datasets(trainer).items()}
    for name, each in trainer.data.evaluations.items():
        datasets[eval_source(name)] = (name, each)
    values = {source: _stored(trainer, frozen, each, name) for source, (name, each) in datasets.items()}
    return StoredReference(values, digest=frozen.digest)


def _training_datasets(trainer: Trainer) -> dict[str, Packed]:
    """The datasets that are trained on, by the names of their sources."""
    dataset: Any = trainer.data.train_dataset
    return dict(dataset) if isinstance(dataset, Mapping) else {trainer.loader.sources[0]: dataset}


def _stored(trainer: Trainer, frozen: FrozenWeights, dataset: Packed, name: str) -> NDArray[np.float32]:
    """The log-probabilities of a dataset's samples, which rank 0 reads or keeps; all ranks have them at the end."""
    if opens_loader(dataset):
        raise ConfigError(
            "a stored reference is of samples by their numbers, and this dataset has none: set the task's reference to "
            "model, or give a PackedStreamingDataset"
        )
    core: Any = core_of(dataset)  # type: ignore[arg-type]
    files = StoredLogProbs(
        folder=folder_of(core.storage, output_dir=Path(trainer.config.output_dir)),
        described={
            "weights": frozen.digest,
            "processor": processor_fingerprint(core.processor),
            "lengths": core.length_index().content_hash,
            "bf16": bool(trainer.config.bf16),
        },
        shape=(core.num_samples, trainer.task.num_answers),  # type: ignore[attr-defined]  # a PreferenceTask has it
    )
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            whole = files.read()
            told = [whole, files.begin() if whole is None else None]
        except (LmmsStreamError, OSError) as error:
            told = [error, None]
    dist.broadcast_object_list(told, src=0, group=cpu_group())
    whole, known = told
    if isinstance(whole, Exception):
        raise whole
    if whole is None:
        loader = trainer.data.eval_loader(name, dataset)
        check_evaluated(loader)
        whole = _measured(trainer, frozen, files, known=known, packs=loader)
    values: NDArray[np.float32] = whole
    return values


def _measured(
    trainer: Trainer,
    frozen: FrozenWeights,
    files: StoredLogProbs,
    *,
    known: NDArray[np.float32],
    packs: Iterable[Batch],
) -> NDArray[np.float32]:
    """Run the model on packs of a dataset, of which each rank has as many, but for those that are known.

    What they gave is kept every STEPS_AT_ONCE steps, where a run that is killed goes on.
    """
    is_first, world_size = trainer.world.rank == 0, trainer.world.world_size
    if is_first:
        count = int(np.isnan(known).any(axis=1).sum())
        logger.info("measuring %s samples by the reference's weights, kept at %s", f"{count:,}", files.path)
    mine: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []

    def keep() -> None:
        found: list[Any] = [None] * world_size
        dist.gather_object(mine, found if is_first else None, group=cpu_group())
        for of_rank in found[:: trainer.world.replication] if is_first else ():
            for sample_ids, values in of_rank:
                files.add(sample_ids, values)
        mine.clear()

    for step, pack in enumerate(packs, start=1):
        sample_ids = pack.sample_ids.numpy()
        is_new = bool(np.isnan(known[sample_ids]).any())
        if gather([float(is_new)], world_size).any():
            trainer.model.check_tokens(pack)
            (values,) = frozen.log_probs(StepPasses([[pack]], joined=join, device=trainer.device)).values()
            mine.append((sample_ids, values.float().cpu().numpy().reshape(len(sample_ids), known.shape[1])))
        if step % STEPS_AT_ONCE == 0:
            keep()
    keep()
    told: list[Any] = [files.end() if is_first else None]
    dist.broadcast_object_list(told, src=0, group=cpu_group())
    whole: NDArray[np.float32] = told[0]
    return whole
