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
}
OF_TRANSFORMERS_TOO = ("remove_unused_columns", "group_by_length", "fsdp_config")  # which are not passed on to it
FSDP_CONFIG: Mapping[str, Key] = {
    "transformer_layer_cls_to_wrap": Key("honoured", "wrap"),
    "reshard_after_forward": Key("honoured", "reshard_after_forward"),
    "min_num_params": Key("refused", "blocks are sharded one by one: leave it out"),
    "xla": Key("refused", "there are no TPUs here: leave it out"),
    "xla_fsdp_v2": Key("refused", "there are no TPUs here: leave it out"),
    "xla_fsdp_grad_ckpt": Key("refused", "there are no TPUs here: leave it out"),
}  # fmt: skip
PROFILER_CONFIG = ("start_step", "end_step", "directory")
_LOSSES = "logits are computed some at a time in any case"
_KERNELS = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu")  # of liger-kernel, which are taken together
_LOSS_KERNELS = ("fused_linear_cross_entropy", "cross_entropy")
PATCHES: Mapping[str, Key] = {
    "liger": Key("honoured", "use_liger_kernel"),
    "rmpad": Key("moot", "packs have no padding"),
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
    if wrapped := fsdp.get("transformer_layer_cls_to_wrap"):
        values["wrap"] = [wrapped] if isinstance(wrapped, str) else list(wrapped)
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


def uses_liger(said: Mapping[str, Any], *, source: str) -> bool:
    """Whether monkey_patch_kwargs asks for liger-kernel; ConfigError for what else it asks for."""
    check_names(said, ("patch_type", *_LOSS_KERNELS, *_KERNELS), source)
    types = said.get("patch_type") or []
    types = [types] if isinstance(types, str) else list(types)
    check_names(types, PATCHES, f"{source}: patch_type")
    moot = [*told(PATCHES, dict.fromkeys(types, True), source=f"{source}: patch_type")]
    if not set(_LOSS_KERNELS).isdisjoint(said):
        moot += [f"{name} ({_LOSSES})" for name in _LOSS_KERNELS if name in said]
    warn(moot, source="monkey_patch_kwargs")
    for name in _KERNELS:
        if name in said and bool(said[name]) is not ("liger" in types):
            remedy = (
                "liger-kernel's are taken together: leave it out" if "liger" in types else "add patch_type: [liger]"
            )
            raise ConfigError(f"{source}: {name} {said[name]} cannot be kept alone: {remedy}")
    return "liger" in types
