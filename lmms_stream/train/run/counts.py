"""Counts of a run: steps, tokens and samples, saved in checkpoints; counts and votes of a step, agreed by all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import TrainingError
from ...types import Batch, World
from .distributed import gather
from .optimizers import local

logger = logging.getLogger("lmms_stream")


@dataclass(slots=True)
class RunCounts:
    """Steps, tokens and samples since the run began; num_skipped_steps: steps without an update.

    history: the stretches of the run, each with the settings of the packs; see loader/loader.py.
    left_out: samples of all ranks replaced by padding; see plan/left_out.py. evaluation_pending: an evaluation is due
    after this step, and has not ended.
    """

    step: int = 0
    tokens_seen: int = 0
    samples_seen: int = 0
    num_skipped_steps: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    evaluation_pending: bool = False

    def state_dict(self) -> dict[str, Any]:
        """Return all counts except the step: the checkpoint has the step. evaluation_pending only if True."""
        values = asdict(self)
        del values["step"]
        if not self.evaluation_pending:
            del values["evaluation_pending"]
        return values

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state_dict with the step; earlier versions saved no history, left_out and evaluation_pending."""
        for each in fields(self):
            is_list = each.name in ("history", "left_out")
            setattr(self, each.name, list(state.get(each.name, [])) if is_list else state.get(each.name, False))


# Steps and sources without anything to train on: no update, and MOST_STEPS in a row end a run. Pure.

MOST_STEPS = 100  # in a row without anything to train on, of a run or of a source
_REMEDY = (
    "look at its samples with lmms-stream inspect (with --tokenizer what is trained on is marked), and correct what is "
    "trained on: the chat template's {% generation %}, learn in the processor's settings, or loss_spans"
)


class TrainedOn:
    """Counts the units trained on in each step of all ranks. sources: names; each source has separate packs."""

    def __init__(self, sources: Sequence[str]):
        self._sources = tuple(sources)
        self._in_a_row = [0] * len(self._sources)  # steps with packs of a source and nothing to train on
        self._empty_in_a_row = 0
        self._num_steps, self._num_units = 0, 0.0

    def take(self, num_units: float, of_sources: Sequence[Sequence[float]], *, step: int) -> bool:
        """Count a step; return whether the step trains on anything.

        num_units: of all logged objectives. of_sources: packs and units of each source. TrainingError after MOST_STEPS.
        """
        self._num_steps += 1
        self._num_units += num_units
        self._empty_in_a_row = 0 if num_units else self._empty_in_a_row + 1
        if self._empty_in_a_row == MOST_STEPS:
            raise TrainingError(
                f"nothing is trained on in the {MOST_STEPS} steps up to step {step}: no sample of {self._named} that "
                f"was read has a token that is trained on; {_REMEDY}"
            )
        for index, (num_packs, units) in enumerate(of_sources):
            if num_packs:
                self._in_a_row[index] = 0 if units else self._in_a_row[index] + 1
            if self._in_a_row[index] == MOST_STEPS:
                raise TrainingError(
                    f"nothing of source {self._sources[index]} is trained on in {MOST_STEPS} steps with packs of it, "
                    f"up to step {step}: {_REMEDY}, or leave the source out"
                )
        return num_units > 0

    def end(self) -> None:
        """Raise TrainingError if no step of the run had anything to train on."""
        if self._num_steps and not self._num_units:
            raise TrainingError(
                f"none of the {self._num_steps} steps of the run had a token to train on, and no weights were updated: "
                f"no sample read of {self._named} has such a token; {_REMEDY}"
            )

    @property
    def _named(self) -> str:
        return "the dataset" if len(self._sources) < 2 else ", ".join(self._sources)


# Values of a step that all ranks agree on: votes to stop or save, and the sums of units that divide losses.


class Votes(NamedTuple):
    """Votes of a rank, or numbers of ranks: a stop signal was received, a save failed, a save or a trace is due."""

    stop: float
    failed_save: float
    save_due: float
    trace_due: float = 0


class Agreed(NamedTuple):
    """units: sums over ranks with different packs. counts: float64[world_size, n], of each rank."""

    votes: Votes
    units: list[float]
    counts: NDArray[np.float64]


def agree(votes: Votes, units: Sequence[float], counts: Sequence[float], *, world: World) -> Agreed:
    """Exchange the values of this rank's step with all ranks, in one collective; all ranks call it."""
    everyone = gather([*votes, *units, *counts], world.world_size).numpy()
    return agreed(everyone, num_units=len(units), replication=world.replication)


def agreed(everyone: NDArray[np.float64], *, num_units: int, replication: int) -> Agreed:
    """Sum `everyone`, float64[world_size, votes + units + counts], over ranks.

    Every rank votes. `replication` consecutive ranks read the same packs; their units count once.
    """
    first = len(Votes._fields)
    return Agreed(
        votes=Votes(*everyone[:, :first].sum(axis=0).tolist()),
        units=everyone[::replication, first : first + num_units].sum(axis=0).tolist(),
        counts=everyone[:, first + num_units :],
    )


