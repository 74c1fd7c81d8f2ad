"""Each key of trainer_args and model_config that LMMS Engine has beyond transformers: what becomes of it.

Every one is honoured (it gives values of ours), moot (a warning says why it cannot matter) or refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from ...mds.engine_fields import check_names
from ...types import World
from ..run.settings import ProfileConfig

logger = logging.getLogger("lmms_stream")


@dataclass(frozen=True, slots=True)
class Key:
    """text: of a moot key why it cannot matter, of a refused one the reason and the remedy. same: whether a value asks
    for nothing.
    """

    fate: str
    text: str
    same: Callable[[Any], bool] = lambda value: not value


def _is_one(value: Any) -> bool:
    return value in (None, 1)


def _is_default(default: Any) -> Callable[[Any], bool]:
    return lambda value: not value or value == default


DEGREES = {"sp_ulysses_degree": "sequence_parallel", "tp_degree": "tensor_parallel", "ep_degree": "expert_parallel"}
TRAINER_ARGS: Mapping[str, Key] = {
    "fsdp2": Key("moot", "the model is always sharded with FSDP2"),
    "use_rmpad": Key("moot", "packs have no padding"),
    "print_batch_input_steps": Key("moot", "lmms-stream inspect shows samples", lambda value: (value or -1) < 0),
    "remove_unused_columns": Key("moot", "columns that no tokens are made of are never read"),
    "group_by_length": Key("moot", "a pack has no padding but its own end"),
    "reduce_dtype": Key("moot", "gradients are summed in float32"),
    "output_dtype": Key("moot", "losses are computed in float32"),
    **{name: Key("honoured", ours) for name, ours in DEGREES.items()},
    "freeze_modules": Key("honoured", "frozen"),
    "fsdp_config": Key("honoured", "wrap, reshard_after_forward"),
    "use_muon": Key("honoured", "optim muon"),
    "enable_profiler": Key("honoured", "profile"),
    "profiler_config": Key("honoured", "profile"),
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
OF_TRANSFORMERS_TOO = ("remove_unused_columns", "group_by_length", "fsdp_config")  # which are not passed on to it
FSDP_CONFIG: Mapping[str, Key] = {
    "transformer_layer_cls_to_wrap": Key("moot", "the blocks that the model names are sharded one by one"),
    "reshard_after_forward": Key("honoured", "reshard_after_forward"),
    "min_num_params": Key("refused", "blocks are sharded one by one: leave it out"),
    "hsdp_shard_size": Key("honoured", "shard_ranks"),
    "xla": Key("refused", "there are no TPUs here: leave it out"),
    "xla_fsdp_v2": Key("refused", "there are no TPUs here: leave it out"),
    "xla_fsdp_grad_ckpt": Key("refused", "there are no TPUs here: leave it out"),
}  # fmt: skip
PROFILER_CONFIG = ("start_step", "end_step", "directory")
_LOSSES = "logits are computed some at a time in any case"
_KERNELS = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu")  # of liger-kernel, which are taken together
_LOSS_KERNELS = ("fused_linear_cross_entropy", "cross_entropy")
_VIDEO = ("faster_token_stride", "mm_spatial_pool_stride", "mm_spatial_pool_mode")  # of patch_type video
PATCHES: Mapping[str, Key] = {
    "liger": Key("honoured", "use_liger_kernel"),
    "rmpad": Key("moot", "packs have no padding"),
    "video": Key("honoured", "slow_every"),
    "nsa": Key("refused", "sparse attention is not here: leave it out"),
    "vit_frame_parallel": Key("refused", "frames are not dealt over ranks, packs are: leave it out"),
}


def told(keys: Mapping[str, Key], said: Mapping[str, Any], *, source: str) -> Iterator[str]:
    """Moot keys that are set, each with its reason; ConfigError for those that are refused. All are known."""
    for name, value in said.items():
        key = keys.get(name)
        if key is None or key.fate == "honoured" or key.same(value):
            continue
        if key.fate == "refused":
            between = " " if key.text.startswith("is ") else ": "
            raise ConfigError(f"{source}: {name} {value}{between}{key.text}")
        yield f"{name} ({key.text})"


def warn(moot: list[str], *, source: str) -> None:
    """One warning of a run, by rank 0."""
    if moot and World.detect().rank == 0:
        logger.warning("%s that cannot matter here: %s", source, "; ".join(moot))


def trainer_values(said: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Values of TrainConfig of the keys that are honoured; moot ones are told, others refused. All names are known."""
    fsdp = dict(said.get("fsdp_config") or {})
    check_names(fsdp, FSDP_CONFIG, f"{source}: fsdp_config")
    moot = [*told(TRAINER_ARGS, said, source=source), *told(FSDP_CONFIG, fsdp, source=f"{source}: fsdp_config")]
    warn(moot, source="trainer_args")
    values: dict[str, Any] = {ours: said[name] for name, ours in DEGREES.items() if not _is_one(said.get(name))}
    if frozen := said.get("freeze_modules"):
        values["frozen"] = [
            f"*{name}.*" for name in ([frozen] if isinstance(frozen, str) else frozen)
        ]  # each must match
    if fsdp.get("hsdp_shard_size"):
        values["shard_ranks"] = int(fsdp["hsdp_shard_size"])
    if said.get("ema_enabled"):
        values["ema_decay"] = float(said.get("ema_decay") or 0.9999)
    if "reshard_after_forward" in fsdp:
        values["reshard_after_forward"] = bool(fsdp["reshard_after_forward"])
    if said.get("use_muon"):
        values["optim"] = "muon"
    profiler = dict(said.get("profiler_config") or {})
    check_names(profiler, PROFILER_CONFIG, f"{source}: profiler_config")
    if said.get("enable_profiler"):
        first = int(profiler.get("start_step", 1))
        stop = int(profiler.get("end_step", first + 1))
        values["profile"] = ProfileConfig(first=first, stop=stop, folder=profiler.get("directory"))
    return values


