"""Models of LMMS Engine's own classes in a launch file -> models of transformers and diffusers, and their tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ConfigError
from ...mds.dataset_config import DatasetConfig
from ...mds.engine_fields import check_names
from ..model.plain import DIFFUSERS_CLASS
from ..model.varlen import SDPA_VARLEN
from .launch_keys import warn

DIFFUSION_MODELS = ("qwen3_dllm", "llada_dllm", "dream_dllm")  # model_type: all are Qwen3 that sees in both directions
_SIT = {  # LMMS Engine's SiT: key -> its default
    "input_size": 32, "patch_size": 2, "in_channels": 4, "hidden_size": 1152, "depth": 28, "num_heads": 16,
    "class_dropout_prob": 0.1, "num_classes": 1000, "learn_sigma": True, "vae_path": "stabilityai/sd-vae-ft-ema",
}  # fmt: skip
_SIT_ALONE = {  # the same, of what one value is followed here
    "mlp_ratio": 4.0, "path_type": "Linear", "prediction": "velocity", "loss_weight": None, "train_eps": None,
    "sample_eps": None, "cfg_scale": 1.0,
}  # fmt: skip


def _sit_of(
    model: Mapping[str, Any], dataset: DatasetConfig, *, source: str
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The model_config of their SiT with diffusers' model of the same layers, and the task; others as they are."""
    if str(dataset.dataset_type).removesuffix("_iterable") != "sit":
        raise ConfigError(
            f"{source}: trainer_type sit_trainer learns from dataset_type sit, and dataset_config has "
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
    said = {name: value for name, value in made.items() if name not in ("model_type", "config")}
    said |= made.get("config") or {}
    check_names(said, [*_SIT, *_SIT_ALONE], f"{source}: load_from_config")
    for name, only in _SIT_ALONE.items():
        if said.get(name, only) != only:
            raise ConfigError(f"{source}: {name} is {said[name]!r}, and only {only!r} is followed here: leave it out")
    sit = _SIT | said
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
    model: Mapping[str, Any], dataset: DatasetConfig, *, source: str
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The model_config of their masked diffusion models with transformers' Qwen3, and the task."""
    values = dict(model)
    if values.get("attn_implementation") in (None, "sdpa"):  # each sample by itself, as it has no mask
        values["attn_implementation"] = SDPA_VARLEN
    if made := values.get("load_from_config"):
        kind = made.get("model_type")
        if kind in DIFFUSION_MODELS:
            warn([f"model_type {kind} (transformers' qwen3 has its layers)"], source="model_config")
            values["load_from_config"] = {**made, "model_type": "qwen3"}
    return values, {"type": "masked_diffusion"}


# trainer_type -> a function: their model_config and the rows -> a model_config that model_of reads, and the task
OWN_MODELS: Mapping[str, Callable[..., tuple[Mapping[str, Any], dict[str, Any]]]] = {
    "sit_trainer": _sit_of,
    "dllm_trainer": _diffusion_of,
}
