"""LMMS Engine's launch file -> what a trainer is given. YAML with trainer_type, dataset_config, model_config, …"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...config import LAUNCH_SECTIONS, build_config
from ...datasets.names import TYPES, dataset_type_of
from ...errors import ConfigError
from ...mds.dataset_config import DatasetConfig
from ...mds.engine_fields import check_names
from ...versions.transformers import as_installed
from ..model.build import ModelConfig
from ..model.plain import DIFFUSERS_CLASS
from ..run.settings import TrainConfig
from .launch_keys import OF_TRANSFORMERS_TOO, TRAINER_ARGS, slow_every, trainer_values, uses_liger, warn
from .launch_models import OWN_MODELS
from .table import row_of

TRAINERS = ("fsdp2_trainer", "hf_trainer", "bagel_fsdp2_trainer", *OWN_MODELS)
IMAGE_PROCESSORS = {"sit": "sit", "rae_siglip": "rae"}  # processor_type -> dataset_type of what it reads
OTHER_TRAINERS = {  # whose models are classes of LMMS Engine's -> what to do
    "rae_trainer": "write a run's file with task {type: reconstruction} and model {class_path: module:Class} "
    "(docs/generation.md)",
    "wan_trainer": "train it with LMMS Engine, or a model of diffusers on images by sit_trainer (docs/generation.md)",
}
MODEL = (
    "load_from_pretrained_path", "load_from_config", "attn_implementation", "overwrite_config", "monkey_patch_kwargs",
    "extra_kwargs", "torch_dtype", "model_type",
)  # fmt: skip
_DTYPES = ("torch_dtype", "dtype")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a launch file says. arguments: of transformers.TrainingArguments. values: of TrainConfig, instead of what
    follows from the arguments. task: what is learnt, where the dataset does not say it whole.
    """

    dataset: DatasetConfig
    model: ModelConfig
    arguments: Mapping[str, Any]
    values: Mapping[str, Any]
    task: Mapping[str, Any] = field(default_factory=dict)


