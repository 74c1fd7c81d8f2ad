"""What the parts of a run see of its trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..loader.loader import PackedLoader
from ..types import Batch, World
from .checkpoint.saving import RunSaver
from .data import RunData
from .inputs import Functions
from .model.model import PackedModel
from .reference.reference import Reference
from .report.meter import Meter
from .report.run_log import RunLog
from .run.callbacks import Callbacks
from .run.counts import RunCounts
from .run.flow import Best
from .run.optimizers import Average
from .run.phases import Phases
from .run.schedules import Schedule
from .run.settings import TrainConfig
from .tasks.steps import TaskSteps
from .tasks.task import LossSum, Task


class HasEmpty(Protocol):
    """The parts of a trainer, see there."""

    empty: torch.nn.Module | None

    @property
    def reference(self) -> Reference | None: ...


class Trainer(Protocol):
    """See FSDP2SFTTrainer, which is one."""

    config: TrainConfig
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

    @property
    def parts(self) -> HasEmpty: ...
    @property
    def model(self) -> PackedModel: ...
    @property
    def steps(self) -> TaskSteps: ...
    @property
    def meter(self) -> Meter: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def saver(self) -> RunSaver: ...
    @property
    def average(self) -> Average | None: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def is_finished(self) -> bool: ...

    def set_length(self) -> None: ...
    def create_model(self) -> torch.nn.Module: ...
    def create_optimizer(self) -> torch.optim.Optimizer: ...
    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LRScheduler: ...
    def compute_loss(
        self, model: PackedModel, batch: Batch, packs: Sequence[Batch], units: Mapping[str, float]
    ) -> Mapping[str, LossSum]: ...
    def training_step(self, packs: Sequence[Batch], units: Sequence[float]) -> torch.Tensor: ...
    def evaluation_step(self, pack: Batch) -> Sequence[torch.Tensor]: ...
    def evaluate(self) -> dict[str, Any]: ...
    def log(self, logs: Mapping[str, Any], start_time: float | None = None) -> None: ...
    def is_local_process_zero(self) -> bool: ...
    def is_world_process_zero(self) -> bool: ...