# Values of a step that the host reads from the device, in one transfer: the only wait for the device.


class StepReading:
    """The gradient norm, the losses and norms of groups of a step, copied to the host while its next work is queued."""

    def __init__(self, grad_norm: torch.Tensor, losses: torch.Tensor, of_groups: Sequence[torch.Tensor] = ()):
        self._shape, self._copied = losses.shape, None
        self._on_way = torch.cat([each.detach().double().flatten() for each in (grad_norm, losses, *of_groups)])
        if self._on_way.is_cuda:  # only into page-locked memory does the copy leave the host free
            on_host = torch.empty_like(self._on_way, device="cpu", pin_memory=True)
            self._on_way = on_host.copy_(self._on_way, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    @cached_property
    def values(self) -> tuple[float, torch.Tensor, list[float]]:
        """The norm, the losses on the CPU, float64 of their shape, and norms; the first use waits for the step."""
        if self._copied is not None:
            self._copied.synchronize()
        norm, *others = self._on_way.tolist()
        losses = torch.tensor(others[: self._shape.numel()], dtype=torch.float64)
        return norm, losses.view(self._shape), others[self._shape.numel() :]


# Groups of trained parameters without a gradient.

STEPS_WITHOUT_GRADIENT = 20  # steps that reach a group, before the warning


@dataclass(eq=False)
class TrainedGroup:
    """Parameters of a pattern of train.groups in towers for some kinds of media, or outside of towers."""

    pattern: str
    kinds: frozenset[str]  # any of them reaches the group; without kinds each step does
    parameters: list[torch.Tensor] = field(default_factory=list)
    num_steps: int = 0  # steps that reached the group, at most STEPS_WITHOUT_GRADIENT and the steps not yet read
    has_gradient: bool = False  # on this rank

    def gradient(self) -> torch.Tensor:
        """Return the sum of magnitudes of this rank's gradients, on the device: squares of small numbers are 0."""
        gradients = [local(each.grad) for each in self.parameters if each.grad is not None]
        nothing = local(self.parameters[0]).new_zeros(())
        return torch.stack(torch._foreach_norm(gradients, 1)).sum() if gradients else nothing


class Unreached:
    """Warns of each group of trained parameters without a gradient in the first steps that reach the group.

    Steps with media of a tower reach its groups, and steps with any media the parameters between towers and text model.
    """

    def __init__(self, model: Any, patterns: Iterable[str]):
        towers: dict[int, set[str]] = {}  # by id of a parameter: kinds of media
        text = [getattr(model.model, name, lambda: None)() for name in ("get_decoder", "get_output_embeddings")]
        for part in text:
            towers |= {id(each): set() for each in (() if part is None else part.parameters())}
        for kind, tower in model.towers.items():
            for each in tower.parameters():
                towers.setdefault(id(each), set()).add(kind)
        groups: dict[tuple[str, frozenset[str]], TrainedGroup] = {}
        for name, each in model.model.named_parameters():
            if each.requires_grad:
                pattern = next((one for one in patterns if one != "*" and fnmatchcase(name, one)), "*")
                key = pattern, frozenset(towers.get(id(each), model.towers))
                groups.setdefault(key, TrainedGroup(*key)).parameters.append(each)
        self._kinds, self._family, self._groups = sorted(model.towers), model.family, [*groups.values()]

    def media(self, batches: Sequence[Batch]) -> list[float]:
        """Return the number of batches with each kind of media."""
        present = [self._family.kinds_of(batch.inputs) for batch in batches] if self._kinds else []
        return [float(sum(kind in each for each in present)) for kind in self._kinds]

    def reached(self, media: Sequence[float]) -> list[TrainedGroup]:
        """Return the groups that a step reaches, of those without enough steps. media: of batches on all ranks."""
        present = {kind for kind, count in zip(self._kinds, media, strict=True) if count}
        few = [each for each in self._groups if each.num_steps < STEPS_WITHOUT_GRADIENT]
        return [each for each in few if not each.kinds or each.kinds & present]

    def take(self, groups: Sequence[TrainedGroup], gradients: Sequence[float], *, step: int, world: World) -> None:
        """Count a step with units to train on. groups, of `reached`, and gradients: of this rank."""
        for group, gradient in zip(groups, gradients, strict=True):
            group.num_steps += 1
            group.has_gradient |= gradient != 0
        if not (ended := [each for each in groups if each.num_steps == STEPS_WITHOUT_GRADIENT]):
            return
        anywhere = gather([float(each.has_gradient) for each in ended], world.world_size).any(dim=0).tolist()
        for group in [each for each, found in zip(ended, anywhere, strict=True) if not found and world.rank == 0]:
            logger.warning(
                "no gradient has reached the parameters of train.groups %r%s in the first %d steps that should, up to "
                "step %d: see that the losses depend on them, or name them in train.frozen",
                group.pattern, f", of {' and '.join(sorted(group.kinds))}" if group.kinds else "", group.num_steps,
                step,
            )  # fmt: skip
