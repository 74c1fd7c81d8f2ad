"""LMMS Engine's launch file -> trainer arguments. YAML with trainer_type, dataset_config, model_config, …"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ....checks import of_type, whole_number
from ....config import LAUNCH_SECTIONS, build_config
from ....errors import ConfigError
from ....mds.dataset_config import check_names
from ....train.model.attention import SDPA_VARLEN
from ....train.model.build import DIFFUSERS_CLASS, ModelConfig
from ....train.run.settings import FsdpConfig
from ....types import World
from ....versions.transformers import as_installed
from ...huggingface.table import check_refused, check_texts, effect_of_former
from ..datasets.names import PROCESSORS, TRUST, TYPES, EngineDatasetConfig, LaunchedDatasetConfig, dataset_type_of

# Each key of trainer_args and model_config that LMMS Engine adds to transformers, with its fate: honoured (sets our
# values), moot (a warning gives the reason) or refused by name.

logger = logging.getLogger("lmms_stream")


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a launch file.

    text: the reason a moot key has no effect; a refused key's reason and remedy. same: whether a value requests
    nothing.
    """

    fate: str
    text: str
    same: Callable[[Any], bool] = lambda value: not value


def _is_default(default: Any) -> Callable[[Any], bool]:
    return lambda value: not value or value == default


DEGREES = {"sp_ulysses_degree": "sequence_parallel", "tp_degree": "tensor_parallel", "ep_degree": "expert_parallel"}
TRAINER_ARGS: Mapping[str, Key] = {
    "fsdp2": Key("moot", "the model is always sharded with FSDP2"),
    "use_rmpad": Key("moot", "packs have no padding"),
    "print_batch_input_steps": Key(
        "moot", "lmms-stream inspect shows samples", lambda value: not value or str(value).startswith("-")
    ),
    "remove_unused_columns": Key("moot", "columns that no tokens are made of are never read"),
    "group_by_length": Key("moot", "a pack has no padding but its own end"),
    "reduce_dtype": Key("moot", "gradients are summed in float32"),
    "output_dtype": Key("moot", "losses are computed in float32"),
    **{name: Key("honoured", ours) for name, ours in DEGREES.items()},
    "freeze_modules": Key("honoured", "frozen"),
    "fsdp_config": Key("honoured", "fsdp.reshard_after_forward, shard_ranks"),
    "use_muon": Key("honoured", "optim muon"),
    "enable_profiler": Key("honoured", "profile_steps"),
    "profiler_config": Key("honoured", "profile_steps"),
    "enable_memory_snapshot": Key("refused", "torch.cuda.memory records allocations: leave it out"),
    "memory_snapshot_config": Key("moot", "enable_memory_snapshot is off"),
    "enable_cuda_event_profiler": Key("refused", "enable_profiler traces a step: set that"),
    "cuda_event_profiler_config": Key("moot", "enable_cuda_event_profiler is off"),
    "ema_enabled": Key("honoured", "ema_decay"),
    "ema_decay": Key("honoured", "ema_decay, where ema_enabled is set"),
    "ema_update_every": Key("refused", "the average is of all steps: leave it out", _is_default(1)),
    "ema_start_step": Key("refused", "the average is of all steps: leave it out", _is_default(0)),
    "ema_requires_grad_only": Key(
        "moot", "weights that are not trained do not change", lambda value: value in (None, True)
    ),
    "ema_param_filter": Key("refused", "the average is of all weights: leave it out"),
    "ema_resume_from_ema": Key("refused", "a run resumes from its weights: load the exported average instead"),
    "eval_config": Key("refused", "there is no evaluation server: leave it out"),
    "carbon_intensity": Key("moot", "records have no emissions", _is_default(0.475)),
}
OF_TRANSFORMERS_TOO = ("remove_unused_columns", "group_by_length", "fsdp_config")  # not passed on to transformers
FSDP_CONFIG: Mapping[str, Key] = {
    "transformer_layer_cls_to_wrap": Key("moot", "the blocks that the model names are sharded one by one"),
    "reshard_after_forward": Key("honoured", "fsdp.reshard_after_forward"),
    "min_num_params": Key("refused", "blocks are sharded one by one: leave it out"),
    "hsdp_shard_size": Key("honoured", "shard_ranks"),
    "xla": Key("refused", "there are no TPUs here: leave it out"),
    "xla_fsdp_v2": Key("refused", "there are no TPUs here: leave it out"),
    "xla_fsdp_grad_ckpt": Key("refused", "there are no TPUs here: leave it out"),
}  # fmt: skip
PROFILER_CONFIG = ("start_step", "end_step", "directory", "warmup_steps")
_LOSSES = "logits are computed some at a time in any case"
_KERNELS = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu")  # kernels of liger-kernel, only available together
_LOSS_KERNELS = ("fused_linear_cross_entropy", "cross_entropy")
_VIDEO = ("faster_token_stride", "mm_spatial_pool_stride", "mm_spatial_pool_mode")  # keys of patch_type video
PATCHES: Mapping[str, Key] = {
    "liger": Key("honoured", "use_liger_kernel"),
    "rmpad": Key("moot", "packs have no padding"),
    "video": Key("honoured", "slow_every"),
    "nsa": Key("refused", "sparse attention is not here: leave it out"),
    "vit_frame_parallel": Key("moot", "packs are dealt to ranks by cost, with their frames; sums are the same"),
}


