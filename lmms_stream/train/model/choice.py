"""Choose an attention that keeps the samples of a pack apart, and the way to compute logits."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ...errors import ConfigError
from ...loader.collate import PAD_TOKEN_ID, collate
from ...processors.base import IGNORED_LABEL, Processor
from ...types import Batch
from ..run.distributed import gather
from .attention import BY_BOUNDS, VARLEN, may_be_set, missing_in, run_towers_by_bounds
from .carried_state import leave_by_sample, run_by_sample
from .isolation import (
    FAILURES,
    Tolerances,
    agreed,
    check_lengths,
    find_fault,
    one_line,
    pack_of,
    segments_of,
    text_samples,
    tolerances_of,
)
from .loss import losses_of_logits
from .model import PackedModel
from .sharding import reshard
from .towers import family_of, model_inputs, positions_along_axes

_OWN_BACKWARD = ("flex_attention", VARLEN)  # with a backward pass of their own: compiled, or a kernel
_Way = Literal["positions", "bounds", "samples"]  # to keep samples apart
_KERNELS = ("fla", "mamba_ssm", "causal_conv1d")  # packages of kernels that take the bounds of samples
logger = logging.getLogger("lmms_stream")


def prove_packing(model: PackedModel, *, device: torch.device, bf16: bool = False, trial: Trial | None = None) -> None:
    """Choose the model's attention and the way to its logits; all ranks call it.

    For attention "auto", set the first implementation to pass the proof, and log the reasons against other
    implementations. On a GPU without a kernel of BY_BOUNDS that passes, set the fastest. A named attention must pass
    the proof. trial: returns seconds of a step with an implementation (default: step_seconds on a GPU, no trial on the
    CPU). bf16: the model computes in bfloat16, with parameters of any dtype. ConfigError if no implementation keeps
    samples apart.
    """
    tolerances = tolerances_of(model, bf16=bf16)
    if trial is None and device.type == "cuda":
        trial = step_seconds
    with evaluating(model), torch.no_grad():
        refused = _choose_attention(model, tolerances, device, trial)
        _choose_logits_way(model, tolerances, device)
    if not dist.is_initialized() or dist.get_rank() == 0:
        reasons = "".join(f"; not {name}, which {reason}" for name, reason in refused.items())
        logger.info("attention: %s%s", model.model.config._attn_implementation, reasons)
        if model.by_sample is not None:
            logger.info(
                "%s: run on each sample alone, as transformers carries state from sample to sample of a pack there",
                ", ".join(model.by_sample.names),
            )


def prove_compiled(model: PackedModel, *, device: torch.device, bf16: bool = False) -> None:
    """Raise ConfigError if a model with compiled blocks does not keep samples apart; all ranks call it."""
    with evaluating(model):  # with gradients, as in training: without gradients other code would be compiled
        fault = find_fault(model, tolerances_of(model, bf16=bf16), device=device, backward=True)
    if fault is not None:
        attention = model.model.config._attn_implementation
        raise ConfigError(
            f"{type(model.model).__name__} with attention {attention}, compiled, {fault}: "
            "set train.torch_compile to false, or another model.attention"
        )


def _choose_attention(
    model: PackedModel, tolerances: Tolerances, device: torch.device, trial: Trial | None
) -> Mapping[str, str]:
    """Set the first implementation to pass the proof, or the fastest by trial; return refused names and reasons."""
    inner = model.model
    refused: dict[str, str] = dict(getattr(inner, "attention_left_out", {}))
    choices: list[str] = getattr(inner, "attention_choices", [])
    if model.family is not None:
        refused |= _bound(choices, model.family.attentions)
        if not choices and not _is_known(inner.config._attn_implementation, model.family.attentions):
            raise ConfigError(
                f"attention {inner.config._attn_implementation} is none that keeps samples with media apart in "
                f"{type(inner).__name__}: set model.attention to {' or '.join(model.family.attentions)}, or to auto"
            )
    if model.sequence is not None:
        refused |= model.sequence.leave_out(choices, inner.config._attn_implementation)
    found = keep_apart(model, tolerances, choices, device=device, trial=trial)
    refused |= found.refused
    if found.is_chosen:
        choices.clear()
        return refused
    attention, fault = list((found.faults or refused).items())[-1]
    raise ConfigError(f"{type(inner).__name__} with attention {attention} {fault}: {_remedy(model, choices)}")


class AttentionTrials(NamedTuple):
    """Results of a choice. refused: name of a refused attention -> reason. faults: refusals by a failed proof."""

    is_chosen: bool
    refused: dict[str, str]
    faults: dict[str, str]


def keep_apart(
    model: PackedModel,
    tolerances: Tolerances,
    choices: Sequence[str] = (),
    *,
    device: torch.device,
    trial: Trial | None = None,
    with_backward: bool = True,
) -> AttentionTrials:
    """Set the first way to keep samples apart under which an attention passes the proof, and set this attention.

    Ways: positions of tokens, used by transformers; bounds of samples, for kernels of recurrent layers; and a run on
    each sample alone, for layers that carry state. Return the results for the chosen way; if no way passes, for the
    first way. All ranks call this function. choices: implementations of attention (default: the current attention).
    with_backward: check gradients also for implementations with their own backward pass.
    """
    first: AttentionTrials | None = None
    has_kernel = any(map(find_spec, _KERNELS))
    ways: list[_Way] = ["positions", "bounds", "samples"] if has_kernel else ["positions", "samples"]
    for way in ways if model.sequence is None else ways[:1]:
        leave_by_sample(model)
        model.gives_bounds = way == "bounds"
        if way == "samples":
            _run_by_sample(model, choices, tolerances, device)
            if model.by_sample is None:
                break
        found = _choose(model, choices, tolerances, device, trial, with_backward)
        if found.is_chosen:
            return found
        first = first or found
    leave_by_sample(model)
    model.gives_bounds = False
    assert first is not None
    return first


def _choose(
    model: PackedModel,
    choices: Sequence[str],
    tolerances: Tolerances,
    device: torch.device,
    trial: Trial | None,
    with_backward: bool,
) -> AttentionTrials:
    """Set the first attention to pass the proof; with a trial, the fastest, unless a kernel of BY_BOUNDS passes."""
    inner = model.model
    refused: dict[str, str] = {}
    faults: dict[str, str] = {}
    passed: dict[str, float] = {}  # seconds of a step
    for choice in choices or [inner.config._attn_implementation]:
        if passed and choice == "eager":
            break  # eager attention holds all scores of a pack
        if (fault := agreed(set_fault(model, choice))) is None:
            attention = inner.config._attn_implementation  # transformers may set another
            backward = with_backward or attention not in _OWN_BACKWARD
            if attention in faults or attention in passed:
                fault = "cannot be set"
            elif fault := find_fault(model, tolerances, device=device, backward=backward):
                faults[attention] = fault
            elif trial is None or len(choices) < 2 or attention in BY_BOUNDS:
                return AttentionTrials(is_chosen=True, refused=refused, faults=faults)
            else:
                passed[attention] = slowest(trial(model, device))
                continue
        refused[choice] = fault
    if passed:
        refused |= _take_fastest(model, passed)
    return AttentionTrials(is_chosen=bool(passed), refused=refused, faults=faults)


def _run_by_sample(model: PackedModel, choices: Sequence[str], tolerances: Tolerances, device: torch.device) -> None:
    """Run layers that carry state on each sample alone, if a search under any attention finds layers."""
    for choice in choices or [model.model.config._attn_implementation]:
        fault = set_fault(model, choice)
        if fault is None:
            try:
                run_by_sample(model, tolerances, device)
            except FAILURES as error:
                fault = one_line(error)
        if fault is None and (model.by_sample is None or not model.by_sample.calls):
            fault = "has no layer to run on each sample alone"
        if agreed(fault) is None:
            return
        leave_by_sample(model)


def _remedy(model: PackedModel, choices: Sequence[str]) -> str:
    if not choices:
        return "set model.attention to auto"
    if model.sequence is not None:
        return "set train.sequence_parallel to 1"
    return (
        "no setting changes that: take another model, or run packs of one sample (max_samples_per_pack=1) in a loop of "
        "your own"
    )


def _take_fastest(model: PackedModel, passed: Mapping[str, float]) -> dict[str, str]:
    """Set the fastest implementation; return reasons against the rest by name. passed: name -> seconds of a step."""
    best = min(passed, key=lambda name: passed[name])
    if fault := agreed(set_fault(model, best)):
        raise ConfigError(f"attention {best} {fault}, after it passed the proof: set model.attention to another")
    return {
        name: f"takes {seconds / passed[best]:.2f} times as long" for name, seconds in passed.items() if name != best
    }


def _bound(choices: list[str], attentions: Sequence[str]) -> dict[str, str]:
    """Keep only a family's attentions in `choices`; return the reason against each other name."""
    others = {name: "is none for the media of this model" for name in choices if not _is_known(name, attentions)}
    choices[:] = [name for name in choices if name not in others]
    return others


