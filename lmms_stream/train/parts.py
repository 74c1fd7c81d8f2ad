"""The parts of a trainer, built at their first use, and methods for users to override."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from ..loader.loader import PackedLoader
from ..mds.core import core_of, opens_loader
from ..processors.base import processor_fingerprint
from ..registry import imported
from ..types import Batch, World
from .checkpoint.saving import RunOwner, RunSaver
from .data import RunData, check_evaluated, eval_source
from .inputs import Functions, RunInputs
from .model.build import ModelConfig
from .model.flops import ImageFlops, ModelFlops, image_flops, model_flops
from .model.model import PackedModel
from .model.sharding import accumulation_of, compile_blocks, freeze, shard_model
from .model.towers import check_text, family_of
from .report.metrics import Compilations, Meter
from .report.run_log import RunLog
from .run.callbacks import Callbacks
from .run.counts import RunCounts
from .run.distributed import cpu_group, from_rank_0, gather
from .run.flow import Best
from .run.mesh import Meshes, build_meshes
from .run.optimizers import Average, adopt_optimizer, build_optimizer, groups_of, names_of_parameters
from .run.phases import Phases, StoppedError
from .run.precision import set_tf32
from .run.schedules import Schedule, build_scheduler, num_kept
from .run.settings import Packed, TrainConfig
from .tasks.causal import losses_of_function
from .tasks.preference import StepPasses
from .tasks.reference import FrozenWeights, Reference, StoredLogProbs, StoredReference, folder_of, own_folder
from .tasks.steps import TaskSteps
from .tasks.task import LossSum, Task

Finish = Callable[[torch.nn.Module], torch.nn.Module]  # a built model -> the model to train


class TrainerParts:
    """Settings of a trainer, parts, each built at first use, and methods for users to override.

    All ranks use parts in the same order. The rest of a run (loop, evaluation, resuming) sees only this class.
    """

    config: TrainConfig
    inputs: RunInputs
    functions: Functions
    task: Task
    world: World
    device: torch.device
    data: RunData
    loader: PackedLoader
    counts: RunCounts
    best: Best
    callbacks: Callbacks
    run_log: RunLog
    phases: Phases
    evaluate: Callable[..., dict[str, float]]

    def __init__(self, finish_model: Finish) -> None:
        self._finish = finish_model
        self.owner = RunOwner(self.config)
        self.parameter_names: dict[int, str] = {}  # names before the model was sharded, by id of the parameter
        self.empty_model: torch.nn.Module | None = None  # a model without weights, which a checkpoint will fill
        self._image_flops: ImageFlops | None = None  # for tasks with images as units
        # Set by an overridden method that does not return an optimizer or scheduler, and may be read again.
        self._set_optimizer: torch.optim.Optimizer | None = None
        self._set_scheduler: LRScheduler | None = None

    def begin_model(self) -> torch.nn.Module:
        """Return the model at the beginning of a run."""
        return self.create_model()

    def build_parts(self) -> None:
        """Build all parts, in the order of their needs, with a vote after each."""
        for part in ("model", "steps", "meter", "_built_optimizer", "saver", "schedule"):
            getattr(self, part)
            self.phases.vote()

    @cached_property
    def model(self) -> PackedModel:
        """The created model with losses on packs, sharded."""
        made: Any = self.begin_model() if self.empty_model is None else self.empty_model
        processors = self.data.processors
        wrap = getattr(self.task, "wrap", None)  # see Task
        packed_model = getattr(self.task, "packed_model", PackedModel)
        packed = packed_model(made, family_of(processors, made.config)) if wrap is None else wrap(made)
        for processor in processors:
            packed.check_processor(processor)
        if wrap is None:
            packed.usual_lengths = self.data.usual_lengths
        if self.functions.compute_metrics is not None:
            check_text(packed, "compute_metrics")
        self.parameter_names = names_of_parameters(packed)
        freeze(packed.model, self.config.frozen)
        if (run_one := getattr(self.task, "run_one", None)) is not None:
            self._image_flops = image_flops(packed.model, run_one)
        self._shard(packed)
        return packed

    def _shard(self, model: PackedModel) -> None:
        """Shard the model. If weights are loaded, prove that the model keeps samples apart."""
        config, device = self.config, self.device
        set_tf32(config, device)
        if self.meshes.sp is not None:
            imported("plugins.parallel.sequence:share_tokens")(model, self.meshes)
        shard_model(
            model, self.meshes, config=config, device=device, is_filled_later=self.empty_model is not None,
            vote=self.phases.vote,
        )  # fmt: skip
        if self.empty_model is None:
            self._prove(model)

    def begin_filled(self) -> None:
        """Continue with a model filled by a checkpoint; all ranks call this."""
        if self.empty_model is not None:
            self.empty_model = None
            self._prove(self.model)

    def _prove(self, model: PackedModel) -> None:
        """Prove that a model keeps samples apart, before and after compiling."""
        config, task, device = self.config, self.task, self.device
        with self.phases.doing("prove"):
            self.phases.vote()
            with _cut_heads_told(config.tensor_parallel):
                task.check(model, device=device, bf16=bool(config.bf16), is_compiled=False)
            self.phases.vote()
            if config.torch_compile:
                compile_blocks(model)
                task.check(model, device=device, bf16=bool(config.bf16), is_compiled=True)

    @cached_property
    def meshes(self) -> Meshes:
        return build_meshes(self.device, world_size=self.world.world_size, config=self.config)

    @cached_property
    def steps(self) -> TaskSteps:
        """Runs the task on packs, with the trainer's compute_loss."""
        config = self.config
        accumulation = accumulation_of(
            self.model, config, device=self.device, world_size=self.world.world_size,
            num_micro_batches=-(-self.loader.micro_batches // config.per_device_batch),
        )  # fmt: skip
        return TaskSteps(
            self.task,
            self.model,
            device=self.device,
            sources=self.loader.sources,
            per_device_batch=config.per_device_batch,
            num_averaged=self.meshes.fsdp.size(),
            losses=self.compute_loss,
            between=lambda: self.callbacks.call("on_substep_end"),
            begin_pass=lambda is_last: accumulation.begin(is_last=is_last),
            seed=config.seed,
            phases=self.phases,
            reference=self.reference,
        )

    @cached_property
    def reference(self) -> Reference | None:
        """The starting weights, for a task with a reference; first used before any update."""
        return reference_of(self)

    @cached_property
    def meter(self) -> Meter:
        return Meter(
            self.loader,
            objectives=self.steps.logged,
            world=self.world,
            device=self.device,
            flops=self._flops,
            peak=self.config.peak_tflops,
            compilations=Compilations(tells=self.world.rank == 0) if self.config.torch_compile else None,
        )

    @property
    def _flops(self) -> ModelFlops | ImageFlops | None:
        """FLOPs of the model; None if unknown."""
        model: torch.nn.Module = self.model
        if not isinstance(model, PackedModel):
            return self._image_flops
        return model_flops(model.model, towers=model.towers)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._set_optimizer or self._built_optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._set_optimizer = optimizer

    @cached_property
    def _built_optimizer(self) -> torch.optim.Optimizer:
        _ = self.model  # built here on all ranks: create_optimizer may use the model on some ranks only
        optimizer = self.create_optimizer() or self._set_optimizer
        if optimizer is None:
            raise ConfigError("create_optimizer made no optimizer: return it")
        self._set_optimizer = optimizer
        return optimizer

    @cached_property
    def saver(self) -> RunSaver:
        return RunSaver(
            self.model.model,
            self._built_optimizer,
            self.config,
            datasets=self.data.train_dataset,
            average=self.average,
            owner=self.owner,
        )

    @cached_property
    def average(self) -> Average | None:
        """Moving average of the weights; None without ema_decay."""
        decay = self.config.ema_decay
        return None if decay is None else Average(self.model.model, decay=decay)

    @cached_property
    def schedule(self) -> Schedule:
        """Schedule of the learning rate, by the created scheduler."""
        return Schedule(self.config, self._built_optimizer, max_steps=self._max_steps(), create=self._new_scheduler)

    @property
    def lr_scheduler(self) -> LRScheduler:
        return self._set_scheduler or self.schedule.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: LRScheduler) -> None:
        self._set_scheduler = scheduler

    def _new_scheduler(self, length: int) -> LRScheduler:
        self._set_scheduler = None
        scheduler = self.create_scheduler(length, self._built_optimizer) or self._set_scheduler
        if scheduler is None:
            raise ConfigError("create_scheduler made no scheduler: return it")
        self._set_scheduler = scheduler
        return scheduler

    def set_length(self) -> None:
        """Recompute the length of the schedule, after the remaining data may have changed."""
        if self.config.num_train_epochs is not None:
            self.schedule.set_length(self._max_steps() or 0)
        self.schedule.move(self.position)

    def _max_steps(self) -> int | None:
        """Return the steps of the whole run, with finished steps; None for a run with max_tokens."""
        config, loader = self.config, self.loader
        if config.num_train_epochs is None:
            return config.max_steps
        first = loader.step
        stop = first + loader.steps_to_epoch(config.num_train_epochs)
        return self.step + num_kept(first, stop, skipped=config.skip_steps)

    # Methods that users override; the trainer calls each.

    def create_model(self) -> torch.nn.Module:
        """Return the transformers model to train, unsharded: only the weights of rank 0 count."""
        given, init = self.inputs.model, self.functions.model_init
        if init is not None:
            given = init() if not inspect.signature(init).parameters else init(None)  # None: no trial of a search
        made: Any = given.build() if isinstance(given, ModelConfig) else given
        return self._finish(made)

    def create_optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer over parameters of the sharded self.model."""
        config, (given, _), chosen = self.config, self.functions.optimizers, self.functions.optimizer_cls_and_kwargs
        if given is not None:
            return adopt_optimizer(given, self.parameter_names, self.model)
        if chosen is None:
            return build_optimizer(self.model.model, config)
        kind, options = chosen
        return kind(groups_of(self.model.model, config), **options)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """Return torch's scheduler of a run of num_training_steps (tokens, with max_tokens), stepped after each step.

        A resumed run creates a new scheduler, stepped to the run's position: the state is not saved.
        """
        given = self.functions.optimizers[1]
        return given or build_scheduler(self.config, optimizer or self.optimizer, num_training_steps)

    def compute_loss(
        self, model: PackedModel, batch: Batch, packs: Sequence[Batch], units: Mapping[str, float]
    ) -> Mapping[str, LossSum]:
        """Return the losses of each objective of the task: the differentiable total over packs, and sums by pack.

        batch: the packs joined to a sequence, on the device. units: of each objective in the global batch (in an
        evaluation: in this pack); the trainer divides totals by these units afterwards.
        """
        function = self.functions.compute_loss_func
        if function is not None:
            return losses_of_function(function, model, batch, packs, units)
        return self.steps.task_losses(model, batch, packs)

    def training_step(self, packs: Sequence[Batch], units: Sequence[float]) -> torch.Tensor:
        """Sum the gradients of this rank's packs of a step. units: of each objective in the global batch.

        Return, for each logged objective, the losses by source, then their units: float64[logged, 2, sources].
        """
        return self.steps.backward(packs, units)

    def evaluation_step(self, pack: Batch) -> Sequence[torch.Tensor]:
        """Return the summed losses of a pack for each logged objective: float64[] each."""
        return self.steps.forward(pack)

    def log(self, logs: Mapping[str, Any], start_time: float | None = None) -> None:
        """Write a record, and pass the record to callbacks; a script may log other figures on any rank.

        Outside of `train` only callbacks get these figures.
        """
        record = {"step": self.step, **logs}
        self.run_log.write(record, position=self.position)
        epochs = [value for name, value in record.items() if name.startswith("epoch/")]
        self.callbacks.log({"epoch": min(epochs, default=self.data.epoch), **record})

    # The position of the run.

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.counts.step

    @property
    def position(self) -> int:
        """The position of the run in the schedule, in steps or tokens."""
        return self.schedule.position(step=self.counts.step, tokens_seen=self.counts.tokens_seen)

    @property
    def is_finished(self) -> bool:
        return self.position >= self.schedule.length

    @property
    def max_steps(self) -> int:
        """Steps of the whole run; 0 if unknown: before the schedule is built, and with max_tokens."""
        schedule: Schedule | None = vars(self).get("schedule")
        return 0 if schedule is None or schedule.counts_tokens else schedule.length

    def is_world_process_zero(self) -> bool:
        return self.world.rank == 0

    def is_local_process_zero(self) -> bool:
        return self.world.is_first_of_node


# The reference of a run's task: its starting weights, or their stored log-probabilities of the datasets' answers.

STEPS_AT_ONCE = 16  # packs of each rank to measure between two writes
logger = logging.getLogger("lmms_stream")


def reference_of(trainer: TrainerParts) -> Reference | None:
    """Return the reference of a trainer's task, or None. All ranks call this, before any update.

    With a stored reference, samples without stored values are measured here.
    """
    kind = getattr(trainer.task, "reference", None)
    if kind is None:
        return None
    if kind != "model" and trainer.config.mixing == "samples":
        raise ConfigError(
            "a stored reference is kept by dataset, and mixing: samples has one of all datasets: set the task's "
            "reference to model, or take mixing: packs"
        )
    frozen = FrozenWeights(trainer.model, keeps=kind == "model", vote=trainer.phases.vote)
    if kind == "model":
        return frozen
    dataset: Any = trainer.data.train_dataset
    named = dict(dataset) if isinstance(dataset, Mapping) else {trainer.loader.sources[0]: dataset}
    datasets = {name: (name, each) for name, each in named.items()}
    for name, each in trainer.data.evaluations.items():
        datasets[eval_source(name)] = (name, each)
    values = {source: _stored(trainer, frozen, each, name) for source, (name, each) in datasets.items()}
    return StoredReference(values, digest=frozen.digest)


def _stored(trainer: TrainerParts, frozen: FrozenWeights, dataset: Packed, name: str) -> NDArray[np.float32]:
    """Return the log-probabilities of a dataset's samples on all ranks; rank 0 reads and writes their files."""
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
            "dataset": core.identity,
            "bf16": bool(trainer.config.bf16),
        },
        shape=(core.num_samples, trainer.task.num_answers),  # type: ignore[attr-defined]  # a PreferenceTask has it
    )
    told: tuple[Any, Any] = (None, None)
    with ExitStack() as held:
        if dist.get_rank() == 0:
            try:
                whole = files.read()
                if whole is None:
                    files = held.enter_context(files.owned(own_folder(Path(trainer.config.output_dir))))
                    whole = files.read()  # another run may have just measured them
                told = whole, files.begin() if whole is None else None
            except (LmmsStreamError, OSError) as error:
                told = error, None
        whole, known = from_rank_0(told)
        if isinstance(whole, Exception):
            raise whole
        if whole is None:
            loader = trainer.data.eval_loader(name, dataset)
            check_evaluated(loader)
            with trainer.phases.doing("measure"):
                whole = _measured(trainer, frozen, files, known=known, packs=loader)
    values: NDArray[np.float32] = whole
    return values


