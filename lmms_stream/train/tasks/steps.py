"""A task on the packs of a step: gradients of the objectives, sums of losses by source. packs -> [task] -> sums."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from ...errors import ConfigError
from ...loader.collate import join
from ...types import Batch
from ..model.isolation import check_lengths
from ..model.model import PackedModel
from ..run.phases import Phases
from .preference import StepPasses
from .reference import Reference
from .task import Draw, LossSum, Objective, Task, described, on_device

Losses = Callable[[PackedModel, Batch, Sequence[Batch], Mapping[str, float]], Mapping[str, LossSum]]


class TaskSteps:
    """Runs a task with a model on this rank's packs. sources: of packs, by name. All ranks make the same calls.

    per_device_batch: packs in a forward pass. num_averaged: ranks over which FSDP averages gradients. losses: function
    of model, joined batch, packs, and units to divide by later -> the sums of each objective (default: the task's).
    between: called between two forward passes of a step. begin_pass: called before each pass, with whether the pass is
    the last of the step. seed: of the task's random draws. phases: receives the current activity. reference: for a task
    that compares the model with a reference.
    """

    def __init__(
        self,
        task: Task,
        model: PackedModel,
        *,
        device: torch.device,
        sources: Sequence[str],
        per_device_batch: int,
        num_averaged: int,
        losses: Losses | None = None,
        between: Callable[[], object] = lambda: None,
        begin_pass: Callable[[bool], object] = lambda is_last: None,
        seed: int = 0,
        phases: Phases | None = None,
        reference: Reference | None = None,
    ):
        self._task, self._model, self._device = task, model, device
        self._losses: Losses = losses or (lambda model, batch, packs, _: self.task_losses(model, batch, packs))
        self._draws = "draw" in inspect.signature(task.losses).parameters
        self.draw = Draw(seed=seed, step=None)
        self._reference, self._known = reference, None
        self._between, self._begin_pass = between, begin_pass
        self._num_averaged, self._sources, self._per_device_batch = num_averaged, tuple(sources), per_device_batch
        self._phases = phases or Phases()
        self.objectives = tuple(task.objectives(model))
        self.logged = tuple(each for each in self.objectives if each.is_logged)
        if not self.logged:
            raise ConfigError(f"task {type(task).__name__} has no objective for the log: set its objective")

    def begin_step(self, step: int) -> None:
        """Begin the random draws of a step, by the number of finished steps."""
        self.draw = replace(self.draw, step=step)

    def task_losses(self, model: PackedModel, batch: Batch, packs: Sequence[Batch]) -> Mapping[str, LossSum]:
        """Return the task's losses. A task with the keyword `draw` in `losses` gets a Draw.

        A task with a reference gets the result of `prepare` for the step, as `known`.
        """
        given: dict[str, Any] = {"draw": self.draw} if self._draws else {}
        if self._reference is not None:
            given["known"] = self._known
        return self._task.losses(model, batch, packs, **given)

    def units(self, packs: Sequence[Batch]) -> list[float]:
        """Return the units of each objective in all of these packs."""
        each_pack = [self._task.units(pack) for pack in packs]
        return [float(sum(units[each.name] for units in each_pack)) for each in self.objectives]

    def of_sources(self, packs: Sequence[Batch]) -> list[float]:
        """Return, for each source in turn, the number of packs, and the units of logged objectives in the packs."""
        counts = [0.0] * (2 * len(self._sources))
        for pack in packs:
            if pack.num_segments:  # a pack without samples has no source
                index = self._sources.index(pack.source)
                units = self._task.units(pack)
                counts[2 * index] += 1
                counts[2 * index + 1] += sum(units[each.name] for each in self.logged)
        return counts

    def units_of_logged(self, units: Sequence[float]) -> list[float]:
        """Pick the units of logged objectives from `units` of all objectives."""
        return [count for each, count in zip(self.objectives, units, strict=True) if each.is_logged]

    def backward(self, packs: Sequence[Batch], units: Sequence[float]) -> torch.Tensor:
        """Sum gradients over the packs of a step. units: of each objective in the global batch.

        Returns, for each logged objective, the losses by source, then the units: float64[logged, 2, sources].
        """
        totals = torch.zeros(len(self.logged), 2, len(self._sources), dtype=torch.float64, device=self._device)
        # FSDP averages gradients over its ranks: the average times their number is the sum.
        scales = [
            each.weight * self._num_averaged / max(count, 1) for each, count in zip(self.objectives, units, strict=True)
        ]
        by_name = {each.name: count for each, count in zip(self.objectives, units, strict=True)}
        size = self._per_device_batch
        passes = [packs[start : start + size] for start in range(0, len(packs), size)]
        self._prepare(passes, is_training=True)
        batches = on_device(map(self._joined, passes), self._device)
        for index, together in enumerate(passes):
            if index:
                self._between()
            self._begin_pass(index == len(passes) - 1)
            joined = next(batches)
            with self._phases.doing("forward"):
                sums = self._sums(joined, together, by_name, self.objectives)
            learnt = zip(self.objectives, scales, strict=True)
            loss = sum(sums[each.name].total * scale for each, scale in learnt if not each.is_figure)
            assert isinstance(loss, torch.Tensor)
            if not loss.requires_grad:
                raise ConfigError(
                    f"the losses of {type(self._task).__name__} have no gradient: return them without detach()"
                )
            with self._phases.doing("backward"):
                loss.backward()
            self._add(totals, together, sums)
        return totals

    @torch.no_grad()
    def forward(self, pack: Batch) -> list[torch.Tensor]:
        """Return the losses of each logged objective, float64[] each, with the random draws of an evaluation."""
        self.draw = replace(self.draw, step=None)
        self._prepare([[pack]], is_training=False)
        units = {name: float(count) for name, count in self._task.units(pack).items()}
        sums = self._sums(self._joined([pack]).to(self._device), [pack], units, self.logged)
        return [sums[each.name].of_packs.sum() for each in self.logged]

    def _sums(
        self, joined: Batch, packs: Sequence[Batch], units: Mapping[str, float], needed: Sequence[Objective]
    ) -> Mapping[str, LossSum]:
        """Return the sums of needed objectives; ConfigError if the task or compute_loss returns anything else."""
        sums: object = self._losses(self._model, joined, packs, units)
        for each in needed:
            found = sums.get(each.name) if isinstance(sums, Mapping) else None
            if not (
                isinstance(found, LossSum)
                and isinstance(found.total, torch.Tensor)
                and not found.total.shape
                and isinstance(found.of_packs, torch.Tensor)
                and (found.of_packs.shape == (len(packs),) or not each.is_logged)
            ):
                what = described(sums if found is None else found)
                if isinstance(found, LossSum):
                    what = f"a LossSum of {described(found.total)} and {described(found.of_packs)}"
                raise ConfigError(
                    f"the losses of {type(self._task).__name__} for {each.name!r} are {what}: return a mapping with "
                    f"{each.name!r}: LossSum(total, of_packs), of float32[] and of float64[{len(packs)}], a number for "
                    "each pack"
                )
        return cast(Mapping[str, LossSum], sums)

    def _prepare(self, passes: Sequence[Sequence[Batch]], *, is_training: bool) -> None:
        """Let a task with a reference prepare all packs of a step, before the first pack is trained on."""
        if self._reference is None:
            return
        prepare: Any = self._task.prepare  # type: ignore[attr-defined]  # see Task
        on_their_way = StepPasses(passes, joined=self._joined, device=self._device)
        with self._phases.doing("reference"):
            self._known = prepare(self._model, on_their_way, reference=self._reference, is_training=is_training)

    def _joined(self, packs: Sequence[Batch]) -> Batch:
        """Check the packs of a forward pass, and join them to a sequence, with positions along the model's axes."""
        joined = join(packs)
        if isinstance(self._model, PackedModel):  # tasks of other models know the limits of their models
            for pack in packs:
                self._model.check_tokens(pack)
            check_lengths(self._model.model.config, joined)
            joined = self._model.with_axes(joined)
        return joined

    def _add(self, totals: torch.Tensor, packs: Sequence[Batch], sums: Mapping[str, LossSum]) -> None:
        for index, pack in enumerate(packs):
            units = self._task.units(pack)
            for row, each in zip(totals, self.logged, strict=True):
                if count := units[each.name]:  # a pack without samples has no source
                    source = self._sources.index(pack.source)
                    row[0, source] += sums[each.name].of_packs[index]
                    row[1, source] += count
