"""Batches of samples with similar lengths, for unpacked data. lengths -> [sampler] -> sample numbers of this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from ....checks import whole_number
from ....errors import ConfigError
from ....types import World


class DistributedLengthGroupedSampler(Sampler[int]):
    """Sampler of a rank's sample numbers that batches samples of similar lengths.

    Samples are shuffled, cut into megabatches (batch_size x gradient_accumulation_steps of every rank), and each
    megabatch is sorted by length, longest first. The megabatch with the longest sample comes first, to run out of
    memory at the start if at all. Ranks take turns in a megabatch, and therefore have similar lengths at each moment.
    Every sample comes once in an epoch; with drop_last an incomplete last turn of all ranks is left out, otherwise the
    first samples of the epoch fill it up.

    lengths: lengths of the samples (default: the dataset's modality_length). num_replicas, rank: default from torchrun.
    """

    def __init__(
        self,
        batch_size: int,
        dataset: Any = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        lengths: Sequence[int] | None = None,
        *,
        gradient_accumulation_steps: int = 1,
    ):
        if lengths is None:
            lengths = getattr(dataset, "modality_length", None)
        if lengths is None:
            raise ConfigError("samples are grouped by their lengths: give a dataset with modality_length, or lengths")
        batch_size = whole_number("batch_size", batch_size, least=1)
        num_batches = whole_number("gradient_accumulation_steps", gradient_accumulation_steps, least=1)
        world = World.detect()
        num_replicas = world.world_size if num_replicas is None else num_replicas
        self.num_replicas = whole_number("num_replicas", num_replicas, least=1)
        self.rank = world.rank if rank is None else whole_number("rank", rank, least=0)
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigError(f"rank must be from 0 to {self.num_replicas - 1}, got {self.rank}")
        self.lengths = np.asarray(lengths, np.int64)
        self.drop_last = drop_last
        self._megabatch = batch_size * num_batches * self.num_replicas
        self._seed = whole_number("seed", seed, least=0)
        self._epoch = 0
        turns, left = divmod(len(self.lengths), self.num_replicas)
        self._num_turns = turns + (left > 0 and not drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch."""
        self._epoch = whole_number("epoch", epoch, least=0)

    def __len__(self) -> int:
        return self._num_turns

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([self._seed, self._epoch]).permutation(len(self.lengths))
        batches = [order[at : at + self._megabatch] for at in range(0, len(order), self._megabatch)]
        batches = [batch[np.argsort(-self.lengths[batch], kind="stable")] for batch in batches]
        if batches:
            first = max(range(len(batches)), key=lambda number: self.lengths[batches[number][0]])
            if first != len(batches) - 1 or len(batches[-1]) == self._megabatch:  # a short batch stays at the end
                batches[0], batches[first] = batches[first], batches[0]
        numbers = np.concatenate(batches) if batches else order
        numbers = np.resize(numbers, self._num_turns * self.num_replicas)
        return iter(numbers[self.rank :: self.num_replicas].tolist())