def _is_known(attention: str, attentions: Sequence[str]) -> bool:
    """Return whether a family has an attention; the kernels of BY_BOUNDS attend alike."""
    return attention in attentions or (attention in BY_BOUNDS and "flash_attention_2" in attentions)


def set_fault(model: PackedModel, attention: str) -> str | None:
    """Set an implementation of attention; return the reason if this fails."""
    if missing := missing_in(attention, model.model.config, (name for name, _ in model.named_parameters())):
        return missing
    if attention == model.model.config._attn_implementation:
        return None
    try:
        with may_be_set(attention):
            model.model.set_attn_implementation(attention)
        if attention == VARLEN:
            run_towers_by_bounds({*model.towers.values()})
    except FAILURES as error:
        return f"cannot be set ({one_line(error)})"
    return None


def _choose_logits_way(model: PackedModel, tolerances: Tolerances, device: torch.device) -> None:
    """Set the way with the least memory; its losses must match losses of the model's own logits."""
    batch = pack_of(text_samples(model)).to(device)
    learnt, targets = model.learnt(batch.labels)
    logits = model.logits(batch)[0, learnt]
    losses, _ = losses_of_logits(logits, targets)
    allowed = tolerances.alone * float(logits.float().std())
    for way in model.logits_ways:
        model.logits_way = way
        try:
            found = model(batch).tokens
        except FAILURES as error:  # the model's forward takes no hidden states of its base model
            if way == "whole":
                raise
            fault: str | None = one_line(error)
        else:
            fault = None if float((found - losses).abs().max()) <= allowed else "other losses"
        if agreed(fault) is None:
            return


