"""Interface of tasks: samples -> inputs -> sums of losses over units.

The loss of a step is the sum over objectives of weight * (sum over the global batch) / (units of the global batch): the
loss does not depend on the ranks of the packs.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from ...errors import ConfigError
from ...types import Batch
from ..model.model import PackedModel

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """An objective of training. is_logged: whether records contain the loss (False for a penalty, for example).

    is_figure: a figure, not trained on; records contain the mean by name, next to the loss.
    """

    name: str
    weight: float = 1.0
    is_logged: bool = True
    is_figure: bool = False


class LossSum(NamedTuple):
    """An objective's losses of some packs.

    total: float32[], their sum, differentiable except for figures. of_packs: float64[packs], sums by pack, without
    gradients.
    """

    total: torch.Tensor
    of_packs: torch.Tensor

    @staticmethod
    def of(losses: torch.Tensor, counts: Sequence[int]) -> LossSum:
        """Return the sums of single losses, float32[n]. counts: losses of each pack, in order.

        ConfigError for losses of another shape, for example from a function of the user.
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
    """An object with these members is a task, for the trainer's `task`.

    All ranks call each method equally often, also with packs without samples: then sums are zero, and differentiable.

    Optional members:

    - `wrap`, for models other than transformers' language models: the created model -> the module to shard by FSDP
      and to pass to the other methods, usually a PlainModel (model/build.py).
    - `packed_model`, for language models that are not causal: the model and the family of the processors -> a subclass
      of PackedModel.
    - `run_one`, for tasks with images as units: the model -> the output for an image on the meta device, to count FLOPs
      for perf/mfu; None if unknown.
    - `reference`, for tasks that compare the model with the starting weights: "model" or "stored"; and
      `prepare(model, passes, *, reference, is_training)`, called before the losses of a step or of an evaluated pack,
      with a Reference (reference.py) and the packs by forward pass (StepPasses, preference.py). `losses` gets
      the result as `known`.
    - `name`, for tasks in TASKS (registry.py) that read samples of a single kind; see check_objective in registry.py.
    """

    @property
    def collate(self) -> Callable[..., Batch]:
        """Samples of a pack -> Batch, in loader workers; see loader/collate.py."""
        ...

    def objectives(self, model: PackedModel) -> Sequence[Objective]:
        """Objectives of this model, in the same order on every rank."""
        ...

    def units(self, pack: Batch) -> Mapping[str, int]:
        """Return the units of each objective in a pack on the CPU, such as loss tokens."""
        ...

    def losses(self, model: PackedModel, batch: Batch, packs: Sequence[Batch]) -> Mapping[str, LossSum]:
        """Return the sums of each objective over the packs joined in a batch on the device.

        A task with random draws takes a further keyword `draw`: a Draw, with the same numbers for a sample in a step on
        any ranks.
        """
        ...

    def check(self, model: PackedModel, *, device: torch.device, bf16: bool, is_compiled: bool) -> None:
        """Raise ConfigError for a model that does not keep the samples of a pack apart; may choose the attention.

        bf16: the model computes in bfloat16 with parameters of any type. is_compiled: blocks were compiled after the
        last check, and the choice must not change.
        """
        ...


# Random draws of a task for a sample: by the seed of the run, the step, the sample and its repeat only.
#
# Noise is the same for any number of ranks, any neighbours in the pack, and after a resume. Noise is never the same
# twice, because steps have different numbers.


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Random draws of a step. seed: of the run. step: number of earlier steps; None in an evaluation.

    Evaluations draw the same numbers for a sample each time. Streams with different names are independent. A sample is
    identified by Batch.sample_ids, source and repeats. Tensors are on the CPU, samples in the order of the packs.
    """

    seed: int
    step: int | None

    def generator(self, source: str, sample_id: int, name: str = "noise", *, repeat: int = 0) -> np.random.Generator:
        """Return the generator of a sample, for any number of draws. repeat: see Batch.repeat_of.

        >>> draw = Draw(seed=0, step=7)
        >>> [int(draw.generator("data", 3).integers(100)) for _ in range(2)]
        [83, 83]
        """
        step = 0 if self.step is None else self.step + 1
        key = [self.seed, step, int(sample_id), _number(source), _number(name)]
        return np.random.default_rng([*key, repeat] if repeat else key)

    def normal(self, packs: Sequence[Batch], shape: Sequence[int], *, name: str = "noise") -> torch.Tensor:
        """Return N(0, 1) for each sample: float32[num_samples, *shape]."""
        return self._of_samples(packs, shape, name, lambda rng: rng.standard_normal(tuple(shape), np.float32))

    def uniform(self, packs: Sequence[Batch], shape: Sequence[int] = (), *, name: str = "time") -> torch.Tensor:
        """Return U[0, 1) for each sample: float32[num_samples, *shape]."""
        return self._of_samples(packs, shape, name, lambda rng: rng.random(tuple(shape), np.float32))

    def chosen(self, packs: Sequence[Batch], probability: float, *, name: str) -> torch.Tensor:
        """Return whether each sample is chosen, with this probability: bool[num_samples]."""
        return self.uniform(packs, name=name) < probability

    def _of_samples(
        self, packs: Sequence[Batch], shape: Sequence[int], name: str, make: Callable[[np.random.Generator], object]
    ) -> torch.Tensor:
        made = [
            make(self.generator(pack.source, sample_id, name, repeat=pack.repeats[index] if pack.repeats else 0))
            for pack in packs
            for index, sample_id in enumerate(pack.sample_ids.tolist())
        ]
        return torch.from_numpy(np.array(made, np.float32).reshape(len(made), *shape))


def _number(name: str) -> int:
    return zlib.crc32(name.encode())


# Batches on the device, copied ahead.


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches on the device. On a GPU, up to two batches are copied ahead, by a thread and on a stream."""
    if device.type != "cuda":
        yield from (batch.to(device) for batch in batches)
        return
    stream = _side_stream(device)

    def copied(batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        pinned = batch if batch.input_ids.is_pinned() else batch.pin_memory()
        with torch.cuda.stream(stream):
            return pinned.to(device), stream.record_event()

    for batch, event in in_thread(copied, batches, thread=_copying_thread(device)):
        current = torch.cuda.current_stream()
        current.wait_event(event)
        batch.record_stream(current)  # keeps its memory until this stream is done with it
        yield batch


def in_thread(make: Callable[[Any], Made], items: Iterable[Any], *, thread: Executor, ahead: int = 2) -> Iterator[Made]:
    """Yield make(item) of each item in order, made in a thread, up to `ahead` items before they are asked for.

    An error of `make` is raised in its turn, one of `items` at once.
    """
    waiting: deque[Future[Made]] = deque()
    left = iter(items)
    try:
        while True:
            waiting.extend(thread.submit(make, item) for item in islice(left, ahead + 1 - len(waiting)))
            if not waiting:
                return
            yield waiting.popleft().result()
    finally:
        for each in waiting:
            each.cancel()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _copying_thread(device: torch.device) -> Executor:
    # A thread begins on GPU 0, and would reserve memory of it on every rank.
    return ThreadPoolExecutor(1, "lmms_stream-copies", initializer=torch.cuda.set_device, initargs=(device,))
