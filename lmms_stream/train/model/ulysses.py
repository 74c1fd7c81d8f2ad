"""Attention of all tokens of a pack whose parts lie on several ranks: DeepSpeed-Ulysses (arXiv 2309.14509).

Before it, ranks exchange their tokens' heads, so that each has all tokens of a share of the heads; after it they
exchange them back. What attends is an attention function of transformers, with the bounds of the whole pack's samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import gcd
from typing import Any

import torch
import torch.distributed as dist

from .exchanges import swapped

GROUP = "sequence_group"  # the name by which blocks pass the group on to their attention
Attend = Callable[..., tuple[torch.Tensor, Any]]


def register() -> None:
    """Have transformers' flash attention see all tokens of a pack, where blocks run on parts of them."""
    from transformers import AttentionInterface
    from transformers.integrations.flash_attention import flash_attention_forward

    AttentionInterface.register("flash_attention_2", over_heads(flash_attention_forward))


def over_heads(attend: Attend) -> Attend:
    """An attention function of transformers that may be given a group: then it is called for a share of the heads."""
    exchanging = torch.compiler.disable(_over_heads)  # what ranks exchange is no part of a block's graph

    def attend_to_all(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        sequence_group: dist.ProcessGroup | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, Any]:
        if sequence_group is None:
            return attend(module, query, key, value, attention_mask, **others)
        found: torch.Tensor = exchanging(attend, module, (query, key, value), attention_mask, sequence_group, others)
        return found, None

    return attend_to_all


def _over_heads(
    attend: Attend,
    module: torch.nn.Module,
    of_part: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    group: dist.ProcessGroup,
    others: Mapping[str, Any],
) -> torch.Tensor:
    """of_part: query, key and value of a rank's tokens and all heads: float[1, heads, T / degree, d] each."""
    if mask is not None:
        raise ValueError("train.sequence_parallel has no attention with a mask: set it to 1")
    query, key, value = of_part
    if query.shape[1] % group.size():
        raise ValueError(f"train.sequence_parallel {group.size()} does not divide {query.shape[1]} attention heads")
    key, value = (repeated(each, group.size()) for each in (key, value))
    queries, keys, values = _to_heads((query, key, value), group)
    if (sinks := others.get("s_aux")) is not None:
        others = {**others, "s_aux": sinks.chunk(group.size())[group.rank()]}
    with _heads_of_key(module, queries.shape[1] // keys.shape[1]):
        found, _ = attend(module, queries, keys, values, None, **others)
    return _to_tokens(found, group)


def repeated(heads: torch.Tensor, degree: int) -> torch.Tensor:
    """Heads of keys or values, float[1, groups, t, d], each as often as it takes for the degree to divide them.

    >>> repeated(torch.arange(3.0).view(1, 3, 1, 1), 2).flatten().tolist()
    [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    """
    times = degree // gcd(degree, heads.shape[1])
    return heads if times == 1 else heads.repeat_interleave(times, dim=1)


def _to_heads(of_part: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """float[1, heads, T / degree, d] of a part -> float[1, heads / degree, T, d] of all tokens, in one exchange."""
    degree, num_tokens = group.size(), of_part[0].shape[2]
    shares = [each[0].unflatten(0, (degree, -1)).transpose(1, 2).flatten(2) for each in of_part]  # [degree, t, h * d]
    widths = [share.shape[2] for share in shares]
    sent = swapped(torch.cat(shares, dim=2), group)
    of_all = sent.view(degree * num_tokens, -1).split(widths, dim=1)
    return [
        each.unflatten(1, (-1, own.shape[3])).transpose(0, 1)[None] for each, own in zip(of_all, of_part, strict=True)
    ]


def _to_tokens(attended: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """float[1, T, heads / degree, d] -> float[1, T / degree, heads, d]."""
    degree, (_, num_tokens, _, width) = group.size(), attended.shape
    sent = swapped(attended.reshape(degree, num_tokens // degree, -1), group)  # [degree, t, h * d]
    return sent.transpose(0, 1).reshape(1, num_tokens // degree, -1, width)


@contextmanager
def _heads_of_key(module: torch.nn.Module, number: int) -> Iterator[None]:
    """Inside, attention repeats each head of keys and values for so many of queries, which it reads from its module."""
    before: Any = getattr(module, "num_key_value_groups", None)
    if before is None or before == number:
        yield
        return
    module.num_key_value_groups = number  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = before
