"""Which implementations of attention to try for a model on this machine, the best first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...errors import ConfigError
from . import torch_varlen, varlen

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Attention = Literal["auto", "sdpa", "sdpa_varlen", "varlen", "eager", "flash_attention_2", "flex_attention"]
_FLAGS = {
    "flash_attention_2": ("_supports_flash_attn", "_supports_flash_attn_2"),
    "flex_attention": ("_supports_flex_attn",),
    "sdpa": ("_supports_sdpa",),
}
_OF_TEXT = (torch_varlen.VARLEN, varlen.SDPA_VARLEN)  # for packs of text: see has_varlen
_BEST_FIRST = ("flash_attention_2", torch_varlen.VARLEN, "flex_attention", varlen.SDPA_VARLEN, "sdpa")


def implementations(
    attention: Attention, model_class: Any, config: PretrainedConfig
) -> tuple[list[str], dict[str, str]]:
    """The implementations to try for a transformers class, the best first, and why others are not tried, by name.

    A named attention is the only one. ConfigError for one that this machine or this class cannot train with.
    """
    varlen.register()
    torch_varlen.register()
    reasons = {name: _reason(name, model_class, config) for name in _BEST_FIRST}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    choices = [*(name for name in _BEST_FIRST if name not in left_out), "eager"]
    if attention in left_out:
        raise ConfigError(f"attention {attention} {left_out[attention]}: choose {', '.join(choices)} or auto")
    return (choices, left_out) if attention == "auto" else ([attention], {})


def missing_in(attention: str, config: PretrainedConfig, parameters: Iterable[str] = ()) -> str | None:
    """What of a model's attention an implementation leaves out, without a word in some versions of transformers.

    parameters: the names of the model's. Samples alone and in packs come out the same, so no proof finds it.
    """
    if attention == "flash_attention_2" and any(name.endswith(".sinks") for name in parameters):
        return "leaves out the sinks of its heads"
    has_softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if has_softcap and attention in ("sdpa", *_OF_TEXT):  # sdpa: without an error before transformers 5.21
        return "leaves out the softcap of attention scores"
    return None


def _reason(attention: str, model_class: Any, config: PretrainedConfig) -> str | None:
    """Why an implementation is none for a class on this machine; None where it is one."""
    if reason := _reason_of_machine(attention):
        return reason
    if reason := missing_in(attention, config):
        return reason
    if attention in _OF_TEXT:
        if varlen.has_varlen(model_class, config):
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
    if attention == torch_varlen.VARLEN:
        return torch_varlen.reason_against()
    return None
