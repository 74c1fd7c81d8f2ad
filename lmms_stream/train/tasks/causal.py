"""Causal language modelling: each token that is learnt is predicted from those before it in its sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ...loader.collate import collate
from ...types import Batch
from ..model.choice import prove_compiled, prove_packing
from ..model.model import PackedModel
from .task import LossSum, Objective

TOKENS, Z, ROUTER = "tokens", "z", "router"


class CausalLanguageModelling:
    """The cross entropy of loss tokens, over the loss tokens of the global batch.

    Besides, and not in the log: with z_loss, that times the mean squared log of the softmax's sum; of a mixture of
    experts, the auxiliary loss of its router by the weight in the model's config, over all tokens.
    """

    name = "causal"
    collate: Callable[..., Batch] = staticmethod(collate)

    def __init__(self, *, z_loss: float = 0.0):
        self.z_loss = z_loss

    def objectives(self, model: PackedModel) -> Sequence[Objective]:
        found = [Objective(name=TOKENS)]
        if self.z_loss:
            found.append(Objective(name=Z, is_logged=False))
        if model.router_weight:
            found.append(Objective(name=ROUTER, weight=model.router_weight, is_logged=False))
        return found

    def units(self, pack: Batch) -> Mapping[str, int]:
        num_tokens = int(pack.cu_seqlens[pack.num_segments])  # without padding
        return {TOKENS: pack.num_loss_tokens, Z: pack.num_loss_tokens, ROUTER: num_tokens}

    def losses(self, model: PackedModel, batch: Batch, packs: Sequence[Batch]) -> Mapping[str, LossSum]:
        made = model(batch, packs)
        sums = {TOKENS: LossSum.of(self.of_tokens(made.tokens), [pack.num_loss_tokens for pack in packs])}
        nowhere = torch.empty(0)  # these are not logged
        if self.z_loss:
            sums[Z] = LossSum(self.z_loss * made.logs.square().sum(), nowhere)
        if made.router is not None:
            sums[ROUTER] = LossSum(made.router, nowhere)
        return sums

    def of_tokens(self, losses: torch.Tensor) -> torch.Tensor:
        """What is learnt of each loss token, float32[n], from its cross entropy: that itself."""
        return losses

    def check(self, model: PackedModel, *, device: torch.device, bf16: bool, is_compiled: bool) -> None:
        prove = prove_compiled if is_compiled else prove_packing
        prove(model, device=device, bf16=bf16)
