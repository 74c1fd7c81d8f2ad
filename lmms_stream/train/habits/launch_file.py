"""LMMS Engine's launch file -> what a trainer is given. YAML with trainer_type, dataset_config, model_config, …"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...config import build_config
from ...errors import ConfigError
from ...mds.dataset_config import DatasetConfig
from ...mds.engine_fields import check_names
from ...versions.transformers import as_installed
from ..model.build import ModelConfig
from ..model.plain import DIFFUSERS_CLASS
from ..run.settings import TrainConfig
from .launch_keys import OF_TRANSFORMERS_TOO, TRAINER_ARGS, trainer_values, uses_liger
from .table import row_of

TOP = ("trainer_type", "dataset_config", "model_config", "trainer_args", "extra_kwargs", "config_yaml")
TRAINERS = ("fsdp2_trainer", "hf_trainer", "sit_trainer")
LATER_TRAINERS = ("dllm_trainer", "wan_trainer")
OTHER_MODELS = {  # whose models are classes of LMMS Engine's -> the task of a run's file of ours
    "bagel_fsdp2_trainer": "bagel",
    "rae_trainer": "reconstruction",
}
MODEL = (
    "load_from_pretrained_path", "load_from_config", "attn_implementation", "overwrite_config", "monkey_patch_kwargs",
    "extra_kwargs", "torch_dtype",
)  # fmt: skip
_DTYPES = ("torch_dtype", "dtype")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a launch file says. arguments: of transformers.TrainingArguments. values: of TrainConfig, instead of what
    follows from the arguments.
    """

    dataset: DatasetConfig
    model: ModelConfig
    arguments: Mapping[str, Any]
    values: Mapping[str, Any]


def launch_of(data: Mapping[str, Any], *, source: str) -> Launch:
    """What a launch file says; ConfigError for keys that are unknown, and for what cannot be kept."""
    check_names(data, TOP, source)
    for name in ("dataset_config", "model_config", "trainer_args"):
        if not isinstance(data.get(name), Mapping):
            raise ConfigError(f"{source}: {name} is missing: write the section {name}")
    trainer = data.get("trainer_type")
    if trainer in LATER_TRAINERS:
        raise ConfigError(f"{source}: trainer_type {trainer!r} is not there yet: there are {', '.join(TRAINERS)}")
    if trainer in OTHER_MODELS:
        raise ConfigError(
            f"{source}: trainer_type {trainer!r} trains a model of LMMS Engine's own classes, which is not here: write "
            f"a run's file with task {{type: {OTHER_MODELS[trainer]}}} and model {{class_path: module:Class}} "
            "(docs/generation.md, docs/bagel.md)"
        )
    if trainer is not None:
        check_names([trainer], TRAINERS, f"{source}: trainer_type")
    if data.get("config_yaml"):
        raise ConfigError(
            f"{source}: config_yaml {data['config_yaml']!r} names another file: give that one to lmms-stream train"
        )
    if data.get("extra_kwargs"):
        raise ConfigError(f"{source}: extra_kwargs {data['extra_kwargs']!r} are for trainers that are not there: leave "
                          "them out")  # fmt: skip
    dataset = build_config(DatasetConfig, data["dataset_config"], source=f"{source}: dataset_config")
    if dataset.dataset_type is None:
        raise ConfigError(f"{source}: dataset_config.dataset_type is missing: give one, as vision")
    if trainer == "sit_trainer":
        _check_sit(dataset, data["model_config"], source=source)
    arguments, values = _arguments(data["trainer_args"], source=f"{source}: trainer_args")
    model = model_of(data["model_config"], source=f"{source}: model_config")
    if arguments.get("use_liger_kernel"):
        model = dataclasses.replace(model, use_liger_kernel=True)
    return Launch(dataset=dataset, model=model, arguments=arguments, values=values)


