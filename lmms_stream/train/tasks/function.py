"""A loss function as transformers' users write it: compute_loss_func(outputs, labels, num_items_in_batch)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ...errors import ConfigError
from ...types import Batch
from ..model.model import PackedModel
from .causal import TOKENS, CausalLanguageModelling
from .task import LossSum, Objective

LossFunction = Callable[..., torch.Tensor]


class FunctionTask(CausalLanguageModelling):
    """Learns by a loss function alone, over the loss tokens of the global batch; see losses_of_function."""

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
    """The losses of each pack by a function of its outputs and labels.

    It is called for each pack, with outputs.logits float[1, T, V], labels int64[1, T] (-100 where nothing is learnt, as
    at the first token of each sample; position t predicts the label at t + 1), and num_items_in_batch: the loss tokens
    by which it divides the sum of its losses, those of the global batch (in an evaluation, of the pack).
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
