"""Direct preference optimization (Rafailov et al., 2023): of two answers, the chosen answer becomes more probable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch.nn.functional import logsigmoid

from ...errors import ConfigError
from ...train.model.model import PackedModel
from ...train.tasks.preference import CHOSEN, REJECTED, PreferenceTask, collate_pairs, figures_of
from ...train.tasks.reference import OfPacks, ReferenceKind, num_learnt
from ...train.tasks.task import LossSum, Objective
from ...types import Batch

PAIRS, ACCURACIES, MARGINS = "pairs", "rewards/accuracies", "rewards/margins"
FIGURES = (CHOSEN, REJECTED, ACCURACIES, MARGINS)
LossType = Literal["sigmoid", "hinge", "ipo", "robust"]
_SMOOTHED = ("sigmoid", "robust")


class DPO(PreferenceTask):
    """Loss of each pair, over the pairs of the global batch.

    loss_type: by TRL's names. With m the margin, the chosen reward minus the rejected: "sigmoid" is -log sigmoid(m);
    "hinge" max(0, 1 - m); "ipo" (Azar et al., 2023) the square of the difference of the two log-ratios per token, less
    1 / (2 beta); "robust" (Chowdhury et al., 2024) a sigmoid corrected for pairs with swapped answers. label_smoothing:
    the share of swapped pairs; in "sigmoid" it gives conservative DPO (Mitchell, 2023). Also logged: the mean rewards
    of both, their margins, and the share of pairs whose chosen answer has the higher reward.
    """

    main, num_answers = PAIRS, 2
    collate: Callable[..., Batch] = staticmethod(collate_pairs)

    def __init__(
        self,
        *,
        beta: float = 0.1,
        loss_type: LossType = "sigmoid",
        label_smoothing: float = 0.0,
        reference: ReferenceKind = "model",
    ):
        super().__init__(name="dpo", beta=beta, loss_type=loss_type, loss_types=get_args(LossType), reference=reference)
        if not 0 <= label_smoothing < 0.5:
            raise ConfigError(f"task dpo: label_smoothing must be from 0 to below 0.5, got {label_smoothing}")
        if label_smoothing and loss_type not in _SMOOTHED:
            raise ConfigError(
                f"task dpo: label_smoothing {label_smoothing} is for loss_type {' and '.join(_SMOOTHED)}, and this is "
                f"{loss_type}: leave it out"
            )
        self.label_smoothing = label_smoothing

    def objectives(self, model: PackedModel) -> Sequence[Objective]:
        """See Task."""
        return self._objectives(model, FIGURES)

    def units(self, pack: Batch) -> Mapping[str, int]:
        """See Task."""
        return self._units(pack) | dict.fromkeys(FIGURES, len(pack.sample_ids))

    def losses(
        self, model: PackedModel, batch: Batch, packs: Sequence[Batch], *, known: OfPacks | None = None
    ) -> Mapping[str, LossSum]:
        """See Task. known: the reference's log-probabilities; required."""
        assert known is not None
        ratios, sums = self._run(model, batch, packs, known)
        learnt = torch.tensor([count for pack in packs for count in num_learnt(pack)], dtype=ratios.dtype)
        losses = self.pair_losses(ratios.view(-1, 2), learnt.to(ratios.device, non_blocking=True).view(-1, 2))
        rewards = self.beta * ratios.detach().view(-1, 2)
        chosen, rejected = rewards[:, 0], rewards[:, 1]
        values = {
            CHOSEN: chosen,
            REJECTED: rejected,
            ACCURACIES: (chosen > rejected).float(),
            MARGINS: chosen - rejected,
        }
        counts = [len(pack.sample_ids) for pack in packs]
        return {PAIRS: LossSum.of(losses, counts), **sums, **figures_of(values, counts)}

    def pair_losses(self, ratios: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        """Losses of pairs, float32[pairs]. ratios: log-ratios of chosen and rejected answers; num_tokens: their loss
        tokens: [pairs, 2].
        """
        if self.loss_type == "ipo":
            chosen, rejected = (ratios / num_tokens.clamp(min=1)).unbind(1)
            return (chosen - rejected - 1 / (2 * self.beta)).square()
        margins = self.beta * (ratios[:, 0] - ratios[:, 1])
        if self.loss_type == "hinge":
            return torch.relu(1 - margins)
        share = self.label_smoothing
        right, wrong = -logsigmoid(margins), -logsigmoid(-margins)
        if self.loss_type == "robust":
            return ((1 - share) * right - share * wrong) / (1 - 2 * share)
        return (1 - share) * right + share * wrong
