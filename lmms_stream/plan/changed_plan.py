"""A plan after a change of packing_length. plan + position -> plan of the rest of the epoch, and of later epochs.

Packs before the change have the former length. The rest of the epoch is packed with the new length: unread samples of
the last shuffle block read in each canonical node, and all later blocks. Packs are numbered on, and a position stays a
number of packs. Only the position of the change is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .cursor import LengthChange
from .epoch_plan import Amounts, EpochPlan, block_counts, count_block
from .order import LeftOfNode, RestOrder
from .pack_plan import PackPlan
from .packing import PackRange


class JoinedEpoch(EpochPlan):
    """An epoch with a change: the first packs of `before`, and then the packs of `rest`; see EpochPlan."""

    def __init__(self, before: EpochPlan, num_before: int, rest: EpochPlan):
        self._before, self._num_before, self._rest = before, num_before, rest
        self._read = before.amounts(num_before)
        self._overlong_read = before.overlong_in(num_before)
        self.num_packs = num_before + rest.num_packs
        self.num_tokens = self._read.tokens + rest.num_tokens
        self.num_overlong = self._overlong_read[0] + rest.num_overlong
        self.num_overlong_media = self._overlong_read[1] + rest.num_overlong_media

    def packs(self, numbers: NDArray[np.int64]) -> PackRange:
        """Return the packs with these numbers, one or more, ascending."""
        return PackRange.joined([part.packs(own) for part, own in self._parts(numbers)])

    def canonical_nodes(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.concatenate([part.canonical_nodes(own) for part, own in self._parts(numbers)])

    def blocks(self, numbers: NDArray[np.int64]) -> list[tuple[int, int, int]]:
        firsts: dict[tuple[int, int], int] = {}
        position = 0
        for part, own in self._parts(numbers):
            for first, node, block in part.blocks(own):
                firsts.setdefault((node, block), position + first)
            position += len(own)
        return [(first, node, block) for (node, block), first in firsts.items()]

    @property
    def has_tokens(self) -> bool:
        return True

    def tokens(self, first: int, stop: int) -> NDArray[np.int64]:
        packs = self.packs(np.arange(first, stop))  # there are few such epochs: nothing is kept
        return np.add.reduceat(packs.lengths, packs.offsets[:-1])

    def _parts(self, numbers: NDArray[np.int64]) -> list[tuple[EpochPlan, NDArray[np.int64]]]:
        """Return the parts with any of these packs, each with its own numbers. numbers: one or more, ascending."""
        early = int(np.searchsorted(numbers, self._num_before))
        parts = (self._before, numbers[:early]), (self._rest, numbers[early:] - self._num_before)
        return [(part, own) for part, own in parts if len(own)]

    def forget_blocks(self) -> None:
        self._before.forget_blocks()
        self._rest.forget_blocks()

    def shards_of_block(self, node: int, block: int) -> NDArray[np.int64]:
        return self._rest.shards_of_block(node, block)

    def packs_of(self, sample_id: int) -> NDArray[np.int64]:
        early = self._before.packs_of(sample_id)
        return np.concatenate([early[early < self._num_before], self._num_before + self._rest.packs_of(sample_id)])

    def first_packs_of(self, sample_ids: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        for pack, sample_id in self._before.first_packs_of(sample_ids):
            if pack >= self._num_before:
                break
            yield pack, sample_id
        for pack, sample_id in self._rest.first_packs_of(sample_ids):
            yield self._num_before + pack, sample_id

    def amounts(self, num_packs: int) -> Amounts:
        if num_packs <= self._num_before:
            return self._before.amounts(num_packs)
        later = self._rest.amounts(num_packs - self._num_before)
        return Amounts(self._read.samples + later.samples, self._read.tokens + later.tokens)

    def overlong_in(self, num_packs: int) -> tuple[int, int]:
        if num_packs <= self._num_before:
            return self._before.overlong_in(num_packs)
        overlong, media = self._rest.overlong_in(num_packs - self._num_before)
        return self._overlong_read[0] + overlong, self._overlong_read[1] + media

    def left_after(self, num_packs: int) -> list[LeftOfNode]:
        """Return the rest of each canonical node, see EpochPlan. num_packs: not before the change."""
        return self._rest.left_after(num_packs - self._num_before)


class ChangedPlan(PackPlan):
    """The plan of a source after a change of packing_length; `packing` has the new length.

    The fingerprint is the one from step 0 on.
    """

    def __init__(self, before: PackPlan, change: LengthChange):
        packing = before.packing.of_length(change.length)
        inputs = {"order": before.order, "packing": packing, "kept_segments": before.kept_segments}
        super().__init__(before.index, before.samples_per_shard, **inputs)  # type: ignore[arg-type]
        self._before, self._change = before, change
        self._whole = before.of_packing(packing)
        self.counts_tokens = before.counts_tokens
        self._joined: dict[int, JoinedEpoch] = {}
        self.fingerprint = before.fingerprint

    @cached_property
    def is_short(self) -> bool:
        return False

    @property
    def least_length(self) -> int:
        return min(self._before.least_length, self._change.length)

    def count(self, epoch: int) -> None:
        self._whole.count(epoch)

    def packs_in_turn(self, epoch: int) -> int:
        return self.num_packs(epoch) - (self._change.packs if epoch == self._change.epoch else 0)

    def _epoch(self, epoch: int) -> EpochPlan:
        if epoch < self._change.epoch:
            return self._before._epoch(epoch)
        if epoch > self._change.epoch or not self._change.packs:
            return self._whole._epoch(epoch)
        if epoch not in self._joined:
            before = self._before._epoch(epoch)
            self._joined[epoch] = JoinedEpoch(before, self._change.packs, self._rest(before))
        return self._joined[epoch]

    def _rest(self, before: EpochPlan) -> EpochPlan:
        """Return the packs of the new length that follow the packs before the change."""
        epoch, inputs, whole = self._change.epoch, self._inputs, self._whole
        key, order = whole._packed(epoch)
        lefts = before.left_after(self._change.packs)
        rest = RestOrder(self.samples_per_shard, config=order.config, epoch=epoch, lefts=lefts)
        cache, counting = whole._counts_cache, whole._counting
        counts = block_counts(inputs, order, key, counts_cache=cache, counting=counting)[0].copy()
        row = 0
        for node, left in enumerate(lefts):
            counts[row : row + left.first_block] = 0
            if left.begun is not None:
                found = count_block(inputs, rest, node, left.first_block)
                counts[row + left.first_block] = found[: counts.shape[1]]
            row += rest.num_blocks(node)
        return EpochPlan(inputs, rest, counts, epoch=epoch)

    def _room(self, epoch: int) -> int:
        if epoch < self._change.epoch:
            return self._before._room(epoch)
        if epoch > self._change.epoch or not self._change.packs:
            return super()._room(epoch)
        packed = self._before._room(epoch) * self._change.packs // self._before.num_packs(epoch)
        return packed + super()._room(epoch) - self._change.packs * self.packing.packing_length
