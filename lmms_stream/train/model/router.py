"""The auxiliary loss of a mixture of experts, which keeps its router from sending most tokens to few experts.

That of a pack is the one of Switch Transformer (arXiv 2101.03961, equations 4 to 6), as transformers computes it, over
the pack's tokens without its padding: it does not depend on the packs beside it, so neither on ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import ConfigError
from ...types import Batch

_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # what configs call it
_NUM_CHOSEN = ("num_experts_per_tok", "moe_k")


def has_experts(config: Any) -> bool:
    """Whether tokens go to experts by the model's config, so that how many meet in one depends on all of a pack."""
    return _field(config.get_text_config(), _NUM_EXPERTS) > 0


def router_weight(model: torch.nn.Module) -> float:
    """The weight of the auxiliary loss by the model's config; 0 where it has none, or does not return its router.

    Also 0 where no layer has experts, whatever the config says of them (Flint, Doge).
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    returns_router = "output_router_logits" in inspect.signature(model.forward).parameters
    has_layers = any("expert" in name or "router" in name for name, _ in model.named_modules())
    is_known = has_layers and _field(config, _NUM_EXPERTS) and _field(config, _NUM_CHOSEN)
    return float(getattr(config, "router_aux_loss_coef", None) or 0.0) if returns_router and is_known else 0.0


def router_loss(logits: Sequence[torch.Tensor], packs: Sequence[Batch], *, config: Any) -> torch.Tensor:
    """The sum over packs of tokens times auxiliary loss; over all tokens of a global batch it is their mean: float32[].

    logits: float[T, experts] of each layer with experts. packs: those that T holds, one after another. ConfigError for
    logits of other shapes.
    """
    text = config.get_text_config()
    num_experts, num_chosen = _field(text, _NUM_EXPERTS), _field(text, _NUM_CHOSEN)
    if any(each.shape[-1] != num_experts for each in logits):
        raise ConfigError(
            f"the router of {config.model_type} gives {logits[0].shape[-1]} values a token for {num_experts} experts: "
            "set the model's router_aux_loss_coef to 0"
        )
    shares = torch.stack([each.reshape(-1, num_experts).float() for each in logits]).softmax(dim=-1)  # [layers, T, E]
    chosen = torch.nn.functional.one_hot(shares.topk(num_chosen, dim=-1).indices, num_experts).sum(dim=2).float()
    total = shares.sum() * 0  # a pack without samples takes part in the backward pass
    start = 0
    for pack in packs:
        num_tokens = int(pack.cu_seqlens[pack.num_segments])
        if num_tokens:
            of_pack = slice(start, start + num_tokens)
            balance = chosen[:, of_pack].mean(dim=(0, 1)) * shares[:, of_pack].mean(dim=(0, 1))
            total = total + num_tokens * num_experts * balance.sum()
        start += pack.num_tokens
    return total


def _field(config: Any, names: Sequence[str]) -> int:
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 0)
