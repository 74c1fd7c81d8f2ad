"""Implementations of attention to try for a model on this machine, the best first; and our own implementations."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from ...errors import ConfigError
from ...registry import imported
from ...versions.transformers import attention_is_ours

if TYPE_CHECKING:
    from transformers import PretrainedConfig


# Attention of each sample of a pack by itself, with torch's scaled_dot_product_attention: "sdpa_varlen".
#
# With a mask, sdpa on the CPU computes T x T scores for a pack of T tokens, and discards most scores. "sdpa_varlen"
# computes t x t scores for each sample of t tokens. transformers makes no mask for an unknown implementation. Media
# towers attend within a medium or window at a time.

SDPA_VARLEN = "sdpa_varlen"
_MORE = 8  # numbers that sinks add to a head
_PLAIN_LAYERS = {"full_attention", "sliding_attention", "linear_attention", "mamba", "conv", "recurrent", "moe", "mlp"}


def has_varlen(model_class: Any, config: Any, *, has_causal_media: bool = False) -> bool:
    """Return whether a transformers model can run with sdpa_varlen: tokens of text see all earlier tokens, or a window.

    A model with media must have positions along axes: without axes media tokens may see later tokens (Gemma 3).
    has_causal_media: media tokens see no later tokens, by the family's attentions.
    """
    text = config.get_text_config()
    return (
        bool(getattr(model_class, "_supports_attention_backend", False))
        and (text is config or has_axes(config) or has_causal_media)
        and _has_plain_layers(text)
    )


def _has_plain_layers(config: Any) -> bool:
    is_chunked = bool(getattr(config, "attention_chunk_size", None))
    return not is_chunked and set(getattr(config, "layer_types", None) or ()) <= _PLAIN_LAYERS


def has_axes(config: Any) -> bool:
    """Return whether positions have axes, for example time, height and width (Qwen2-VL)."""
    return "mrope_section" in (getattr(config.get_text_config(), "rope_scaling", None) or {})


def may_be_set(attention: str) -> AbstractContextManager[None]:
    """Allow setting an attention inside this context, also sdpa_varlen for a model without transformers' sdpa."""
    return attention_is_ours() if attention == SDPA_VARLEN else nullcontext()


