"""The verdict of the proof that a model keeps the samples of a pack apart, kept on disk for later starts of a run."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...processors.base import code_and_packages, keep, read_kept
from ..run.distributed import gather_objects
from ..run.precision import uses_tf32
from .choice import prove_packing, set_fault, slowest
from .isolation import agreed
from .model import PackedModel

_KEPT = "attention"  # folder of kept verdicts
_VERDICT = ("attention", "gives_bounds", "logits_way")
_KNOWN = ("lmms_stream", "peft", "torch", "transformers")  # packages whose code is described by versions
_PACKAGES = (
    "torch", "transformers", "peft", "triton", "flash-attn", "flash-attn-3", "flash-linear-attention", "mamba-ssm",
    "causal-conv1d",
)  # fmt: skip
_OF_NO_EFFECT = ("_name_or_path", "transformers_version")  # fields of a config
logger = logging.getLogger("lmms_stream")


def prove_packing_once(model: PackedModel, *, device: torch.device, bf16: bool = False) -> None:
    """Prove packing, except if an earlier start has proven the same; all ranks call it.

    The verdict of a proof is kept in this user's cache folder, for the same config, parameters, attentions, device,
    number format and versions. A model is proven at each start if it runs code of other packages (a class, a hook, an
    attention), or layers on each sample alone.
    """
    described = _described(model, device, bf16=bf16)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    verdict = read_kept(_KEPT, described) if described is not None and is_first else None
    if dist.is_initialized():
        everyone = gather_objects((described, verdict), dist.get_world_size())
        (first, verdict), *_ = everyone
        verdict = verdict if all(each == first for each, _ in everyone) else None
    if _is_applied(model, verdict):
        if is_first:
            attention = model.model.config._attn_implementation
            logger.info("attention: %s, by an earlier start's proof of the same model, versions and device", attention)
        return
    prove_packing(model, device=device, bf16=bf16)
    if described is not None and is_first and model.by_sample is None:
        verdict = (model.model.config._attn_implementation, model.gives_bounds, model.logits_way)
        keep(_KEPT, described, dict(zip(_VERDICT, verdict, strict=True)))


def _is_applied(model: PackedModel, verdict: Any) -> bool:
    """Return whether all ranks could set the attention and the way to the logits of a verdict."""
    fault: str | None = "no verdict"
    if isinstance(verdict, dict) and verdict.keys() == {*_VERDICT} and verdict["logits_way"] in model.logits_ways:
        fault = set_fault(model, verdict["attention"])
    if agreed(fault) is not None:
        return False
    model.gives_bounds, model.logits_way = bool(verdict["gives_bounds"]), verdict["logits_way"]
    getattr(model.model, "attention_choices", []).clear()
    return True


def _described(model: PackedModel, device: torch.device, *, bf16: bool) -> dict[str, Any] | None:
    """Return all that a verdict depends on, as JSON values; None for a model with code of other packages."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    inner, family = model.model, model.family
    attentions = [inner.config._attn_implementation, *getattr(inner, "attention_choices", [])]
    modules = [*model.modules()]
    classes = {type(each) for each in (*modules, family, getattr(family, "ours", family))} - {type(None)}
    functions = [
        *(base for each in classes for base in each.__mro__),
        *(hook for each in modules for hook in (*each._forward_pre_hooks.values(), *each._forward_hooks.values())),
        *(vars(each)["forward"] for each in modules if "forward" in vars(each)),
        *(ALL_ATTENTION_FUNCTIONS[name] for name in attentions if name in ALL_ATTENTION_FUNCTIONS),
    ]
    is_gpu = device.type == "cuda"
    lengths: list[int] | None = None  # bits of the tokens of a usual pack and of its longest sample, over ranks
    if is_gpu:  # all ranks exchange them, whatever is installed on a node
        usual = [int(each) for each in model.usual_lengths()] or [0]
        lengths = [int(slowest(float(each))).bit_length() for each in (sum(usual), max(usual))]
    if not all(map(_is_of_packages, functions)):
        return None
    config = json.loads(inner.config.to_json_string(use_diff=False))
    parameters = [
        f"{name} {each.dtype} {[*each.shape]} {getattr(each, 'placements', '')} {getattr(each, 'device_mesh', '')}"
        for name, each in model.named_parameters()
    ]
    return {
        **code_and_packages(Path(__file__).parents[2], classes, _PACKAGES),
        "class": sorted(f"{each.__module__}.{each.__qualname__}" for each in classes),
        "config": {name: value for name, value in config.items() if name not in _OF_NO_EFFECT},
        "parameters": hashlib.blake2b("\n".join(parameters).encode(), digest_size=16).hexdigest(),
        "family": dict(getattr(family, "description", {})),
        "attention": [attentions, dict(getattr(inner, "attention_left_out", {}))],
        "sequence": None if model.sequence is None else model.sequence.degree,
        "device": [str(torch.version.cuda), torch.cuda.get_device_name(device)] if is_gpu else device.type,
        "numbers": [bf16, uses_tf32(device), torch.are_deterministic_algorithms_enabled()],
        "lengths": lengths if len(attentions) > 2 else None,
    }


def _is_of_packages(code: Any) -> bool:
    """Return whether the versions of known packages describe the code of a class or function."""
    while isinstance(code, partial):
        code = code.func
    package = str(getattr(code, "__module__", "")).partition(".")[0]
    return package in _KNOWN or package in sys.stdlib_module_names