@contextmanager
def evaluating(model: PackedModel) -> Iterator[None]:
    """Run the model in evaluation mode inside; then restore the mode of each module, and reshard the model."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training
        reshard(model)


# Seconds of a step with the current attention: a forward and a backward pass of a pack.

Trial = Callable[[PackedModel, torch.device], float]  # seconds of a step on this rank; all ranks call it
NUM_TOKENS = 4096
_REPEATS = 3


def step_seconds(model: PackedModel, device: torch.device) -> float:
    """Return the shortest time of a few steps, after a first step for compilation; infinity if memory runs out.

    The steps are of a usual pack of the run, if known. Afterwards the model has no gradients.
    """
    segments = segments_of(model)
    if lengths := model.usual_lengths():
        every = np.concatenate(segments)
        segments, repeats = [np.resize(every, length) for length in lengths], 1
    else:
        repeats = max(1, NUM_TOKENS // sum(map(len, segments)))
    samples = [{"input_ids": ids, "labels": ids} for ids in segments * repeats]
    pack = collate(samples, range(len(samples))).to(device)
    try:
        return min([_seconds(model, pack, device) for _ in range(1 + _REPEATS)][1:])
    except torch.OutOfMemoryError:
        return math.inf
    finally:
        model.zero_grad()


def _seconds(model: PackedModel, pack: Batch, device: torch.device) -> float:
    _wait(device)
    begun = time.perf_counter()
    with torch.enable_grad():
        model(pack).tokens.sum().backward()
    _wait(device)
    return time.perf_counter() - begun


def slowest(seconds: float) -> float:
    """Return the maximum over ranks, for the same choice on each rank; all ranks call it."""
    if not dist.is_initialized():
        return seconds
    return float(gather([seconds], dist.get_world_size()).max())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Keyword arguments of a batch for a transformers model in a user's own loop, and the proof.
#
# A trainer proves its model once, before the first step. In a user's loop the model is proven with its first batch, and
# again after each change of its attention.

_ATTRIBUTE = "_lmms_stream_own_loop"
_WRAPPED = ("module", "_orig_mod")  # names of the inner model in wrappers (DDP, torch.compile)
_ONE_SAMPLE = "make packs of one sample (max_samples_per_pack=1, without pad_to)"


@dataclass(eq=False)
class _Known:
    """State of a model in a user's loop, with a family of media or none.

    proven: attention of the last passed proof. is_later: another family, or none, was proven before.
    """

    packed: PackedModel
    proven: str | None = None
    is_later: bool = False


def arguments_of(batch: Batch, model: Any, processor: Processor | None = None) -> dict[str, Any]:
    """Return the keyword arguments of a model's forward pass for a batch, and labels; see Batch.for_model."""
    known = _known(model, batch, processor)
    packed = known.packed
    if packed.model.config._attn_implementation != known.proven and _needs_proof(known, batch):
        _prove(known)
    if len(batch.cu_seqlens) > 2:  # several samples
        check_lengths(packed.model.config, batch)
    return {**packed._run_inputs(batch), "labels": batch.labels}