def _patches(said: Mapping[str, Any], *, source: str) -> list[str]:
    """The patch_types of monkey_patch_kwargs, all keys of which are known."""
    types = said.get("patch_type") or []
    types = [types] if isinstance(types, str) else list(types)
    of_video = _VIDEO if "video" in types else ()
    check_names(said, ("patch_type", "use_rmpad", *_LOSS_KERNELS, *_KERNELS, *of_video), source)
    check_names(types, PATCHES, f"{source}: patch_type")
    return types


def slow_every(said: Mapping[str, Any], *, source: str) -> int | None:
    """Frames from one slow frame of a video to the next, where monkey_patch_kwargs asks for slow and fast ones.

    ConfigError for a pooling that is not followed.
    """
    if "video" not in _patches(said, source=source):
        return None
    for name, only in (("mm_spatial_pool_stride", 2), ("mm_spatial_pool_mode", "bilinear")):
        if said.get(name, only) != only:
            raise ConfigError(
                f"{source}: {name} {said[name]!r} cannot be followed, only {only!r}, by which LLaVA-OneVision "
                "pools its frames: leave it out"
            )
    return int(said.get("faster_token_stride") or 10)  # their default


def uses_liger(said: Mapping[str, Any], *, source: str) -> bool | None:
    """Whether monkey_patch_kwargs asks for kernels of liger-kernel; None where it does not say.

    ConfigError for what else it asks for.
    """
    types = _patches(said, source=source)
    moot = [*told(PATCHES, dict.fromkeys(types, True), source=f"{source}: patch_type")]
    if said.get("use_rmpad"):
        moot.append(f"use_rmpad ({PATCHES['rmpad'].text})")
    if not set(_LOSS_KERNELS).isdisjoint(said):
        moot += [f"{name} ({_LOSSES})" for name in _LOSS_KERNELS if name in said]
    warn(moot, source="monkey_patch_kwargs")
    asked = [name for name in _KERNELS if said.get(name)]
    if "liger" in types and not asked and set(_KERNELS) & said.keys():
        return False  # its losses alone are asked for
    for name in _KERNELS:
        if name in said and bool(said[name]) is not ("liger" in types):
            remedy = (
                "liger-kernel's are taken together: leave it out" if "liger" in types else "add patch_type: [liger]"
            )
            raise ConfigError(f"{source}: {name} {said[name]} cannot be kept alone: {remedy}")
    return True if "liger" in types else None
