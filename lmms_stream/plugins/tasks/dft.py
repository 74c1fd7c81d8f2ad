"""Dynamic fine-tuning (Wu et al., 2025, arXiv 2508.05629): unlikely tokens have smaller gradients."""

from __future__ import annotations

import torch

from ...train.tasks.causal import CausalLanguageModelling


class DynamicFineTuning(CausalLanguageModelling):
    """Cross entropy of each loss token times the model's probability of the token, over the loss tokens of the global
    batch. The probability is a weight: no gradient flows through it. Equal to TRL's loss_type "dft".
    """

    name = "dft"

    def of_tokens(self, losses: torch.Tensor) -> torch.Tensor:
        """See CausalLanguageModelling."""
        return losses * (-losses.detach()).exp()