def told(keys: Mapping[str, Key], said: Mapping[str, Any], *, source: str) -> Iterator[str]:
    """Yield the set moot keys, each with its reason; ConfigError for refused keys. All keys are known."""
    for name, value in said.items():
        key = keys.get(name)
        if key is None or key.fate == "honoured" or key.same(value):
            continue
        if key.fate == "refused":
            between = " " if key.text.startswith("is ") else ": "
            raise ConfigError(f"{source}: {name} {value}{between}{key.text}")
        yield f"{name} ({key.text})"


def warn(moot: list[str], *, source: str) -> None:
    """Log one warning per run, on rank 0."""
    if moot and World.detect().rank == 0:
        logger.warning("%s that cannot matter here: %s", source, "; ".join(moot))


def trainer_values(said: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Return TrainConfig values of honoured keys; warn of moot keys, refuse others. All names are known."""
    fsdp = _asked(said.get("fsdp_config") or {})
    check_names(fsdp, FSDP_CONFIG, f"{source}: fsdp_config")
    moot = [*told(TRAINER_ARGS, said, source=source), *told(FSDP_CONFIG, fsdp, source=f"{source}: fsdp_config")]
    warn(moot, source="trainer_args")
    values: dict[str, Any] = {
        ours: whole_number(f"{source}: {name}", said[name], least=1)
        for name, ours in DEGREES.items()
        if said.get(name) not in (None, 1)
    }
    if frozen := _listed(said.get("freeze_modules"), f"{source}: freeze_modules"):
        values["frozen"] = [f"*{name}.*" for name in frozen]  # each pattern must match
    if fsdp.get("hsdp_shard_size"):
        values["shard_ranks"] = whole_number(f"{source}: hsdp_shard_size", fsdp["hsdp_shard_size"], least=1)
    if _is_on(said, "ema_enabled", source):
        values["ema_decay"] = of_type(f"{source}: ema_decay", _asked(said).get("ema_decay", 0.9999), "float", 0.9999)
    if "reshard_after_forward" in fsdp:
        values["fsdp"] = FsdpConfig(reshard_after_forward=_is_on(fsdp, "reshard_after_forward", source))
    if _is_on(said, "use_muon", source):
        values["optim"] = "muon"
    profiler = _asked(said.get("profiler_config") or {})
    check_names(profiler, PROFILER_CONFIG, f"{source}: profiler_config")
    if _is_on(said, "enable_profiler", source):
        if "warmup_steps" in profiler:
            warn(["warmup_steps (the trace begins at start_step)"], source="profiler_config")
        first = whole_number(f"{source}: start_step", profiler.get("start_step", 1), least=0)
        stop = whole_number(f"{source}: end_step", profiler.get("end_step", first + 1), least=0)
        folder = profiler.get("directory")
        values["profile_steps"] = (first, stop) if folder is None else (first, stop, folder)
    return values


def _is_on(said: Mapping[str, Any], name: str, source: str) -> bool:
    """Return a truth value, False if unset; ConfigError for others: the text "false" would be true."""
    return bool(of_type(f"{source}: {name}", said.get(name), "bool", None))


def _listed(names: Any, key: str) -> list[str]:
    """Return a name, or a list of names, as a list."""
    found = [names] if isinstance(names, str) else names or []
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise ConfigError(f"{key} must be a list of names, got {names!r}: write [NAME, …]")
    return [*found]


def _patches(said: Mapping[str, Any], *, source: str) -> list[str]:
    """Return the patch_types of monkey_patch_kwargs; ConfigError for unknown keys."""
    types = _listed(said.get("patch_type"), f"{source}: patch_type")
    of_video = _VIDEO if "video" in types else ()
    check_names(said, ("patch_type", "use_rmpad", *_LOSS_KERNELS, *_KERNELS, *of_video), source)
    check_names(types, PATCHES, f"{source}: patch_type")
    return types


def slow_every(said: Mapping[str, Any], *, source: str) -> int | None:
    """Return the distance between slow frames of a video; None unless monkey_patch_kwargs requests slow frames.

    ConfigError for an unsupported pooling.
    """
    if "video" not in _patches(said, source=source):
        return None
    for name, only in (("mm_spatial_pool_stride", 2), ("mm_spatial_pool_mode", "bilinear")):
        if said.get(name, only) != only:
            raise ConfigError(
                f"{source}: {name} {said[name]!r} is not supported, only {only!r}, LLaVA-OneVision's way to pool "
                "frames: leave it out"
            )
    # 10: LMMS Engine's default
    return whole_number(f"{source}: faster_token_stride", said.get("faster_token_stride", 10), least=1)


def uses_liger(said: Mapping[str, Any], *, source: str) -> bool | None:
    """Return whether monkey_patch_kwargs requests kernels of liger-kernel; None if unspecified.

    ConfigError for other requests.
    """
    types = _patches(said, source=source)
    moot = [*told(PATCHES, dict.fromkeys(types, True), source=f"{source}: patch_type")]
    if said.get("use_rmpad"):
        moot.append(f"use_rmpad ({PATCHES['rmpad'].text})")
    if not set(_LOSS_KERNELS).isdisjoint(said):
        moot += [f"{name} ({_LOSSES})" for name in _LOSS_KERNELS if name in said]
    warn(moot, source="monkey_patch_kwargs")
    asked = [name for name in _KERNELS if _is_on(said, name, source)]
    if "liger" in types and not asked and set(_KERNELS) & said.keys():
        return False  # only its losses are requested
    for name in _KERNELS:
        if name in said and bool(said[name]) is not ("liger" in types):
            remedy = (
                "liger-kernel's are taken together: leave it out" if "liger" in types else "add patch_type: [liger]"
            )
            raise ConfigError(f"{source}: {name} {said[name]} cannot be kept alone: {remedy}")
    return True if "liger" in types else None


# Models of LMMS Engine's own classes in a launch file -> models of transformers and diffusers, and their tasks.

DIFFUSION_MODELS = ("qwen3_dllm", "llada_dllm", "dream_dllm")  # all are Qwen3 with bidirectional attention
_SIT = {  # LMMS Engine's SiT: key -> its default
    "input_size": 32, "patch_size": 2, "in_channels": 4, "hidden_size": 1152, "depth": 28, "num_heads": 16,
    "class_dropout_prob": 0.1, "num_classes": 1000, "learn_sigma": True, "vae_path": "stabilityai/sd-vae-ft-ema",
}  # fmt: skip
_SIT_ALONE = {  # keys of SiT with one supported value
    "mlp_ratio": 4.0, "path_type": "Linear", "prediction": "velocity", "loss_weight": None, "train_eps": None,
    "sample_eps": None,
}  # fmt: skip


def _sit_of(
    model: Mapping[str, Any], dataset: EngineDatasetConfig, *, source: str
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return the model_config with diffusers' model for LMMS Engine's SiT, and the task; other models unchanged."""
    if str(dataset.dataset_type).removesuffix("_iterable") != "sit":
        raise ConfigError(
            f"{source}: trainer_type sit_trainer needs dataset_type sit, and dataset_config has "
            f"{dataset.dataset_type}: correct one of them"
        )
    made = model.get("load_from_config")
    if made is None or DIFFUSERS_CLASS in (made.get("config") or {}):
        return model, {}
    if made.get("model_type") != "sit":
        raise ConfigError(
            f"{source}: model_type {made.get('model_type')!r} of sit_trainer is not here: give sit, or name diffusers' "
            f"model by load_from_config: {{config: {{{DIFFUSERS_CLASS}: DiTTransformer2DModel, …}}}}"
        )
    said: dict[str, Any] = {name: value for name, value in made.items() if name not in ("model_type", "config")}
    said = _asked(said | (made.get("config") or {}))
    if "cfg_scale" in said:
        warn([f"cfg_scale {said.pop('cfg_scale')} (of images that are drawn, not of training)"], source="model_config")
    check_names(said, [*_SIT, *_SIT_ALONE], f"{source}: load_from_config")
    for name, only in _SIT_ALONE.items():
        if said.get(name, only) != only:
            raise ConfigError(f"{source}: {name} is {said[name]!r}, and only {only!r} is followed here: leave it out")
    sit: dict[str, Any] = _SIT | said
    if sit["hidden_size"] % sit["num_heads"]:
        raise ConfigError(
            f"{source}: hidden_size {sit['hidden_size']} is no multiple of num_heads {sit['num_heads']}: change one of "
            "them"
        )
    config = {
        DIFFUSERS_CLASS: "DiTTransformer2DModel",
        "sample_size": sit["input_size"],
        "patch_size": sit["patch_size"],
        "in_channels": sit["in_channels"],
        "out_channels": sit["in_channels"] * (2 if sit["learn_sigma"] else 1),
        "num_layers": sit["depth"],
        "num_attention_heads": sit["num_heads"],
        "attention_head_dim": sit["hidden_size"] // sit["num_heads"],
        "num_embeds_ada_norm": sit["num_classes"],
    }
    task = {"type": "flow_matching", "vae": sit["vae_path"], "label_dropout": sit["class_dropout_prob"]}
    return {**model, "load_from_config": {"config": config}}, task


def _diffusion_of(
    model: Mapping[str, Any], dataset: EngineDatasetConfig, *, source: str
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return the model_config with transformers' Qwen3 for LMMS Engine's masked diffusion models, and the task."""
    values = dict(model)
    if values.get("attn_implementation") in (None, "sdpa"):  # attends within each sample, without a mask
        values["attn_implementation"] = SDPA_VARLEN
    if made := values.get("load_from_config"):
        kind = made.get("model_type")
        if kind in DIFFUSION_MODELS:
            warn([f"model_type {kind} (transformers' qwen3 has its layers)"], source="model_config")
            values["load_from_config"] = {**made, "model_type": "qwen3"}
    return values, {"type": "masked_diffusion"}


# trainer_type -> a function from model_config and dataset to a model_config for model_of, and the task
OWN_MODELS: Mapping[str, Callable[..., tuple[Mapping[str, Any], dict[str, Any]]]] = {
    "sit_trainer": _sit_of,
    "dllm_trainer": _diffusion_of,
}


TRAINERS = ("fsdp2_trainer", "hf_trainer", "bagel_fsdp2_trainer", *OWN_MODELS)
IMAGE_PROCESSORS = {"sit": "sit", "rae_siglip": "rae"}  # processor_type -> dataset_type of its rows
OTHER_TRAINERS = {  # trainers of models with LMMS Engine's own classes -> remedy
    "rae_trainer": "write a run's file with task {type: reconstruction} and model {class_path: module:Class} "
    "(docs/generation.md)",
    "wan_trainer": "train it with LMMS Engine, or a model of diffusers on images by sit_trainer (docs/generation.md)",
}
MODEL: Mapping[str, Key] = {
    "load_from_pretrained_path": Key("honoured", "model.pretrained"),
    "load_from_config": Key("honoured", "model.config, with random weights"),
    "attn_implementation": Key("honoured", "model.attention, the fastest that is here without flash-attn"),
    "overwrite_config": Key("honoured", "keys of model.config; refused for a loaded model"),
    "monkey_patch_kwargs": Key("honoured", "patch_type and its keys, below"),
    "extra_kwargs": Key("honoured", "torch_dtype, dtype, trust_remote_code; keys that are off are named"),
    "torch_dtype": Key("honoured", "model.dtype"),
    "model_type": Key("moot", "the model's config says it"),
    "model_general_type": Key(
        "honoured", "causal_lm or image_text_to_text: refused if the config's class is the other"
    ),
}
_DTYPES = ("torch_dtype", "dtype")


KEYS: Mapping[str, Mapping[str, Key]] = {  # for docs/datasets.md
    "model_config": MODEL, "patch_type": PATCHES, "trainer_args": TRAINER_ARGS, "fsdp_config": FSDP_CONFIG
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Content of a launch file.

    arguments: arguments of transformers.TrainingArguments. values: fields of TrainConfig that override the arguments.
    task: the training task, unless the dataset determines it. general_type: LMMS Engine's name of the model's auto
    class, if named.
    """

    dataset: EngineDatasetConfig
    model: ModelConfig
    arguments: Mapping[str, Any]
    values: Mapping[str, Any]
    task: Mapping[str, Any] = field(default_factory=dict)
    general_type: str | None = None


_MAPPINGS = {  # sections, and their keys with mappings
    "dataset_config": ("processor_config", "extra_kwargs"),
    "model_config": ("load_from_config", "overwrite_config", "monkey_patch_kwargs", "extra_kwargs"),
    "trainer_args": ("fsdp_config", "profiler_config", "lr_scheduler_kwargs"),
}


def launch_of(data: Mapping[str, Any], *, source: str) -> Launch:
    """Return the content of a launch file; ConfigError for unknown keys and unsupported values.

    In every section, a key with the value null requests nothing.
    """
    check_names(_asked(data), LAUNCH_SECTIONS, source)
    _check_mappings(data, _MAPPINGS, source=source)
    for name in _MAPPINGS:
        if data.get(name) is None:
            raise ConfigError(f"{source}: {name} is missing: write the section {name}")
        _check_mappings(data[name], _MAPPINGS[name], source=f"{source}: {name}")
    trainer = data.get("trainer_type")
    if trainer is not None and not isinstance(trainer, str):
        raise ConfigError(f"{source}: trainer_type must be a name, got {trainer!r}: write one of {', '.join(TRAINERS)}")
    if trainer in OTHER_TRAINERS:
        raise ConfigError(
            f"{source}: trainer_type {trainer!r} trains a model class of LMMS Engine, not of lmms_stream: "
            f"{OTHER_TRAINERS[trainer]}"
        )
    if trainer is not None:
        check_names([trainer], TRAINERS, f"{source}: trainer_type")
    if data.get("config_yaml"):
        raise ConfigError(
            f"{source}: config_yaml {data['config_yaml']!r} names another file: pass that file to lmms-stream train"
        )
    if data.get("extra_kwargs"):
        raise ConfigError(
            f"{source}: extra_kwargs {data['extra_kwargs']!r} are for unsupported trainers: leave them out"
        )
    dataset = dataset_of(data["dataset_config"], data["model_config"], source=f"{source}: dataset_config")
    model_config: Mapping[str, Any] = data["model_config"]
    _check_rows(trainer, dataset, model_config, source=source)
    task: dict[str, Any] = {}
    if (own := OWN_MODELS.get(str(trainer))) is not None:
        model_config, task = own(model_config, dataset, source=f"{source}: model_config")
    arguments, values = _arguments(
        data["trainer_args"], source=f"{source}: trainer_args", streams=dataset_type_of(dataset).is_iterable
    )
    if arguments.get("eval_strategy", "no") != "no" and dataset.evaluated is None:
        arguments["eval_strategy"] = "no"
        warn(
            [f"eval_strategy {data['trainer_args']['eval_strategy']} (there is no eval_dataset_path)"],
            source="trainer_args",
        )
    model = model_of(model_config, source=f"{source}: model_config", liger=bool(arguments.get("use_liger_kernel")))
    if "use_liger_kernel" in arguments:
        arguments["use_liger_kernel"] = model.use_liger_kernel
    general = model_config.get("model_general_type")
    return Launch(dataset=dataset, model=model, arguments=arguments, values=values, task=task, general_type=general)


def _check_mappings(section: Mapping[str, Any], names: Collection[str], *, source: str) -> None:
    """Raise ConfigError if a named section is a list, a text or a number."""
    for name in names:
        said = section.get(name)
        if said is not None and not isinstance(said, Mapping):
            raise ConfigError(
                f"{source}: {name} must be a mapping, got {said!r}: write its keys below it, as `key: value`, without "
                "dashes"
            )


def _check_rows(trainer: str | None, dataset: EngineDatasetConfig, model: Mapping[str, Any], *, source: str) -> None:
    """Raise ConfigError for an unknown dataset_type, and for BAGEL unless the model comes from the user's own files."""
    is_bagel = dataset_type_of(dataset) in (TYPES["bagel"], TYPES["bagel_iterable"])
    is_own = bool((model.get("extra_kwargs") or {}).get("trust_remote_code"))
    if (is_bagel or trainer == "bagel_fsdp2_trainer") and not is_own:
        raise ConfigError(
            f"{source}: BAGEL's model is a class of LMMS Engine, not of lmms_stream: write a run's file with task "
            "{type: bagel} and model {class_path: module:Class}, or name a folder with your model and its Python "
            "files as load_from_pretrained_path and set model_config.extra_kwargs.trust_remote_code to true "
            "(docs/bagel.md)"
        )


def _asked(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without null values."""
    return {name: value for name, value in said.items() if value is not None}


def dataset_of(said: Mapping[str, Any], model: Mapping[str, Any], *, source: str) -> EngineDatasetConfig:
    """Return a dataset_config as ours. model: its model_config; its folder provides the processor if none is named."""
    said = _asked(said)
    processor = dict(said.get("processor_config") or {})
    _check_mappings(processor, ("extra_kwargs",), source=f"{source}: processor_config")
    if not isinstance(kind := processor.get("processor_type", ""), str):
        raise ConfigError(
            f"{source}: processor_type must be a name, got {kind!r}: write one of {', '.join(PROCESSORS)}"
        )
    if processor.get("processor_type") in IMAGE_PROCESSORS:
        if said.get("dataset_type") in ("vision", "vision_iterable"):  # LMMS Engine's reads images with any type
            streams = str(said["dataset_type"]).endswith("_iterable")
            said["dataset_type"] = IMAGE_PROCESSORS[processor["processor_type"]] + ("_iterable" if streams else "")
    elif processor and not processor.get("processor_name") and model.get("load_from_pretrained_path"):
        processor["processor_name"] = str(model["load_from_pretrained_path"])
        said["processor_config"] = processor
    has_folder = processor.get("processor_type") in PROCESSORS.keys() - IMAGE_PROCESSORS.keys()
    if has_folder and (model.get("extra_kwargs") or {}).get(TRUST):
        said["processor_config"] = processor | {"extra_kwargs": {TRUST: True, **(processor.get("extra_kwargs") or {})}}
    dataset = build_config(LaunchedDatasetConfig, said, source=source)
    if dataset.dataset_type is None:
        raise ConfigError(f"{source}.dataset_type is missing: set it, for example to vision")
    return dataset


def model_of(said: Mapping[str, Any], *, source: str, liger: bool = False) -> ModelConfig:
    """Return a model_config as ours. liger: default for liger-kernel's kernels, if unspecified in
    monkey_patch_kwargs.
    """
    check_names(_asked(said), MODEL, source)
    path, made = said.get("load_from_pretrained_path"), said.get("load_from_config")
    if (path is None) == (made is None):
        raise ConfigError(f"{source} needs exactly one of load_from_pretrained_path and load_from_config: set one")
    values: dict[str, Any] = {"attention": said.get("attn_implementation") or "auto"}
    overwritten = dict(said.get("overwrite_config") or {})
    if path is not None:
        if overwritten:
            raise ConfigError(
                f"{source}: overwrite_config {', '.join(overwritten)} does not fit the weights of a loaded model: "
                "change the config.json in its folder, or leave overwrite_config out"
            )
        values["pretrained"] = str(path)
    elif made is not None:
        _check_mappings(made, ("config",), source=f"{source}: load_from_config")
        beside = {name: value for name, value in made.items() if name != "config"}  # also fields next to `config`
        values["config"] = {"model_type": None, **beside, **(made.get("config") or {}), **overwritten}
        if DIFFUSERS_CLASS in values["config"]:
            del values["config"]["model_type"]
    extra = dict(said.get("extra_kwargs") or {})
    off = [name for name, value in extra.items() if value in (None, False)]
    moot = [f"model_type {said['model_type']} ({MODEL['model_type'].text})"] if said.get("model_type") else []
    warn(moot + [f"extra_kwargs.{name} (it is off)" for name in off], source="model_config")
    extra = {name: value for name, value in extra.items() if name not in off}
    check_names(extra, (*_DTYPES, "trust_remote_code"), f"{source}: extra_kwargs")
    named = [said.get("torch_dtype"), *map(extra.get, _DTYPES)]
    dtypes = sorted({str(each).removeprefix("torch.") for each in named if each})
    if len(dtypes) > 1:
        raise ConfigError(f"{source}: torch_dtype and dtype are {' and '.join(dtypes)}: leave one of them out")
    if dtypes:
        values["dtype"] = dtypes[0]
    values["trust_remote_code"] = _is_on(extra, "trust_remote_code", f"{source}: extra_kwargs")
    patches = _asked(said.get("monkey_patch_kwargs") or {})
    asked = uses_liger(patches, source=f"{source}: monkey_patch_kwargs")
    values["slow_every"] = slow_every(patches, source=f"{source}: monkey_patch_kwargs")
    values["use_liger_kernel"] = liger if asked is None else asked
    return build_config(ModelConfig, values, source=source)


def _arguments(said: Mapping[str, Any], *, source: str, streams: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return fields of transformers' arguments, and of ours. streams: whether rows are packed during reading."""
    from transformers import TrainingArguments

    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
    said = as_installed(said, theirs)
    known = {*theirs, *TRAINER_ARGS}
    effects = {name: effect_of_former(name, value, source) for name, value in said.items() if name not in known}
    warn([f"{name} ({effect})" for name, effect in effects.items() if effect], source="trainer_args")
    check_names([name for name in _asked(said) if effects.get(name) is None], known, source)
    arguments = {name: value for name, value in said.items() if name in theirs - {*OF_TRANSFORMERS_TOO}}
    check_texts(arguments, source=source)
    if said.get("train_sampling_strategy") == "sequential":
        raise ConfigError(
            f"{source}: train_sampling_strategy is 'sequential', which is not supported: set dataset_config.shuffle to "
            "false"
        )
    if arguments.get("dataloader_drop_last") and (streams or arguments.get("per_device_train_batch_size") == 1):
        del arguments["dataloader_drop_last"]
        why = "steps of streamed rows are never short" if streams else "a batch of one sample is never short"
        warn([f"dataloader_drop_last ({why})"], source="trainer_args")
    check_refused(arguments, TrainingArguments, source=f"{source}: ")  # before transformers reads them
    for name in ("eval_strategy", "save_strategy", "logging_strategy"):
        if arguments.get(name) is False:  # YAML reads a bare no as False
            arguments[name] = "no"
    values: dict[str, Any] = {"resume": "auto", **trainer_values(said, source=source)}
    if said.get("lr_scheduler_type") == "wsd":
        arguments["lr_scheduler_type"] = "constant_with_warmup"
        values["lr_scheduler_type"] = "wsd"
        details = dict(arguments.pop("lr_scheduler_kwargs", None) or {})
        check_names(details, ("decay_ratio", "min_lr", "min_learning_rate"), f"{source}: lr_scheduler_kwargs of wsd")
        if "min_learning_rate" in details:
            details["min_lr"] = details.pop("min_learning_rate")
        values |= {"lr_scheduler_kwargs": details} if details else {}
    return arguments, values
