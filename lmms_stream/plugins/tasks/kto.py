"""Kahneman-Tversky optimization (Ethayarajh et al., 2024): of single answers, desirable answers become more
probable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ...errors import ConfigError
from ...processors.base import IGNORED_LABEL
from ...train.model.model import PackedModel
from ...train.tasks.preference import CHOSEN, REJECTED, PreferenceTask, StepPasses, collate_answers, figures_of
from ...train.tasks.reference import OfPacks, Reference, ReferenceKind, measured_log_probs
from ...train.tasks.task import LossSum, Objective
from ...types import Batch, Role

ANSWERS, KL = "answers", "kl"
LossType = Literal["kto", "apo_zero_unpaired"]


class Known(NamedTuple):
    """Values of a step before its losses. of_reference: the reference's log-probabilities of packs, by micro_batch. kl:
    see KTO.
    """

    of_reference: OfPacks
    kl: torch.Tensor  # float64[], on the device


class KTO(PreferenceTask):
    """Loss of each answer, 1 - sigmoid(d), over the answers of the global batch.

    d is beta times (log-ratio of the answer - kl) for a desirable answer, and the negative for an undesirable answer.
    kl estimates the distance of the model from its reference: the mean log-ratio of answers to prompts of other
    samples, at least 0, without gradients and dropout. Like in TRL, with packs for its batches, each prompt of a pack
    gets the answer of the sample before; the mean is over the whole global batch, and kl is the same for any number of
    ranks. A pack of one sample has no other answer, and is left out of the mean. An evaluation estimates kl for each
    pack separately.

    loss_type "apo_zero_unpaired" (D'Oosterlinck et al., 2024) is the same with kl 0, and needs no passes for kl.
    desirable_weight, undesirable_weight: of the losses. Also logged: the mean rewards of both kinds, and kl.
    """

    main, num_answers = ANSWERS, 1
    collate: Callable[..., Batch] = staticmethod(collate_answers)

    def __init__(
        self,
        *,
        beta: float = 0.1,
        loss_type: LossType = "kto",
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        reference: ReferenceKind = "model",
    ):
        super().__init__(name="kto", beta=beta, loss_type=loss_type, loss_types=get_args(LossType), reference=reference)
        for name, weight in (("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)):
            if not weight >= 0:
                raise ConfigError(f"task kto: {name} must be 0 or more, got {weight}")
        if reference == "stored" and self._needs_kl:
            raise ConfigError(
                "task kto: loss_type kto compares with its reference on answers to other prompts, which depend on the "
                "packs of each step and cannot be measured before the run: set reference to model, or loss_type to "
                "apo_zero_unpaired"
            )
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight

    @property
    def _needs_kl(self) -> bool:
        return self.loss_type == "kto"

    def objectives(self, model: PackedModel) -> Sequence[Objective]:
        """See Task."""
        return self._objectives(model, (CHOSEN, REJECTED, *([KL] if self._needs_kl else [])))

    def units(self, pack: Batch) -> Mapping[str, int]:
        """See Task."""
        num_chosen = 0 if pack.sequences is None else int((pack.sequences[:, 3] == Role.CHOSEN).sum())
        num_answers = len(pack.sample_ids)
        return self._units(pack) | {CHOSEN: num_chosen, REJECTED: num_answers - num_chosen, KL: num_answers}

    def prepare(self, model: PackedModel, passes: StepPasses, *, reference: Reference, is_training: bool) -> Known:
        """See Task."""
        kl = torch.zeros(())
        if self._needs_kl:
            kl = self._kl(model, passes, reference=reference, is_training=is_training)
        return Known(reference.log_probs(passes), kl)

    def _kl(self, model: PackedModel, passes: StepPasses, *, reference: Reference, is_training: bool) -> torch.Tensor:
        others = passes.changed(mismatched)
        of_model, of_reference = measured_log_probs(model, others), reference.log_probs(others)
        packs = [pack for together in others.packs for pack in together if len(pack.sample_ids) > 1]
        ratios = [(of_model[pack.micro_batch] - of_reference[pack.micro_batch]).double().sum() for pack in packs]
        sums = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
        sums[0] += sum(ratios)
        sums[1] += sum(len(pack.sample_ids) for pack in packs)
        if is_training:  # ranks that read the same packs all count them
            dist.all_reduce(sums)
        return (sums[0] / sums[1].clamp(min=1)).clamp(min=0)

    def losses(
        self, model: PackedModel, batch: Batch, packs: Sequence[Batch], *, known: Known | None = None
    ) -> Mapping[str, LossSum]:
        """See Task. known: the result of `prepare`; required."""
        assert known is not None
        ratios, sums = self._run(model, batch, packs, known.of_reference)
        is_chosen = torch.zeros_like(ratios) if batch.sequences is None else batch.sequences[:, 3].to(ratios.dtype)
        losses = self.answer_losses(ratios, is_chosen, kl=known.kl)
        counts, rewards = [len(pack.sample_ids) for pack in packs], self.beta * ratios.detach()
        values = {CHOSEN: rewards * is_chosen, REJECTED: rewards * (1 - is_chosen)}
        if self._needs_kl:
            values[KL] = known.kl.to(rewards.dtype).expand_as(rewards)
        return {ANSWERS: LossSum.of(losses, counts), **sums, **figures_of(values, counts)}

    def answer_losses(self, ratios: torch.Tensor, is_chosen: torch.Tensor, *, kl: torch.Tensor) -> torch.Tensor:
        """Losses of answers, float32[answers]. ratios: their log-ratios; is_chosen: 1 for desirable answers, 0 for
        others.
        """
        weights = self.desirable_weight * is_chosen + self.undesirable_weight * (1 - is_chosen)
        return weights * (1 - torch.sigmoid(self.beta * (2 * is_chosen - 1) * (ratios - kl)))


# Answers after prompts of other samples. pack -> [mismatched] -> a pack of the same tokens.


def mismatched(pack: Batch) -> Batch:
    """Return the pack, on the CPU, with each prompt followed by the previous sequence's answer; the first prompt gets
    the last answer.

    A prompt is all tokens before the first loss token, and keeps its media; answers hold no media. The pack has the
    same number of tokens, in another order. A pack of fewer than two sequences is returned unchanged.

    Positions on a family's own axes continue after each prompt like the answer's positions after its own prompt.
    """
    if pack.sequences is None or len(pack.sequences) < 2:
        return pack
    bounds, labels = pack.sequences.numpy()[:, 1:3], pack.labels[0].numpy()
    splits = [int(start + np.argmax(labels[start:stop] != IGNORED_LABEL)) for start, stop in bounds]
    prompts = [np.arange(start, split) for (start, _), split in zip(bounds, splits, strict=True)]
    answers = [np.arange(split, stop) for (_, stop), split in zip(bounds, splits, strict=True)]
    others = [answers[-1], *answers[:-1]]
    padding = np.arange(bounds[-1, 1], pack.num_tokens)
    order = np.concatenate([*(part for pair in zip(prompts, others, strict=True) for part in pair), padding])
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, others, strict=True)]
    ends = np.cumsum([0, *lengths])
    sequences = pack.sequences.clone()
    sequences[:, 1], sequences[:, 2] = torch.from_numpy(ends[:-1]), torch.from_numpy(ends[1:])
    cu_seqlens = pack.cu_seqlens.clone()
    cu_seqlens[: len(ends)] = torch.from_numpy(ends)
    return replace(
        pack,
        input_ids=pack.input_ids[:, order],
        labels=pack.labels[:, order],
        position_ids=_positions(pack, order, splits, lengths, [len(each) for each in prompts]),
        cu_seqlens=cu_seqlens,
        max_seqlen=max([*lengths, len(padding)]),
        token_inputs={name: values[:, order] for name, values in pack.token_inputs.items()},
        sequences=sequences,
    )


def _positions(
    pack: Batch, order: NDArray[np.int64], splits: list[int], lengths: list[int], num_prompt: list[int]
) -> torch.Tensor:
    """Positions of tokens in their new order, with each answer's moved to the end of its new prompt."""
    positions = pack.position_ids[..., order].clone()
    start = 0
    for index, (length, before) in enumerate(zip(lengths, num_prompt, strict=True)):
        here, there = pack.position_ids[..., splits[index]], positions[..., start + before].clone()
        positions[..., start + before : start + length] += (here - there)[..., None]
        start += length
    return positions
