"""Interface of tasks: samples -> inputs -> sums of losses over units.

The loss of a step is the sum over the objectives of weight * (sum over the global batch) / (units over the global
batch), so it does not depend on how packs fall to ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ...errors import ConfigError
from ...types import Batch
from ..model.model import PackedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Something that is learnt. is_logged: whether records tell it (a penalty on the side need not be).

    is_figure: it is not learnt, and records tell its mean by its name, beside the loss.
    """

    name: str
    weight: float = 1.0
    is_logged: bool = True
    is_figure: bool = False


class LossSum(NamedTuple):
    """An objective's losses of some packs.

    total: float32[], their sum, to be differentiated, unless it is of a figure. of_packs: float64[packs], the same by
    pack, without gradients.
    """

    total: torch.Tensor
    of_packs: torch.Tensor

    @staticmethod
    def of(losses: torch.Tensor, counts: Sequence[int]) -> LossSum:
        """Sum of single losses, float32[n], with the number of losses of each pack, in the order of the packs.

        ConfigError for losses of another shape, which a function of the user may have returned.
        """
        if not isinstance(losses, torch.Tensor) or losses.shape != (sum(counts),):
            raise ConfigError(
                f"the losses of {len(counts)} packs are {described(losses)}: return one number for each of their "
                f"{sum(counts)} units, float32[{sum(counts)}], such as losses with reduction='none'"
            )
        by_pack = [each.double().sum() for each in losses.detach().split(list(counts))]
        return LossSum(losses.sum(), torch.stack(by_pack))


def described(value: object) -> str:
    """Return the type of a value, with the shape of a tensor."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"a {type(value).__name__}"


class Task(Protocol):
    """Anything with these members trains; pass it as the trainer's `task`.

    Every rank calls each of them equally often, with packs that may hold no sample: then sums are zero, and can be
    differentiated all the same.

    A task of models that are not transformers' language models has a method `wrap` besides: the model that the trainer
    creates -> what FSDP shards as a whole and the other methods are given, a PlainModel (model/build.py) mostly. One
    of language models that are not causal has `packed_model` instead: the model, and the family of its processors -> a
    subclass of PackedModel. One whose units are images may have `run_one`: the model -> what it makes of one image on
    the meta device, by which its arithmetic is counted for perf/mfu; None where that is not known.

    One that compares the model with its starting weights has `reference`, where these come from ("model", "stored"),
    and `prepare(model, passes, *, reference, is_training)`: it is called before the losses of a step or of a pack to
    evaluate, with a Reference (reference.py) and the packs by forward pass (StepPasses, preference.py). Its
    result is passed to `losses` as `known`.

    One of TASKS (registry.py) that reads samples of one kind alone has a `name`, see check_objective there.
    """

    @property
    def collate(self) -> Callable[..., Batch]:
        """Samples of a pack -> Batch, in loader workers; see loader/collate.py."""
        ...

    def objectives(self, model: PackedModel) -> Sequence[Objective]:
        """Objectives of this model, in the same order on every rank."""
        ...

    def units(self, pack: Batch) -> Mapping[str, int]:
        """How many units of each objective a pack on the CPU has, such as loss tokens."""
        ...

    def losses(self, model: PackedModel, batch: Batch, packs: Sequence[Batch]) -> Mapping[str, LossSum]:
        """The sum of each objective over the packs that a batch on the device is joined of.

        One that draws at random takes a keyword `draw` besides: a Draw, which gives the same numbers for a
        sample in a step whatever the ranks are.
        """
        ...

    def check(self, model: PackedModel, *, device: torch.device, bf16: bool, is_compiled: bool) -> None:
        """ConfigError for a model that does not keep the samples of a pack apart; may choose how it does so.

        bf16: the model computes in bfloat16 whatever its parameters are. is_compiled: its blocks are compiled since the
        last check, so what was chosen stays.
        """
        ...


# What a task draws at random for a sample: by the seed of the run, the step and the sample alone.
#
# So noise is the same for any number of ranks, whatever lies beside a sample in its pack, and where a run resumes; and
# it is never the same twice, because a step has a number of its own.


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Random draws of one step. seed: of the run. step: finished steps before it; None in an evaluation.

    An evaluation draws the same for a sample each time. Streams with different names are independent. A sample is told
    from others by Batch.sample_ids and Batch.source. Tensors are on the CPU, samples in the order of the packs.
    """

    seed: int
    step: int | None

    def generator(self, source: str, sample_id: int, name: str = "noise") -> np.random.Generator:
        """The random numbers of one sample, to draw any number of tensors from, one after another.

        >>> draw = Draw(seed=0, step=7)
        >>> [int(draw.generator("data", 3).integers(100)) for _ in range(2)]
        [83, 83]
        """
        step = 0 if self.step is None else self.step + 1
        return np.random.default_rng([self.seed, step, int(sample_id), _number(source), _number(name)])

    def normal(self, packs: Sequence[Batch], shape: Sequence[int], *, name: str = "noise") -> torch.Tensor:
        """N(0, 1) for each sample: float32[num_samples, *shape]."""
        return self._of_samples(packs, shape, name, lambda rng: rng.standard_normal(tuple(shape), np.float32))

    def uniform(self, packs: Sequence[Batch], shape: Sequence[int] = (), *, name: str = "time") -> torch.Tensor:
        """U[0, 1) for each sample: float32[num_samples, *shape]."""
        return self._of_samples(packs, shape, name, lambda rng: rng.random(tuple(shape), np.float32))

    def chosen(self, packs: Sequence[Batch], probability: float, *, name: str) -> torch.Tensor:
        """Whether each sample is among those that are chosen with this probability: bool[num_samples]."""
        return self.uniform(packs, name=name) < probability

    def _of_samples(
        self, packs: Sequence[Batch], shape: Sequence[int], name: str, make: Callable[[np.random.Generator], object]
    ) -> torch.Tensor:
        made = [make(self.generator(source, sample_id, name)) for source, sample_id in samples_of(packs)]
        return torch.from_numpy(np.array(made, np.float32).reshape(len(made), *shape))


def samples_of(packs: Sequence[Batch]) -> Iterator[tuple[str, int]]:
    """The source and the id of each sample of some packs, in their order."""
    for pack in packs:
        for sample_id in pack.sample_ids.tolist():
            yield pack.source, sample_id


def _number(name: str) -> int:
    return zlib.crc32(name.encode())


# Batches on the device, copied ahead.


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on the device; on a GPU each is taken, and its copy begun, before the one before it is given."""
    if device.type != "cuda":
        yield from (batch.to(device) for batch in batches)
        return
    stream, waiting = _side_stream(device), None
    for batch in batches:
        pinned = batch if batch.input_ids.is_pinned() else batch.pin_memory()
        with torch.cuda.stream(stream):
            copied = pinned.to(device), stream.record_event()
        if waiting is not None:
            yield _ready(*waiting)
        waiting = copied
    if waiting is not None:
        yield _ready(*waiting)


def _ready(batch: Batch, event: torch.cuda.Event) -> Batch:
    """The batch, once what is computed from here on waits for its copy; its memory is kept until that is computed."""
    current = torch.cuda.current_stream()
    current.wait_event(event)
    batch.record_stream(current)
    return batch


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
