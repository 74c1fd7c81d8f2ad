"""Arguments of a trainer in the forms of transformers and TRL -> the inputs of a run. All ranks call it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import transformers

from ...errors import ConfigError
from ...extras import need
from ...mds.core import core_of, gives_packs, opens_loader
from ...mds.dataset_config import DatasetConfig
from ...train.inputs import RunInputs
from ...train.run.settings import Datasets, TrainConfig
from ...types import World
from .arguments import TrainerInputs, arguments_of, device_batch, group_ranks, option, train_config, unwritten_reports
from .collators import adapted
from .data import GivenData, open_config, with_processor_of
from .models import attention_of, check_quantization, model_of, name_of
from .table import check, check_numbers

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger("lmms_stream")


def resolve(given: TrainerInputs, world_of: Callable[..., World]) -> RunInputs:
    """Return the inputs of a run. world_of: creates or joins the process group, with timeout_s and replication.

    Raises ConfigError for unsupported arguments, and the errors of a conversion.
    """
    check_quantization(given.quantization_config)
    if isinstance(given.args, TrainConfig):
        return _of_config(given, world_of)
    arguments = _arguments(given)
    check_numbers(arguments)
    world = world_of(float(arguments.ddp_timeout), replication=group_ranks(arguments))
    check(arguments, tells=world.rank == 0)
    unwritten = unwritten_reports(arguments)
    if unwritten and world.rank == 0:
        logger.warning(
            "args.report_to has %s, which nothing is written to here: give the trainer transformers' callback of it",
            ", ".join(unwritten),
        )
    model = model_of(given.model, arguments, given.peft_config)
    data = GivenData(given, arguments, world)
    train, evaluated = data.datasets()
    packs_batches = given.objective == "kto"
    per_rank = arguments.gradient_accumulation_steps * (1 if packs_batches else device_batch(arguments, world))
    config = train_config(
        arguments,
        world=world,
        steps_of=lambda epochs: _steps_of(train, epochs, per_rank, world),
        attention=attention_of(model),
        packs_batches=packs_batches,
    )
    transformers.utils.logging.set_verbosity(arguments.get_process_log_level())
    if arguments.full_determinism:
        from transformers import enable_full_determinism

        enable_full_determinism(arguments.seed)
    return RunInputs(
        config=config,
        arguments=arguments,
        model=model,
        train_dataset=train,
        eval_dataset=evaluated,
        data_collator=None if given.data_collator is None else adapted(given.data_collator),
        processing_class=data.processing_class,
        token_ids=data.token_ids(),
        has_dropout=given.objective is None or not option(arguments, "disable_dropout"),
        open_rows=data.open_rows,
    )


def _arguments(given: TrainerInputs) -> TrainingArguments:
    """Return the arguments; TRL's defaults if none are given."""
    need("accelerate", by="transformers' arguments")
    from transformers import TrainingArguments

    if isinstance(given.args, TrainingArguments):
        return given.args
    if given.args is not None:
        raise ConfigError(
            f"args is a {type(given.args).__name__}: give a TrainConfig, a transformers.TrainingArguments or a "
            "trl.SFTConfig"
        )
    output_dir = f"{(name_of(given.model) or 'model').rstrip('/').rpartition('/')[2]}-SFT"  # TRL's default
    try:
        from trl import SFTConfig
    except ImportError:
        return TrainingArguments(output_dir)
    made: TrainingArguments = SFTConfig(output_dir)
    return made


def _of_config(given: TrainerInputs, world_of: Callable[..., World]) -> RunInputs:
    """Return the inputs for a TrainConfig: a model may be named, and callbacks get arguments; datasets are ours."""
    config: TrainConfig = given.args
    world = world_of(config.timeout_s, replication=config.group_ranks)
    for name in ("processing_class", "formatting_func"):
        if getattr(given, name) is not None:
            raise ConfigError(
                f"{name} is for rows of a datasets.Dataset, which a run with a TrainConfig does not read: leave out "
                f"{name}"
            )
    datasets = {}
    for name in ("train_dataset", "eval_dataset"):
        dataset = with_processor_of(given.model, getattr(given, name))
        if isinstance(dataset, DatasetConfig):
            dataset = open_config(dataset, world)
        elif dataset is not None and not isinstance(dataset, Mapping):
            dataset = _ours(dataset, name)
        datasets[name] = dataset
    return RunInputs(
        config=config,
        arguments=arguments_of(config),
        model=model_of(given.model, None, given.peft_config),
        data_collator=None if given.data_collator is None else adapted(given.data_collator),
        **datasets,
    )


def _ours(dataset: Any, name: str) -> Any:
    if not gives_packs(dataset):
        raise ConfigError(
            f"{name} is a {type(dataset).__module__}.{type(dataset).__name__}, and args is a TrainConfig, which does "
            "not specify how rows become tokens: pass a trl.SFTConfig or transformers.TrainingArguments, or a "
            "PackedStreamingDataset"
        )
    return dataset


def _steps_of(train: Datasets | None, epochs: float, per_rank: int, world: World) -> int:
    """Return the steps of a number of epochs, rounded up like in transformers. per_rank: packs of a rank in a step."""
    if train is None or isinstance(train, Mapping):
        raise ConfigError(
            "args have shares of a run or of an epoch, whose steps are counted for one train_dataset: set max_steps"
        )
    if opens_loader(train):
        raise ConfigError("packs of sources that are read without conversion are not known beforehand: set max_steps")
    num_packs = core_of(train).plan.num_packs(0)  # type: ignore[arg-type]  # it has a core
    steps_an_epoch = math.ceil(num_packs / (per_rank * world.num_groups))
    return max(1, math.ceil(epochs * steps_an_epoch))
