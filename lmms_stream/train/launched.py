"""A run that LMMS Engine's launch file describes: its arguments, and its trainer, which logs by their names too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import TrainingArguments

from ..errors import ConfigError
from ..types import World
from .habits.arguments import LAUNCHED, group_ranks
from .habits.given import Given
from .habits.launch_file import Launch, launch_of
from .habits.resolve import resolve
from .report.engine_figures import engine_figures
from .run.settings import Datasets, TrainConfig
from .trainer import FSDP2SFTTrainer


class LaunchedTrainer(FSDP2SFTTrainer):
    """FSDP2SFTTrainer whose records also have LMMS Engine's names."""

    def log(self, record: Mapping[str, Any]) -> None:
        figures = engine_figures(record, pack_tokens=self.meter.pack_tokens, world_size=self.world.world_size)
        super().log({**record, **figures})


def read_launch(data: Mapping[str, Any], *, source: str) -> tuple[Launch, TrainingArguments]:
    """A launch file, and its arguments; under torchrun's variables these make the process group."""
    launch = launch_of(data, source=source)
    given = {"use_cpu": not torch.cuda.is_available(), **launch.arguments}
    try:
        arguments = TrainingArguments(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source}: trainer_args: {' '.join(str(error).split())}") from error
    setattr(arguments, LAUNCHED, launch.values)
    return launch, arguments


def launched_trainer(launch: Launch, arguments: TrainingArguments) -> LaunchedTrainer:
    return LaunchedTrainer(
        model=launch.model, args=arguments, train_dataset=launch.dataset, eval_dataset=launch.dataset.evaluated
    )


def planned_launch(data: Mapping[str, Any], *, source: str, world: World) -> tuple[TrainConfig, World, Datasets]:
    """The settings, ranks and datasets of a launch file's run on so many ranks, which is not begun."""
    launch, arguments = read_launch(data, source=source)
    ranks = group_ranks(arguments)
    if world.world_size % ranks:
        raise ConfigError(f"{source}: {ranks} ranks share their packs, of {world.world_size}: name a multiple of ranks")
    world = replace(world, replication=ranks)
    given = Given(model=launch.model, args=arguments, train_dataset=launch.dataset)
    resolved = resolve(given, lambda *_, **__: world)
    assert resolved.train_dataset is not None  # it was given
    return resolved.config, world, resolved.train_dataset
