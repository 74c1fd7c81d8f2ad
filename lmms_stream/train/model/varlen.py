"""Attention of each sample of a pack by itself, with torch's scaled_dot_product_attention: "sdpa_varlen".

With a mask, sdpa on the CPU computes all T x T scores of a pack of T tokens, and discards most; here it computes the
t x t of each sample of t tokens. transformers makes no mask for an implementation that it does not know. The towers of
models that read media call it for one medium, or one window, at a time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ...registry import imported
from ...versions.transformers import attention_is_ours

SDPA_VARLEN = "sdpa_varlen"
_MORE = 8  # numbers of a head that sinks add
_PLAIN_LAYERS = {"full_attention", "sliding_attention", "linear_attention", "mamba", "conv", "recurrent", "moe", "mlp"}


def has_varlen(model_class: Any, config: Any) -> bool:
    """Whether a transformers model can run with it: one whose layers see all before them, or a window.

    Of those that read media, these are the layers of text, and the positions must say more than where a token is: else
    its tokens of media may see what comes after them, as in Gemma 3.
    """
    text = config.get_text_config()
    return (
        bool(getattr(model_class, "_supports_attention_backend", False))
        and (text is config or has_axes(config))
        and not getattr(config, "attention_chunk_size", None)
        and set(getattr(config, "layer_types", None) or ()) <= _PLAIN_LAYERS
    )


def has_axes(config: Any) -> bool:
    """Whether positions have axes of their own, as time, height and width (Qwen2-VL)."""
    return "mrope_section" in (getattr(config.get_text_config(), "rope_scaling", None) or {})


def register() -> None:
    """Make this attention known to transformers."""
    from transformers import AttentionInterface

    # Not compiled: each sample is attended to by itself, and packs have any number of them.
    AttentionInterface.register(SDPA_VARLEN, torch.compiler.disable(_attend_to_all))


def may_be_set(attention: str) -> AbstractContextManager[None]:
    """Inside, a model may be given this attention, also if it is this file's and transformers' sdpa is not for it."""
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
    """Attend as _attend does. sequence_group: ranks with parts of the tokens, each of which takes some of the heads."""
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
    """query: float[1, heads, T, d]; key, value: float[1, groups of heads, T, d] -> float[1, T, heads, d].

    cu_seq_lens_q: int32[samples + 1] on the CPU, offsets at which samples begin and end; a tensor, as a block would be
    compiled again for each list of numbers that it is given. ValueError for what sdpa cannot do.
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
    """A sample with a token before it that takes as much attention as the sinks of heads say, and gives nothing.

    A sink is a score of its own in the softmax (gpt-oss). sinks: float[heads]. Each query has its head's sink as one
    more number, which alone the first key has too; what is added is a multiple of 8, as kernels ask for.
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
    """Each stretch between two bounds by itself, as towers of sound attend.

    In Qwen3-Omni's transformers before 5.9 gives sdpa and eager no mask, so that clips see each other; here they do
    not. A mask can only say more inside of a stretch.
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
    """bool[1, 1, length, length]: which tokens each one sees; None where it sees all before it."""
    if sliding_window is None or length <= sliding_window:
        return None
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen.triu(1 - sliding_window)[None, None]
