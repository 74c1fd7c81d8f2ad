"""Base of tasks that compare answers: packs, reference, and record of rewards.

The reward of an answer is beta * log(probability by the model / probability by the reference).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, get_args

import torch

from ...errors import ConfigError, did_you_mean
from ...loader.collate import collate
from ...types import Batch, Processed, Role
from ..model.choice import prove_compiled
from ..model.model import PackedModel
from ..model.verdict import prove_packing_once
from .causal import ROUTER
from .reference import OfPacks, Reference, ReferenceKind, log_probs_of
from .task import LossSum, Objective, on_device

CHOSEN, REJECTED = "rewards/chosen", "rewards/rejected"


def collate_answers(samples: Sequence[Processed], sample_ids: Sequence[int], **options: Any) -> Batch:
    """Collate samples of a single answer each; raise ConfigError for other samples."""
    roles = [[Role.REJECTED], [Role.CHOSEN]]
    _check_roles(samples, sample_ids, task="kto", roles=roles, words="one answer, with its label")
    return collate(samples, sample_ids, **options)


def collate_pairs(samples: Sequence[Processed], sample_ids: Sequence[int], **options: Any) -> Batch:
    """Collate samples of a chosen answer, then a rejected answer; raise ConfigError for other samples."""
    pair = [[Role.CHOSEN, Role.REJECTED]]
    _check_roles(samples, sample_ids, task="dpo", roles=pair, words="a chosen answer and then a rejected one")
    return collate(samples, sample_ids, **options)


def _check_roles(
    samples: Sequence[Processed], sample_ids: Sequence[int], *, task: str, roles: Sequence[Sequence[int]], words: str
) -> None:
    for sample, sample_id in zip(samples, sample_ids, strict=True):
        sequences = sample.get("sequences")
        own = None if sequences is None else [int(role) for _, role in sequences]
        if own not in roles:
            found = "no sequences" if own is None else f"sequences of roles {own}"
            raise ConfigError(
                f"task {task} learns from {words}, and sample {sample_id} has {found}: give it a dataset of the schema "
                f"preference whose processor has the objective {task}"
            )


class PreferenceTask:
    """Base of DPO and KTO. beta: scale of rewards; with a larger beta the model stays closer to the reference.

    reference: "model": the starting weights are kept next to the trained weights, and run in each step; "stored": the
    log-probabilities of the whole dataset are measured once, before the first step.
    """

    main: ClassVar[str]  # name of the objective trained on, the unit of counts
    num_answers: ClassVar[int]  # of a sample

    def __init__(self, *, name: str, beta: float, loss_type: str, loss_types: Sequence[str], reference: ReferenceKind):
        if not (beta > 0 and math.isfinite(beta)):
            raise ConfigError(f"task {name}: beta must be a number above 0, got {beta}")
        if loss_type not in loss_types:
            raise ConfigError(f"task {name} has no loss_type {loss_type!r}: {did_you_mean(loss_type, loss_types)}")
        if reference not in (kinds := get_args(ReferenceKind)):
            raise ConfigError(f"task {name}: reference must be {' or '.join(kinds)}, got {reference!r}")
        self.name, self.beta, self.loss_type = name, beta, loss_type
        self.reference: ReferenceKind = reference

    def _objectives(self, model: PackedModel, figures: Sequence[str]) -> list[Objective]:
        """Return objectives, including the router's loss of a mixture of experts, and figures of the record."""
        found = [Objective(name=self.main)]
        if model.router_weight:
            found.append(Objective(name=ROUTER, weight=model.router_weight, is_logged=False))
        return [*found, *(Objective(name=name, is_figure=True) for name in figures)]

    def _units(self, pack: Batch) -> dict[str, int]:
        return {self.main: len(pack.sample_ids), ROUTER: int(pack.cu_seqlens[pack.num_segments])}

    def _run(
        self, model: PackedModel, batch: Batch, packs: Sequence[Batch], reference: OfPacks
    ) -> tuple[torch.Tensor, dict[str, LossSum]]:
        """Return log-probability minus the reference's for each answer, float32[sequences]; and the router's loss."""
        made = model(batch, packs)
        of_reference = torch.cat([reference[pack.micro_batch] for pack in packs])
        ratios = log_probs_of(made.tokens, packs) - of_reference.to(made.tokens.device)
        return ratios, {} if made.router is None else {ROUTER: LossSum(made.router, torch.empty(0))}

    def prepare(self, model: PackedModel, passes: StepPasses, *, reference: Reference, is_training: bool) -> Any:
        """Return the reference's log-probabilities of the answers of a step; see Task."""
        return reference.log_probs(passes)

    def check(self, model: PackedModel, *, device: torch.device, bf16: bool, is_compiled: bool) -> None:
        """See Task."""
        prove = prove_compiled if is_compiled else prove_packing_once
        prove(model, device=device, bf16=bf16)


def figures_of(values: Mapping[str, torch.Tensor], counts: Sequence[int]) -> dict[str, LossSum]:
    """Return figures of the record, from values of single units, float32[n]. counts: units per pack."""
    return {name: LossSum.of(each.detach(), counts) for name, each in values.items()}


# The packs of a step by forward pass, copied to the device on demand.


class StepPasses:
    """Yields, in each iteration, the batch of each forward pass on the device, with the packs in the batch.

    packs: on the CPU, by forward pass. joined: checks packs, and joins them to a sequence.
    """

    def __init__(
        self,
        packs: Sequence[Sequence[Batch]],
        *,
        joined: Callable[[Sequence[Batch]], Batch],
        device: torch.device,
    ):
        self.packs = packs
        self._joined, self._device = joined, device

    def __iter__(self) -> Iterator[tuple[Batch, Sequence[Batch]]]:
        yield from zip(on_device(map(self._joined, self.packs), self._device), self.packs, strict=True)

    def changed(self, change: Callable[[Batch], Batch]) -> StepPasses:
        """Return passes of changed packs."""
        packs = [[change(pack) for pack in together] for together in self.packs]
        return StepPasses(packs, joined=self._joined, device=self._device)
