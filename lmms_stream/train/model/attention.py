"""Which implementations of attention to try for a model on this machine, the best first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from ...errors import ConfigError
from . import varlen

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Attention = Literal["auto", "sdpa", "sdpa_varlen", "eager", "flash_attention_2", "flex_attention"]
_FLAGS = {
    "flash_attention_2": ("_supports_flash_attn", "_supports_flash_attn_2"),
    "flex_attention": ("_supports_flex_attn",),
    "sdpa": ("_supports_sdpa",),
}


def implementations(attention: Attention, model_class: Any, config: PretrainedConfig) -> list[str]:
    """The implementations to try for a transformers class, the best first; a named attention is the only one.

    ConfigError for an attention that this machine or this class cannot train with.
    """
    from transformers.utils.import_utils import is_flash_attn_2_available

    cuda = torch.cuda.is_available()
    if attention == "flex_attention" and not cuda:
        raise ConfigError("attention flex_attention has no backward pass on the CPU: choose sdpa, eager or auto")
    has_flash = is_flash_attn_2_available()
    if attention == "flash_attention_2" and not has_flash:
        raise ConfigError("attention flash_attention_2 needs CUDA and pip install flash-attn: or choose sdpa or auto")
    varlen.register()
    if attention == varlen.SDPA_VARLEN and not varlen.has_varlen(model_class, config):
        raise ConfigError(
            f"attention {attention} is for models of text whose layers see all before them, or a window, and "
            f"{model_class.__name__} is none: choose sdpa or auto"
        )
    if attention != "auto":
        return [attention]
    here = ["flash_attention_2"] * has_flash + ["flex_attention"] * cuda + [varlen.SDPA_VARLEN, "sdpa"]
    return [*(each for each in here if _has(each, model_class, config)), "eager"]


def _has(attention: str, model_class: Any, config: PretrainedConfig) -> bool:
    if attention == varlen.SDPA_VARLEN:
        return varlen.has_varlen(model_class, config)
    return any(getattr(model_class, flag, False) for flag in _FLAGS[attention])