def _measured(
    trainer: TrainerParts,
    frozen: FrozenWeights,
    files: StoredLogProbs,
    *,
    known: NDArray[np.float32],
    packs: PackedLoader,
) -> NDArray[np.float32]:
    """Run the model on packs of a dataset with unknown samples; each rank has equally many packs.

    Results are written every STEPS_AT_ONCE steps, and before a stop: a killed run resumes there.
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

    each_pack = trainer.phases.each_pack(packs, num_packs=len(packs), name=f"measuring {files.path.stem}")
    try:
        for step, pack in enumerate(each_pack, start=1):
            sample_ids = pack.sample_ids.numpy()
            is_new = bool(np.isnan(known[sample_ids]).any())
            if gather([float(is_new)], world_size).any():
                trainer.model.check_tokens(pack)
                (values,) = frozen.log_probs(StepPasses([[pack]], joined=join, device=trainer.device)).values()
                mine.append((sample_ids, values.float().cpu().numpy().reshape(len(sample_ids), known.shape[1])))
            if step % STEPS_AT_ONCE == 0:
                keep()
    except StoppedError:  # raised on all ranks
        keep()
        raise
    keep()
    whole = from_rank_0(files.end() if is_first else None)
    assert whole is not None
    return whole


@contextmanager
def _cut_heads_told(degree: int) -> Iterator[None]:
    """Add to an error of the proof that the model's heads are split over ranks, if degree is above 1."""
    try:
        yield
    except ConfigError as error:
        if degree == 1:
            raise
        raise ConfigError(
            f"{error}. train.tensor_parallel {degree} cuts its heads, which some models' code does not support: it may "
            "run with 1"
        ) from error
