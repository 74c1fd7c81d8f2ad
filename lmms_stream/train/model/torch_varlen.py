"""Attention of each sample of a pack by itself, by torch's own kernel for GPUs: "varlen".

torch.nn.attention.varlen is in torch from 2.10 on, and takes float16 and bfloat16. It was not tried on a GPU here: the
proof (isolation) runs it before a run may train with it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

VARLEN = "varlen"


def reason_against() -> str | None:
    """Why this machine cannot train with it; None where it can."""
    if find_spec("torch.nn.attention.varlen") is None:
        return "needs torch 2.10 or later"
    return None if torch.cuda.is_available() else "needs CUDA"


def register() -> None:
    """Make this attention known to transformers, which makes no mask for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN, _attend)


def _attend(
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