def launch_of(data: Mapping[str, Any], *, source: str) -> Launch:
    """What a launch file says; ConfigError for keys that are unknown, and for what cannot be kept.

    A key of any section whose value is null asks for nothing.
    """
    check_names(_asked(data), LAUNCH_SECTIONS, source)
    for name in ("dataset_config", "model_config", "trainer_args"):
        if not isinstance(data.get(name), Mapping):
            raise ConfigError(f"{source}: {name} is missing: write the section {name}")
    trainer = data.get("trainer_type")
    if trainer in OTHER_TRAINERS:
        raise ConfigError(
            f"{source}: trainer_type {trainer!r} trains a model of LMMS Engine's own classes, which is not here: "
            f"{OTHER_TRAINERS[trainer]}"
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
    dataset = dataset_of(data["dataset_config"], data["model_config"], source=f"{source}: dataset_config")
    model_config: Mapping[str, Any] = data["model_config"]
    _check_rows(trainer, dataset, model_config, source=source)
    task: dict[str, Any] = {}
    if (own := OWN_MODELS.get(str(trainer))) is not None:
        model_config, task = own(model_config, dataset, source=f"{source}: model_config")
    arguments, values = _arguments(data["trainer_args"], source=f"{source}: trainer_args")
    if arguments.get("eval_strategy", "no") != "no" and dataset.evaluated is None:
        arguments["eval_strategy"] = "no"
        warn(
            [f"eval_strategy {data['trainer_args']['eval_strategy']} (there is no eval_dataset_path)"],
            source="trainer_args",
        )
    model = model_of(model_config, source=f"{source}: model_config", liger=bool(arguments.get("use_liger_kernel")))
    if "use_liger_kernel" in arguments:
        arguments["use_liger_kernel"] = model.use_liger_kernel
    return Launch(dataset=dataset, model=model, arguments=arguments, values=values, task=task)


def _check_rows(trainer: str | None, dataset: DatasetConfig, model: Mapping[str, Any], *, source: str) -> None:
    """ConfigError for a dataset_type that is not here, and for BAGEL's unless the model is of the user's own files."""
    is_bagel = dataset_type_of(dataset) in (TYPES["bagel"], TYPES["bagel_iterable"])
    is_own = bool((model.get("extra_kwargs") or {}).get("trust_remote_code"))
    if (is_bagel or trainer == "bagel_fsdp2_trainer") and not is_own:
        raise ConfigError(
            f"{source}: BAGEL's model is one of LMMS Engine's own classes, which is not here: write a run's file with "
            "task {type: bagel} and model {class_path: module:Class}, or name a folder with a model of yours and its "
            "Python files as load_from_pretrained_path and set model_config.extra_kwargs.trust_remote_code to true "
            "(docs/bagel.md)"
        )


def _asked(said: Mapping[str, Any], known: Collection[str] = ()) -> dict[str, Any]:
    """What is said, without keys that are null; known: those that stay."""
    return {name: value for name, value in said.items() if value is not None or name in known}


def dataset_of(said: Mapping[str, Any], model: Mapping[str, Any], *, source: str) -> DatasetConfig:
    """A dataset_config as ours. model: its model_config, whose folder has the processor where none is named."""
    said = _asked(said, [field.name for field in dataclasses.fields(DatasetConfig)])
    processor = dict(said.get("processor_config") or {})
    if processor.get("processor_type") in IMAGE_PROCESSORS:
        if said.get("dataset_type") in ("vision", "vision_iterable"):  # theirs reads images by any type
            streams = str(said["dataset_type"]).endswith("_iterable")
            said["dataset_type"] = IMAGE_PROCESSORS[processor["processor_type"]] + ("_iterable" if streams else "")
    elif processor and not processor.get("processor_name") and model.get("load_from_pretrained_path"):
        processor["processor_name"] = str(model["load_from_pretrained_path"])
        said["processor_config"] = processor
    dataset = build_config(DatasetConfig, said, source=source)
    if dataset.dataset_type is None:
        raise ConfigError(f"{source}.dataset_type is missing: give one, as vision")
    return dataset


def model_of(said: Mapping[str, Any], *, source: str, liger: bool = False) -> ModelConfig:
    """A model_config as ours. liger: whether liger-kernel's kernels are used where monkey_patch_kwargs does not say."""
    check_names(_asked(said), MODEL, source)
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
        beside = {name: value for name, value in made.items() if name != "config"}  # fields may stand there, too
        values["config"] = {"model_type": None, **beside, **(made.get("config") or {}), **overwritten}
        if DIFFUSERS_CLASS in values["config"]:
            del values["config"]["model_type"]
    extra = dict(said.get("extra_kwargs") or {})
    off = [name for name, value in extra.items() if value in (None, False)]
    moot = [f"model_type {said['model_type']} (the model's config says it)"] if said.get("model_type") else []
    warn(moot + [f"extra_kwargs.{name} (it is off)" for name in off], source="model_config")
    extra = {name: value for name, value in extra.items() if name not in off}
    if said.get("torch_dtype"):
        extra = {"torch_dtype": said["torch_dtype"], **extra}
    check_names(extra, (*_DTYPES, "trust_remote_code"), f"{source}: extra_kwargs")
    for name in _DTYPES:
        if name in extra:
            values["dtype"] = str(extra[name]).removeprefix("torch.")
    values["trust_remote_code"] = bool(extra.get("trust_remote_code"))
    patches = said.get("monkey_patch_kwargs") or {}
    asked = uses_liger(patches, source=f"{source}: monkey_patch_kwargs")
    values["slow_every"] = slow_every(patches, source=f"{source}: monkey_patch_kwargs")
    values["use_liger_kernel"] = liger if asked is None else asked
    return build_config(ModelConfig, values, source=source)


def _arguments(said: Mapping[str, Any], *, source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of transformers' arguments, and of ours."""
    from transformers import TrainingArguments

    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
    said = as_installed(said, theirs)
    said = {name: value for name, value in said.items() if name in theirs or not _is_of_before(name, value, source)}
    check_names(_asked(said), [*theirs, *TRAINER_ARGS], source)
    arguments = {name: value for name, value in said.items() if name in theirs - {*OF_TRANSFORMERS_TOO}}
    if arguments.get("train_sampling_strategy") == "sequential":
        raise ConfigError(
            f"{source}: train_sampling_strategy is 'sequential', which is refused: set dataset_config.shuffle to false"
        )
    if arguments.get("dataloader_drop_last") and arguments.get("per_device_train_batch_size") == 1:
        del arguments["dataloader_drop_last"]
        warn(["dataloader_drop_last (a batch of one sample is never short)"], source="trainer_args")
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