def _attend_to_all(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sequence_group: dist.ProcessGroup | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by _attend. sequence_group: ranks with parts of the tokens; each rank computes some of the heads."""
    if sequence_group is None:
        return _attend(module, query, key, value, attention_mask, **others)
    attend_over_heads = imported("plugins.parallel.sequence:attend_over_heads")
    return attend_over_heads(_attend, module, (query, key, value), attention_mask, sequence_group, others), None


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within samples: query float[1, heads, T, d] -> float[1, T, heads, d].

    key, value: float[1, groups of heads, T, d]. cu_seq_lens_q: int32[samples + 1] on the CPU, bounds of samples; a
    tensor, because a list of numbers would compile a block again for each list. ValueError for causal attention with a
    mask, with a softcap or without bounds, and for other attention with a mask but without bounds.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not getattr(module, "is_causal", True) and attention_mask is None and cu_seq_lens_q is None:
        found, _ = sdpa_attention_forward(module, query, key, value, None, dropout=dropout, scaling=scaling, **others)
        return found, None
    if cu_seq_lens_q is not None and not getattr(module, "is_causal", True):
        return _attend_both_ways(module, query, key, value, attention_mask, cu_seq_lens_q, dropout, scaling), None
    if cu_seq_lens_q is None or attention_mask is not None or not getattr(module, "is_causal", True):
        raise ValueError(
            f"{SDPA_VARLEN} is for packs, and models that tell their attention where samples begin: for anything else "
            'call model.set_attn_implementation("sdpa")'
        )
    if softcap is not None:
        raise ValueError(f"{SDPA_VARLEN} has no softcap")
    attended = []
    for start, stop in pairwise(cu_seq_lens_q.tolist()):
        window = _window(stop - start, sliding_window, query.device)
        queries, keys, values = (each[:, :, start:stop] for each in (query, key, value))
        if s_aux is not None:
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            queries, keys, values, window = _with_sink(queries, keys, values, window, s_aux, scaling)
        found, _ = sdpa_attention_forward(module, queries, keys, values, window, dropout=dropout, scaling=scaling)
        attended.append(found if s_aux is None else found[:, 1:, :, : query.shape[-1]])
    return torch.cat(attended, dim=1), None


def _with_sink(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: torch.Tensor | None,
    sinks: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return a sample with a new first token that takes the attention of the heads' sinks, and has a value of zeros.

    A sink is a further score in the softmax (gpt-oss). sinks: float[heads]. Each query gets the head's sink for a last
    number. The last number of the first key is 1 / scaling, of other keys 0: the score of the first key is the sink.
    Heads grow by 8 numbers, because kernels need multiples of 8.
    """
    queries, keys, values = (torch.nn.functional.pad(each, (0, _MORE, 1, 0)) for each in (queries, keys, values))
    queries[..., -1] = sinks.to(queries.dtype)[None, :, None]
    keys[..., 0, -1] = 1 / scaling
    if window is not None:
        window = torch.nn.functional.pad(window, (1, 0, 1, 0), value=True)
        window[..., 0, 1:] = False
    return queries, keys, values, window


def _attend_both_ways(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    bounds: torch.Tensor,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Attend within each pair of bounds, in both directions, for towers of sound.

    For Qwen3-Omni, transformers before 5.9 gives sdpa and eager no mask, and clips see each other; here clips are kept
    apart. A mask applies within each pair of bounds.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    attended = []
    for start, stop in pairwise(bounds.tolist()):
        queries, keys, values = (each[:, :, start:stop] for each in (query, key, value))
        mask = None if attention_mask is None else attention_mask[..., start:stop, start:stop]
        found, _ = sdpa_attention_forward(
            module, queries, keys, values, mask, dropout=dropout, scaling=scaling, is_causal=False
        )
        attended.append(found)
    return torch.cat(attended, dim=1)


def _window(length: int, sliding_window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return the mask of a window, bool[1, 1, length, length]; None if each token sees all earlier tokens."""
    if sliding_window is None or length <= sliding_window:
        return None
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen.triu(1 - sliding_window)[None, None]


# Attention of each sample of a pack by itself, by torch's own kernel for GPUs: "varlen", for float16 and bfloat16.
# The proof (isolation.py) runs it before a run may train with it.
#
# Media towers of transformers attend image by image, or window by window, except with an attention with "flash" in its
# name: a tower then calls the attention once per layer, with the bounds of all images or windows.

VARLEN = "varlen"
_OF_TOWERS = "flash_varlen"
# Kernels that take the bounds of samples, the best first: with no score between samples, nothing is faster.
BY_BOUNDS = ("flash_attention_3", "flash_attention_2", VARLEN)


def run_towers_by_bounds(towers: Iterable[Any]) -> None:
    """Let media towers attend by the kernel of "varlen", if their code can."""
    for tower in towers:
        if getattr(tower, "_supports_flash_attn", False):
            tower.config._attn_implementation = _OF_TOWERS


def _attend_by_kernel(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within samples: query float[1, heads, T, d] -> float[1, T, heads, d].

    key, value: float[1, groups of heads, T, d]. cu_seq_lens_q: int32[samples + 1], bounds of samples. max_length_q:
    length of the longest sample. ValueError for a mask, for causal attention without bounds, and for a softcap, sinks
    and dropout.
    """
    from torch.nn.attention.varlen import varlen_attn

    is_causal = getattr(module, "is_causal", True)
    if cu_seq_lens_q is None and attention_mask is None and not is_causal:  # a tower, on a medium
        return _attend(module, query, key, value, None, dropout=dropout, scaling=scaling)
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None:
        raise ValueError(f"{VARLEN} needs packs, and models that pass the bounds of samples to their attention")
    if softcap is not None or s_aux is not None or dropout:
        raise ValueError(f"{VARLEN} has no softcap, no sinks and no dropout")
    behind = 0 if is_causal else -1  # later tokens that each token sees; -1: all
    has_groups = query.shape[1] != key.shape[1]
    groups: dict[str, Any] = {"enable_gqa": True} if has_groups and _has_argument_for_groups(varlen_attn) else {}
    found = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, behind),
        **groups,
    )
    assert isinstance(found, torch.Tensor)
    return found[None], None


@cache
def _has_argument_for_groups(kernel: Any) -> bool:
    """Return whether a kernel has an argument for groups of heads; torch 2.11 takes groups without an argument."""
    return "enable_gqa" in inspect.signature(kernel).parameters


Attention = Literal[
    "auto", "sdpa", "sdpa_varlen", "varlen", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"
]  # fmt: skip
_FLASH = ("_supports_flash_attn", "_supports_flash_attn_2")
_FLAGS = {
    "flash_attention_3": _FLASH,
    "flash_attention_2": _FLASH,
    VARLEN: _FLASH,  # in place of these
    SDPA_VARLEN: (),
    "flex_attention": ("_supports_flex_attn",),
    "sdpa": ("_supports_sdpa",),
}
_OF_TEXT = (VARLEN, SDPA_VARLEN)  # for packs of text: see has_varlen
_BEST_FIRST = (*BY_BOUNDS, "flex_attention", SDPA_VARLEN, "sdpa")


def implementations(
    attention: Attention, model_class: Any, config: PretrainedConfig
) -> tuple[list[str], dict[str, str]]:
    """Return the implementations to try for a transformers class, the best first, and reasons against others by name.

    A named attention is the only implementation to try. ConfigError if this machine or class cannot train with it.
    """
    from transformers import AttentionInterface

    # Not compiled: the loop runs once per sample, and packs have any number of samples.
    AttentionInterface.register(SDPA_VARLEN, torch.compiler.disable(_attend_to_all))
    AttentionInterface.register(VARLEN, _attend_by_kernel)
    AttentionInterface.register(_OF_TOWERS, _attend_by_kernel)
    reasons = {name: _reason(name, model_class, config) for name in _BEST_FIRST}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    choices = [*(name for name in _BEST_FIRST if name not in left_out), "eager"]
    if attention in left_out:
        raise ConfigError(f"attention {attention} {left_out[attention]}: choose {', '.join(choices)} or auto")
    return (choices, left_out) if attention == "auto" else ([attention], {})


def missing_in(attention: str, config: PretrainedConfig, parameters: Iterable[str] = ()) -> str | None:
    """Return the reason against an implementation that leaves out a part of a model's attention, or None.

    Some versions of transformers raise no error, and no proof finds the omission: samples alone and in packs are equal.
    parameters: names of the model's parameters.
    """
    if attention in BY_BOUNDS and any(name.endswith(".sinks") for name in parameters):
        return "leaves out the sinks of its heads"
    has_softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if has_softcap and attention in ("sdpa", *_OF_TEXT):  # sdpa: without an error before transformers 5.21
        return "leaves out the softcap of attention scores"
    return None


def _reason(attention: str, model_class: Any, config: PretrainedConfig) -> str | None:
    """Return the reason against an implementation for a class on this machine, or None."""
    if reason := _reason_of_machine(attention):
        return reason
    if reason := missing_in(attention, config):
        return reason
    has = any(getattr(model_class, flag, False) for flag in _FLAGS[attention])
    if attention in _OF_TEXT:
        if has_varlen(model_class, config) or (has and _has_plain_layers(config.get_text_config())):
            return None
        return (
            f"is for models of text whose layers see all before them, or a window, and {model_class.__name__} is none"
        )
    return None if has else f"is not in transformers' {model_class.__name__}"


def _reason_of_machine(attention: str) -> str | None:
    from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

    if attention == "flash_attention_2" and not is_flash_attn_2_available():
        return "needs CUDA and pip install flash-attn"
    if attention == "flash_attention_3" and not is_flash_attn_3_available():
        return "needs a Hopper GPU and flash-attn's hopper package"
    if attention == "flex_attention" and not torch.cuda.is_available():
        return "has no backward pass on the CPU"
    if attention == VARLEN and not torch.cuda.is_available():
        return "needs CUDA"
    return None
