"""Causal language modelling: predict the tokens trained on from earlier tokens of the sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ...errors import ConfigError
from ...loader.collate import collate
from ...types import Batch
from ..model.choice import prove_compiled
from ..model.model import PackedModel
from ..model.verdict import prove_packing_once
from .task import LossSum, Objective

TOKENS, Z, ROUTER = "tokens", "z", "router"


class CausalLanguageModelling:
    """The cross entropy of loss tokens, over the loss tokens of the global batch.

    Added, but not logged: z_loss times the mean squared log of the softmax's sum; for a mixture of experts, the
    auxiliary loss of the router over all tokens, with the weight in the model's config.
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
        nowhere = torch.empty(0)  # not logged
        if self.z_loss:
            sums[Z] = LossSum(self.z_loss * made.logs.square().sum(), nowhere)
        if made.router is not None:
            sums[ROUTER] = LossSum(made.router, nowhere)
        return sums

    def of_tokens(self, losses: torch.Tensor) -> torch.Tensor:
        """Return the loss of each loss token, float32[n], from the cross entropies: here unchanged."""
        return losses

    def check(self, model: PackedModel, *, device: torch.device, bf16: bool, is_compiled: bool) -> None:
        prove = prove_compiled if is_compiled else prove_packing_once
        prove(model, device=device, bf16=bf16)


# A loss function in the form of transformers: compute_loss_func(outputs, labels, num_items_in_batch).

LossFunction = Callable[..., torch.Tensor]


class FunctionTask(CausalLanguageModelling):
    """Trains with only a loss function, over the loss tokens of the global batch; see losses_of_function."""

    def objectives(self, model: PackedModel) -> Sequence[Objective]:
        if model.family is not None:
            raise ConfigError(
                "compute_loss_func is given the logits of texts, and this model reads media: override compute_loss, or "
                "give a task"
            )
        return [Objective(name=TOKENS)]


def losses_of_function(
    function: LossFunction, model: PackedModel, batch: Batch, packs: Sequence[Batch], units: Mapping[str, float]
) -> Mapping[str, LossSum]:
    """Return the losses of each pack, from a user's function of outputs and labels.

    The function is called for each pack, with outputs.logits float[1, T, V], labels int64[1, T] (-100 for tokens not
    trained on, including the first token of each sample; position t predicts the label at t + 1), and
    num_items_in_batch: loss tokens of the global batch (in an evaluation: of the pack), the divisor for the function's
    sum of losses.
    """
    from transformers.modeling_outputs import CausalLMOutput

    count = max(units[TOKENS], 1.0)
    logits, start, values = model.logits(batch), 0, []
    for pack in packs:
        rows = slice(start, start + pack.num_tokens)
        start += pack.num_tokens
        outputs = CausalLMOutput(logits=logits[:, rows])  # of any floating type
        num_items = torch.tensor(count, device=logits.device)
        value = function(outputs, batch.labels[:, rows], num_items_in_batch=num_items)
        values.append(value * count if pack.num_loss_tokens else 0 * logits[:, rows].float().sum())
    made = torch.stack(values)
    return {TOKENS: LossSum(made.sum(), made.detach().double())}
