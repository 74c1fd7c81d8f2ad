"""A run of LMMS Engine's launch file: its arguments, and its trainer, which also logs LMMS Engine's metric names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from transformers import TrainingArguments

from ....errors import ConfigError
from ....mds.dataset_config import check_names
from ....train.report.metrics import engine_figures
from ....train.run.settings import Datasets, TrainConfig
from ....train.tasks.registry import build_task
from ....types import World
from ...huggingface.arguments import LAUNCHED, TrainerInputs, group_ranks
from ...huggingface.resolve import resolve
from ...huggingface.trainer import FSDP2SFTTrainer
from .file import Launch, launch_of

logger = logging.getLogger("lmms_stream")


GENERAL_TYPES = {"causal_lm": "AutoModelForCausalLM", "image_text_to_text": "AutoModelForImageTextToText"}


class LaunchedTrainer(FSDP2SFTTrainer):
    """FSDP2SFTTrainer whose records also have LMMS Engine's names."""

    def log(self, logs: Mapping[str, Any], start_time: float | None = None) -> None:
        figures = engine_figures(logs, pack_tokens=self.meter.pack_tokens, world_size=self.world.world_size)
        super().log({**logs, **figures}, start_time)


def read_launch(data: Mapping[str, Any], *, source: str) -> tuple[Launch, TrainingArguments]:
    """Return a launch file and its arguments; under torchrun's variables the arguments create the process group."""
    launch = _as_it_runs_here(launch_of(data, source=source))
    given = {"use_cpu": not torch.cuda.is_available(), **launch.arguments}
    try:
        arguments = TrainingArguments(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source}: trainer_args: {' '.join(str(error).split())}") from error
    setattr(arguments, LAUNCHED, launch.values)
    return launch, arguments


def _as_it_runs_here(launch: Launch) -> Launch:
    """Return the launch without unavailable accelerations; rank 0 logs them once."""
    arguments, model, without = dict(launch.arguments), launch.model, []
    has_gpu = torch.cuda.is_available() and not arguments.get("use_cpu")
    for name in ("bf16", "tf32"):
        if arguments.get(name) and not has_gpu:
            del arguments[name]
            without.append(name)
    if str(model.attention).startswith("flash_attention") and not (has_gpu and find_spec("flash_attn")):
        without.append(f"attn_implementation {model.attention} (the best that is here is taken)")
        model = replace(model, attention="auto")
    if model.use_liger_kernel and not (has_gpu and find_spec("liger_kernel")):
        without.append("Liger's kernels")
        arguments["use_liger_kernel"], model = False, replace(model, use_liger_kernel=False)
    if without and World.detect().rank == 0:
        lacks = "this machine lacks the package" if has_gpu else "there is no GPU"
        logger.warning("%s, so the run does without %s", lacks, "; ".join(without))
    return replace(launch, arguments=arguments, model=model)


def launched_trainer(launch: Launch, arguments: TrainingArguments) -> LaunchedTrainer:
    if launch.general_type is not None:
        check_names([launch.general_type], GENERAL_TYPES, "model_config: model_general_type")
        try:
            launch.model.check_auto_class(GENERAL_TYPES[launch.general_type])
        except ConfigError as error:
            raise ConfigError(
                f"model_config.model_general_type is {launch.general_type}: {error}: leave it out"
            ) from error
    options = dict(launch.task)
    return LaunchedTrainer(
        model=launch.model,
        args=arguments,
        train_dataset=launch.dataset,
        eval_dataset=launch.dataset.evaluated,
        task=build_task(options.pop("type"), options) if options else None,
    )


def planned_launch(data: Mapping[str, Any], *, source: str, world: World) -> tuple[TrainConfig, World, Datasets]:
    """Return the settings, ranks and datasets of a launch file's run on world's ranks, without starting the run."""
    launch, arguments = read_launch(data, source=source)
    ranks = group_ranks(arguments)
    if world.world_size % ranks:
        raise ConfigError(f"{source}: {ranks} ranks share their packs, of {world.world_size}: name a multiple of ranks")
    world = replace(world, replication=ranks)
    given = TrainerInputs(model=launch.model, args=arguments, train_dataset=launch.dataset)
    resolved = resolve(given, lambda *_, **__: world)
    assert resolved.train_dataset is not None  # set in `given`
    return resolved.config, world, resolved.train_dataset
