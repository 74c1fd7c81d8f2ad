"""The attention that a run trains with, which keeps the samples of a pack apart, and the way to the logits."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ...errors import ConfigError
from .isolation import FAILURES, Tolerances, agreed, find_fault, one_line, tolerances_of
from .loss import learnt_tokens, losses_of_logits
from .model import PackedModel
from .proof_samples import pack_of, text_samples
from .sequence import leave_out
from .sharding import reshard
from .torch_varlen import VARLEN
from .trial import Trial, slowest, step_seconds
from .varlen import may_be_set

_OWN_BACKWARD = ("flex_attention", VARLEN)  # whose backward pass is compiled, or a kernel, of its own
logger = logging.getLogger("lmms_stream")


def prove_packing(model: PackedModel, *, device: torch.device, bf16: bool = False, trial: Trial | None = None) -> None:
    """Choose the model's attention and the way to its logits; all ranks call it.

    Where no attention was named, the first implementation that passes the proof is taken, on a GPU the fastest of them,
    and a line is logged that says why not the others. trial: what says how fast one is (default: on a GPU, a short
    step; on the CPU none is tried). bf16: the model computes in bfloat16 whatever its parameters are. ConfigError where
    none keeps samples apart.
    """
    tolerances = tolerances_of(model, bf16=bf16)
    if trial is None and device.type == "cuda":
        trial = step_seconds
    with proving(model), torch.no_grad():
        refused = _choose_attention(model, tolerances, device, trial)
        _choose_logits_way(model, tolerances, device)
    if not dist.is_initialized() or dist.get_rank() == 0:
        reasons = "".join(f"; not {name}, which {reason}" for name, reason in refused.items())
        logger.info("attention: %s%s", model.model.config._attn_implementation, reasons)


def prove_compiled(model: PackedModel, *, device: torch.device, bf16: bool = False) -> None:
    """ConfigError where a model whose blocks were compiled since does not keep samples apart; all ranks call it."""
    with proving(model):  # with gradients, as in training: without them other code would be compiled
        fault = agreed(find_fault(model, tolerances_of(model, bf16=bf16), device=device, backward=True))
    if fault is not None:
        attention = model.model.config._attn_implementation
        raise ConfigError(
            f"{type(model.model).__name__} with attention {attention}, compiled, {fault}: "
            "set train.torch_compile to false, or another model.attention"
        )


def _choose_attention(
    model: PackedModel, tolerances: Tolerances, device: torch.device, trial: Trial | None
) -> Mapping[str, str]:
    """Set the first implementation that passes the proof, of several the fastest; returns why others were not taken."""
    inner = model.model
    refused: dict[str, str] = dict(getattr(inner, "attention_left_out", {}))
    choices: list[str] = getattr(inner, "attention_choices", [])
    if model.family is not None:
        refused |= _bound(choices, model.family.attentions)
        if not choices and inner.config._attn_implementation not in model.family.attentions:
            raise ConfigError(
                f"attention {inner.config._attn_implementation} is none that keeps samples with media apart in "
                f"{type(inner).__name__}: set model.attention to {' or '.join(model.family.attentions)}, or to auto"
            )
    if model.sequence is not None:
        refused |= leave_out(choices, inner.config._attn_implementation, degree=model.sequence.degree)
    faults: dict[str, str] = {}  # of implementations that were set, by their names
    passed: dict[str, float] = {}  # seconds of a step
    for choice in choices or [inner.config._attn_implementation]:
        if passed and choice == "eager":
            break  # it makes all scores of a pack
        if (fault := agreed(_set_fault(model, choice))) is None:
            attention = inner.config._attn_implementation  # transformers may take another than it is told to
            if attention in faults or attention in passed:
                fault = "cannot be set"
            elif fault := agreed(find_fault(model, tolerances, device=device, backward=attention in _OWN_BACKWARD)):
                faults[attention] = fault
            elif trial is None or len(choices) < 2:
                choices.clear()
                return refused
            else:
                passed[attention] = slowest(trial(model, device))
                continue
        refused[choice] = fault
    if passed:
        choices.clear()
        return refused | _take_fastest(model, passed)
    attention, fault = list((faults or refused).items())[-1]
    raise ConfigError(
        f"{type(inner).__name__} with attention {attention} {fault}: "
        "set another model.attention, or take a model that transformers masks by position_ids"
    )


def _take_fastest(model: PackedModel, passed: Mapping[str, float]) -> dict[str, str]:
    """Set the fastest implementation; returns by how much the others are slower. passed: seconds of a step."""
    best = min(passed, key=lambda name: passed[name])
    if fault := agreed(_set_fault(model, best)):
        raise ConfigError(f"attention {best} {fault}, after it passed the proof: set model.attention to another")
    return {
        name: f"takes {seconds / passed[best]:.2f} times as long" for name, seconds in passed.items() if name != best
    }


def _bound(choices: list[str], attentions: Sequence[str]) -> dict[str, str]:
    """Leave those in `choices` that a family of models may have; returns why not the others."""
    others = {name: "is none for the media of this model" for name in choices if name not in attentions}
    choices[:] = [name for name in choices if name in attentions]
    return others


def _set_fault(model: PackedModel, attention: str) -> str | None:
    """Why an implementation cannot be set, or None."""
    if attention == "flash_attention_2" and any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        return "leaves out the sinks of its heads"  # without a word, of samples alone as of those in packs
    if attention == model.model.config._attn_implementation:
        return None
    try:
        with may_be_set(attention):
            model.model.set_attn_implementation(attention)
    except FAILURES as error:
        return f"cannot be set ({one_line(error)})"
    return None


def _choose_logits_way(model: PackedModel, tolerances: Tolerances, device: torch.device) -> None:
    """Set the thriftiest way that gives the losses of the model's own logits."""
    batch = pack_of(text_samples(model)).to(device)
    learnt, targets = learnt_tokens(batch.labels)
    logits = model.logits(batch)[0, learnt]
    losses, _ = losses_of_logits(logits, targets)
    allowed = tolerances.alone * float(logits.float().std())
    for way in model.logits_ways:
        model.logits_way = way
        try:
            found = model(batch).tokens
        except FAILURES as error:  # its forward does not call its base model, whose hidden states it is to be given
            if way == "whole":
                raise
            fault: str | None = one_line(error)
        else:
            fault = None if float((found - losses).abs().max()) <= allowed else "other losses"
        if agreed(fault) is None:
            return


@contextmanager
def proving(model: PackedModel) -> Iterator[None]:
    """Inside, nothing of the model is random; afterwards each of its modules is as it was, and sharded."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training
        reshard(model)