def _needs_proof(known: _Known, batch: Batch) -> bool:
    """Return whether a model needs a proof: the same on all ranks, whatever their batches hold.

    ConfigError if only ranks with such a batch would make the proof.
    """
    holds_several = len(batch.cu_seqlens) > 2
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return holds_several
    reason = ""
    if batch.holds_one and holds_several:
        reason = "its packs are of one sample, by max_samples_per_pack, and this sample has several sequences"
    elif not batch.holds_one and known.is_later and known.proven is None:
        reason = "it was proven with another processor, or without one, and other ranks may have batches of that one"
    if reason:
        raise ConfigError(
            f"{type(known.packed.model).__name__} is not proven to keep the samples of this batch apart, because "
            f"{reason}: call check_isolation(model, batch, processor) on all ranks before the first step"
        )
    return not batch.holds_one


def padded_arguments_of(batch: Batch, model: Any, processor: Processor | None = None) -> dict[str, Any]:
    """Return the arguments and labels of a batch of rows, a row for each segment of a pack; see Batch.for_model."""
    bounds = batch.cu_seqlens[: batch.num_segments + 1].tolist()
    if not batch.num_segments:  # only padding: a row without labels
        bounds = [0, batch.num_tokens]
    rows = {
        "input_ids": _in_rows(batch.input_ids, bounds, PAD_TOKEN_ID),
        "labels": _in_rows(batch.labels, bounds, IGNORED_LABEL),
        "attention_mask": _in_rows(torch.ones_like(batch.input_ids), bounds),
        "use_cache": False,
    }
    if not batch.inputs and not batch.token_inputs:
        return rows
    packed = _known(model, batch, processor).packed
    media = model_inputs(packed.family, packed.media_model, batch.inputs)
    of_tokens = packed._token_inputs(batch)
    positions = batch.position_ids
    if media and packed.counts_axes:
        given = {"input_ids": batch.input_ids, **media, **of_tokens}
        positions = positions_along_axes(packed.media_model, batch, given)
    if positions.ndim == 3:  # [axes, 1, T]
        rows["position_ids"] = torch.stack([_in_rows(axis, bounds) for axis in positions])
    return {**rows, **{name: _in_rows(values, bounds) for name, values in of_tokens.items()}, **media}