def _check_sit(dataset: DatasetConfig, model: Mapping[str, Any], *, source: str) -> None:
    """ConfigError for rows that are no images, and for a model of LMMS Engine's own class."""
    if dataset.dataset_type != "sit":
        raise ConfigError(
            f"{source}: trainer_type sit_trainer learns from dataset_type sit, and dataset_config has "
            f"{dataset.dataset_type}: correct one of them"
        )
    made = model.get("load_from_config")
    if made is not None and DIFFUSERS_CLASS not in (made.get("config") or {}):
        raise ConfigError(
            f"{source}: model_type {made.get('model_type')!r} of sit_trainer is a class of LMMS Engine's: name "
            f"diffusers' by load_from_config: {{config: {{{DIFFUSERS_CLASS}: DiTTransformer2DModel, …}}}}"
        )


def model_of(said: Mapping[str, Any], *, source: str) -> ModelConfig:
    """A model_config as ours."""
    check_names(said, MODEL, source)
    path, made = said.get("load_from_pretrained_path"), said.get("load_from_config")
    if (path is None) == (made is None):
        raise ConfigError(f"{source} needs exactly one of load_from_pretrained_path and load_from_config: give one")
    values: dict[str, Any] = {"attention": said.get("attn_implementation") or "auto"}
    overwritten = dict(said.get("overwrite_config") or {})
    if path is not None:
        if overwritten:
            raise ConfigError(
                f"{source}: overwrite_config {', '.join(overwritten)} of a model that is loaded would not fit its "
                "weights: change the config.json in its folder, or leave overwrite_config out"
            )
        values["pretrained"] = str(path)
    elif made is not None:
        check_names(made, ("model_type", "config"), f"{source}: load_from_config")
        values["config"] = {"model_type": made.get("model_type"), **(made.get("config") or {}), **overwritten}
        if DIFFUSERS_CLASS in values["config"]:
            del values["config"]["model_type"]
    extra = dict(said.get("extra_kwargs") or {})
    if said.get("torch_dtype"):
        extra = {"torch_dtype": said["torch_dtype"], **extra}
    check_names(extra, (*_DTYPES, "trust_remote_code"), f"{source}: extra_kwargs")
    for name in _DTYPES:
        if name in extra:
            values["dtype"] = str(extra[name]).removeprefix("torch.")
    values["trust_remote_code"] = bool(extra.get("trust_remote_code"))
    values["use_liger_kernel"] = uses_liger(
        said.get("monkey_patch_kwargs") or {}, source=f"{source}: monkey_patch_kwargs"
    )
    return build_config(ModelConfig, values, source=source)


def _arguments(said: Mapping[str, Any], *, source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of transformers' arguments, and of ours."""
    from transformers import TrainingArguments

    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
    said = as_installed(said, theirs)
    said = {name: value for name, value in said.items() if name in theirs or not _is_of_before(name, value, source)}
    check_names(said, [*theirs, *TRAINER_ARGS], source)
    arguments = {name: value for name, value in said.items() if name in theirs - {*OF_TRANSFORMERS_TOO}}
    for name in ("eval_strategy", "save_strategy", "logging_strategy"):
        if arguments.get(name) is False:  # as YAML reads a bare no
            arguments[name] = "no"
    values: dict[str, Any] = {"resume": "auto", **trainer_values(said, source=source)}
    if said.get("lr_scheduler_type") == "wsd":
        arguments["lr_scheduler_type"] = "constant_with_warmup"
        values["lr_scheduler_type"] = "wsd"
        known = {field.name for field in dataclasses.fields(TrainConfig)}
        details = dict(arguments.pop("lr_scheduler_kwargs", None) or {})
        check_names(details, [name for name in known if name in ("decay_ratio", "min_learning_rate")],
                    f"{source}: lr_scheduler_kwargs of wsd")  # fmt: skip
        values |= details
    return arguments, values


def _is_of_before(name: str, value: Any, source: str) -> bool:
    """Whether it is an argument that the installed transformers no longer has, and one that cannot matter."""
    row = row_of(name)
    if row is None or name in TRAINER_ARGS:
        return False
    says_more = (
        value is False if name == "save_safetensors" else value not in (None, False, "", 0, -1, "auto", "random")
    )
    if row.fate == "refused" and says_more:
        raise ConfigError(f"{source}: {name} is {value!r}, which is refused: {row.text}")
    return True
