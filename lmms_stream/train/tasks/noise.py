"""What a task draws at random for a sample: by the seed of the run, the step and the sample alone.

So noise is the same for any number of ranks, whatever lies beside a sample in its pack, and where a run resumes; and
it is never the same twice, because a step has a number of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...types import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """What is drawn in one step. seed: of the run. step: finished steps before it; None in an evaluation.

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