def _in_rows(values: torch.Tensor, bounds: Sequence[int], fill: int = 0) -> torch.Tensor:
    """Cut values of tokens into rows: [1, T] -> [len(bounds) - 1, longest]."""
    rows = [values[0, start:stop] for start, stop in pairwise(bounds)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def check_isolation(model: Any, batch: Batch, processor: Processor | None = None) -> None:
    """Raise ConfigError unless a transformers model keeps the samples of a pack apart, given Batch.for_model.

    First the batch is checked: the model must have all tokens of the batch, and positions for the longest sample. Then
    the proof runs the model on random tokens, in packs and sample by sample, with the current attention, device and
    number format (also of autocast); with a media processor, on random media, too. The model, gradients and the state
    of random numbers do not change. All ranks of a process group call this function together.
    """
    known = _known(model, batch, processor)
    check_lengths(known.packed.model.config, batch)
    known.packed.check_tokens(batch.to(torch.device("cpu")))
    _prove(known)


def _known(model: Any, batch: Batch, processor: Processor | None) -> _Known:
    """Return the state of the transformers model inside wrappers.

    ConfigError for other models, and for media without a processor.
    """
    from transformers import PreTrainedModel

    inner = model
    while not isinstance(inner, PreTrainedModel) and (inside := _inside(inner)) is not None:
        inner = inside
    if not isinstance(inner, PreTrainedModel):
        raise ConfigError(
            f"a {type(model).__name__} is not a model of transformers: for_model cannot know its arguments; give your "
            "model batch.input_ids, and have it keep samples apart by batch.position_ids or batch.cu_seqlens"
        )
    family = family_of([processor], inner.config)
    media = [*batch.inputs, *batch.token_inputs]
    if family is None and media:
        raise ConfigError(
            f"the batch holds media ({', '.join(media)}), and only its processor can convert media to inputs of this "
            "model: call batch.for_model(model, processor)"
        )
    every: list[_Known] = vars(inner).setdefault(_ATTRIBUTE, [])  # not as a module of the model
    known = next((each for each in every if family is None or each.packed.family is family), None)
    if known is None:
        known = _Known(PackedModel(inner, family), is_later=any(each.proven is not None for each in every))
        every.append(known)
    return known


def _inside(wrapper: Any) -> Any:
    """Return the model inside a wrapper (DDP, torch.compile, peft), or None."""
    modules: dict[str, Any] = getattr(wrapper, "_modules", {})
    inside = next((modules[name] for name in _WRAPPED if name in modules), None)
    if inside is None and hasattr(wrapper, "get_base_model"):
        inside = wrapper.get_base_model()
    return inside


def _prove(known: _Known) -> None:
    """Raise ConfigError if the model does not keep samples apart; all ranks call it."""
    packed, attention = known.packed, known.packed.model.config._attn_implementation
    device = next(packed.parameters()).device
    named = type(packed.model).__name__
    if packed.family is not None and attention not in packed.family.attentions:
        first = next(each for each in ("sdpa", *packed.family.attentions) if each in packed.family.attentions)
        raise ConfigError(
            f"attention {attention} does not keep samples with media apart in {named}: call "
            f'model.set_attn_implementation("{first}")'
        )
    with evaluating(packed), torch.no_grad():
        tolerances = tolerances_of(packed, bf16=torch.is_autocast_enabled(device.type))
        found = keep_apart(packed, tolerances, device=device, with_backward=False)
    if not found.is_chosen:
        better = "sdpa" if packed.model._supports_sdpa and not missing_in("sdpa", packed.model.config) else "eager"
        fault, is_proven = found.refused[attention], attention in found.faults
        has_better = attention not in ("sdpa", "eager") if is_proven else attention != better
        other = f'call model.set_attn_implementation("{better}"), or ' if has_better else ""
        raise ConfigError(f"{named} with attention {attention} {fault}: {other}{_ONE_SAMPLE}")
    known.proven = attention
