"""What a loop of the user's own gives a transformers model for a batch. batch + model -> keyword arguments, proof.

A trainer proves its model once, before the first step. A loop of one's own has no such moment, so a model is proven
when it is first given a batch, and once more for each other implementation of attention that is set on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ConfigError
from ...processors.base import Processor
from ...types import Batch
from .attention import missing_in
from .choice import keep_apart, proving
from .isolation import check_lengths, tolerances_of
from .model import PackedModel
from .towers import family_of

_ATTRIBUTE = "_lmms_stream_own_loop"
_WRAPPED = ("module", "_orig_mod")  # what wrappers such as DDP and torch.compile call the model inside of them
_ONE_SAMPLE = "make packs of one sample (max_samples_per_pack=1, without pad_to)"


@dataclass(eq=False)
class _Known:
    """What is known of a model that was given batches. proven: the attention with which it passed the proof last."""

    packed: PackedModel
    proven: str | None = None


def arguments_of(batch: Batch, model: Any, processor: Processor | None = None) -> dict[str, Any]:
    """The keyword arguments of Batch.for_model; see there."""
    known = _known(model, batch, processor)
    packed = known.packed
    if len(batch.cu_seqlens) > 2:  # a sample alone is kept apart from none
        check_lengths(packed.model.config, batch)
        if packed.model.config._attn_implementation != known.proven:
            _prove(known)
    return packed._run_inputs(batch)


def check_isolation(model: Any, batch: Batch, processor: Processor | None = None) -> None:
    """Prove that a transformers model keeps the samples of a pack apart, given Batch.for_model; or raise ConfigError.

    The proof runs the model, as it is, on random tokens in packs and by themselves, with its attention, its device and
    its number format, that of autocast too. With a processor of media, on random media too. The model, its gradients
    and the state of random numbers stay as they are. Then the batch is checked: that the model has its tokens, and that
    its samples are no longer than positions reach. All ranks of a process group call it together.
    """
    known = _known(model, batch, processor)
    check_lengths(known.packed.model.config, batch)
    known.packed.check_tokens(batch.to(torch.device("cpu")))
    _prove(known)


def _known(model: Any, batch: Batch, processor: Processor | None) -> _Known:
    """What is known of the transformers model that wrappers may hold; ConfigError for another one."""
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
            f"the batch holds media ({', '.join(media)}), and only the processor that made it knows how this model "
            "takes them: call batch.for_model(model, processor)"
        )
    known: _Known | None = getattr(inner, _ATTRIBUTE, None)
    if known is None or (family is not None and known.packed.family is not family):
        known = _Known(PackedModel(inner, family))
        object.__setattr__(inner, _ATTRIBUTE, known)  # not as a module of the model
    return known


def _inside(wrapper: Any) -> Any:
    """The model inside of what wraps one (DDP, torch.compile, peft), or None."""
    modules: dict[str, Any] = getattr(wrapper, "_modules", {})
    inside = next((modules[name] for name in _WRAPPED if name in modules), None)
    if inside is None and hasattr(wrapper, "get_base_model"):
        inside = wrapper.get_base_model()
    return inside


def _prove(known: _Known) -> None:
    """ConfigError where the model does not keep samples apart; all ranks call it."""
    packed, attention = known.packed, known.packed.model.config._attn_implementation
    device = next(packed.parameters()).device
    named = type(packed.model).__name__
    if packed.family is not None and attention not in packed.family.attentions:
        first = next(each for each in ("sdpa", *packed.family.attentions) if each in packed.family.attentions)
        raise ConfigError(
            f"attention {attention} does not keep samples with media apart in {named}: call "
            f'model.set_attn_implementation("{first}")'
        )
    with proving(packed), torch.no_grad():
        tolerances = tolerances_of(packed, bf16=torch.is_autocast_enabled(device.type))
        found = keep_apart(packed, tolerances, device=device, with_backward=False)
    if not found.is_chosen:
        better = "sdpa" if packed.model._supports_sdpa and not missing_in("sdpa", packed.model.config) else "eager"
        fault, is_proven = found.refused[attention], attention in found.faults
        has_better = attention not in ("sdpa", "eager") if is_proven else attention != better
        other = f'call model.set_attn_implementation("{better}"), or ' if has_better else ""
        raise ConfigError(f"{named} with attention {attention} {fault}: {other}{_ONE_SAMPLE}")
    known.proven = attention
