"""Implementations of attention to try for a model on this machine, the best first; and "varlen", by torch's kernel."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...errors import ConfigError
from .varlen import SDPA_VARLEN, has_varlen, register

if TYPE_CHECKING:
    from transformers import PretrainedConfig


# Attention of each sample of a pack by itself, by torch's own kernel for GPUs: "varlen", for float16 and bfloat16.
# The proof (isolation.py) runs it before a run may train with it.

VARLEN = "varlen"


def reason_against_varlen() -> str | None:
    """Return why this machine cannot train with it, or None."""
    if find_spec("torch.nn.attention.varlen") is None:
        return "needs torch 2.10 or later"
    return None if torch.cuda.is_available() else "needs CUDA"


def register_varlen() -> None:
    """Register this attention with transformers, which makes no mask for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN, _attend_by_kernel)


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
    """query: float[1, heads, T, d]; key, value: float[1, groups of heads, T, d] -> float[1, T, heads, d].

    cu_seq_lens_q: int32[samples + 1], offsets at which samples begin and end; max_length_q: the longest sample.
    ValueError for what the kernel cannot do.
    """
    from torch.nn.attention.varlen import varlen_attn

    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None:
        raise ValueError(f"{VARLEN} is for packs, of models that tell their attention where samples begin")
    if softcap is not None or s_aux is not None or dropout:
        raise ValueError(f"{VARLEN} has no softcap, no sinks and no dropout")
    behind = 0 if getattr(module, "is_causal", True) else -1  # tokens that are seen behind each one; -1: all
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
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(found, torch.Tensor)
    return found[None], None


Attention = Literal["auto", "sdpa", "sdpa_varlen", "varlen", "eager", "flash_attention_2", "flex_attention"]
_FLAGS = {
    "flash_attention_2": ("_supports_flash_attn", "_supports_flash_attn_2"),
    "flex_attention": ("_supports_flex_attn",),
    "sdpa": ("_supports_sdpa",),
}
_OF_TEXT = (VARLEN, SDPA_VARLEN)  # for packs of text: see has_varlen
_BEST_FIRST = ("flash_attention_2", VARLEN, "flex_attention", SDPA_VARLEN, "sdpa")


def implementations(
    attention: Attention, model_class: Any, config: PretrainedConfig
) -> tuple[list[str], dict[str, str]]:
    """The implementations to try for a transformers class, the best first, and why others are not tried, by name.

    A named attention is the only one. ConfigError for one that this machine or this class cannot train with.
    """
    register()
    register_varlen()
    reasons = {name: _reason(name, model_class, config) for name in _BEST_FIRST}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    choices = [*(name for name in _BEST_FIRST if name not in left_out), "eager"]
    if attention in left_out:
        raise ConfigError(f"attention {attention} {left_out[attention]}: choose {', '.join(choices)} or auto")
    return (choices, left_out) if attention == "auto" else ([attention], {})


def missing_in(attention: str, config: PretrainedConfig, parameters: Iterable[str] = ()) -> str | None:
    """Return the part of a model's attention that an implementation leaves out, silently in some versions of
    transformers.

    parameters: the names of the model's. Samples alone and in packs come out the same, so no proof finds it.
    """
    if attention == "flash_attention_2" and any(name.endswith(".sinks") for name in parameters):
        return "leaves out the sinks of its heads"
    has_softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if has_softcap and attention in ("sdpa", *_OF_TEXT):  # sdpa: without an error before transformers 5.21
        return "leaves out the softcap of attention scores"
    return None


def _reason(attention: str, model_class: Any, config: PretrainedConfig) -> str | None:
    """Return why a class cannot use an implementation on this machine, or None."""
    if reason := _reason_of_machine(attention):
        return reason
    if reason := missing_in(attention, config):
        return reason
    if attention in _OF_TEXT:
        if has_varlen(model_class, config):
            return None
        return (
            f"is for models of text whose layers see all before them, or a window, and {model_class.__name__} is none"
        )
    has = any(getattr(model_class, flag, False) for flag in _FLAGS[attention])
    return None if has else f"is not in transformers' {model_class.__name__}"


def _reason_of_machine(attention: str) -> str | None:
    from transformers.utils.import_utils import is_flash_attn_2_available

    if attention == "flash_attention_2" and not is_flash_attn_2_available():
        return "needs CUDA and pip install flash-attn"
    if attention == "flex_attention" and not torch.cuda.is_available():
        return "has no backward pass on the CPU"
    if attention == VARLEN:
        return reason_against_varlen()
    return None
