"""LMMS Engine's trainer, its arguments, and the runner of a launch file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import transformers

from ...errors import ConfigError
from ..huggingface.arguments import LAUNCHED
from ..huggingface.table import check_refused
from ..huggingface.trainer import FSDP2SFTTrainer
from .launch.file import TRAINER_ARGS, trainer_values
from .launch.run import LaunchedTrainer, launched_trainer, read_launch

__all__ = ["FSDP2SFTTrainer", "TrainRunner", "TrainingArguments"]


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """Arguments of transformers and LMMS Engine, with LMMS Engine's defaults.

    Construction checks each argument: apply the argument, or warn why the argument has no effect, or raise ConfigError.
    """

    use_muon: bool | None = False
    freeze_modules: list[str] | None = None
    use_rmpad: bool | None = False
    fsdp2: bool | None = False
    group_by_length: bool | None = False
    reduce_dtype: str | None = "bfloat16"
    output_dtype: str | None = "bfloat16"
    print_batch_input_steps: int | None = -1
    enable_profiler: bool | None = False
    profiler_config: dict[str, Any] | None = None
    enable_memory_snapshot: bool | None = False
    memory_snapshot_config: dict[str, Any] | None = None
    enable_cuda_event_profiler: bool | None = False
    cuda_event_profiler_config: dict[str, Any] | None = None
    ep_degree: int | None = 1
    sp_ulysses_degree: int | None = 1
    tp_degree: int | None = 1
    ema_enabled: bool | None = False
    ema_decay: float | None = 0.9999
    ema_update_every: int | None = 1
    ema_start_step: int | None = 0
    ema_requires_grad_only: bool | None = True
    ema_param_filter: dict[str, Any] | None = None
    ema_resume_from_ema: bool | None = False
    eval_config: dict[str, Any] | None = None
    carbon_intensity: float | None = 0.475

    def __post_init__(self) -> None:
        fsdp: Any = self.__dict__["fsdp_config"]
        self.fsdp_config = None  # for FSDP2, not for transformers' own Trainer
        said = {name: getattr(self, name) for name in TRAINER_ARGS} | {"fsdp_config": fsdp}
        # dtypes have defaults without effect, and remove_unused_columns belongs to transformers
        said |= dict.fromkeys(("reduce_dtype", "output_dtype", "remove_unused_columns"))
        check_refused(vars(self), type(self), source="args.")  # before transformers reads the values
        super().__post_init__()
        setattr(self, LAUNCHED, trainer_values(said, source="TrainingArguments"))


class TrainRunner:
    """A run of a launch file. config: its sections as parsed from YAML; ConfigError for unsupported values.

    build() makes the dataset and the model; run() trains, and resumes from the latest checkpoint if there is one.
    """

    def __init__(self, config: Mapping[str, Any]):
        self._launch, self._arguments = read_launch(config, source="config")
        self._trainer: LaunchedTrainer | None = None

    @property
    def trainer(self) -> LaunchedTrainer:
        """The trainer; ConfigError before build()."""
        if self._trainer is None:
            raise ConfigError("the run is not built: call build() before")
        return self._trainer

    def build(self) -> None:
        self._trainer = launched_trainer(self._launch, self._arguments)
        self._trainer.build(None)

    def run(self) -> None:
        self.trainer.train()
