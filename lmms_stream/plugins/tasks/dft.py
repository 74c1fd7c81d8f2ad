"""Dynamic fine-tuning (Wu et al., 2025, arXiv 2508.05629): tokens that the model finds unlikely pull less at it."""

from __future__ import annotations

import torch

from ...train.tasks.causal import CausalLanguageModelling


class DynamicFineTuning(CausalLanguageModelling):
    """The cross entropy of each loss token times the probability that the model gives it, over the loss tokens of the
    global batch. The probability is a weight: no gradient flows through it. It is TRL's loss_type "dft".
    """

    name = "dft"

    def of_tokens(self, losses: torch.Tensor) -> torch.Tensor:
        """See CausalLanguageModelling."""
        return losses * (-losses.detach()).exp()
