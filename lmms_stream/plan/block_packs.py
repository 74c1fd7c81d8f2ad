"""The packs of a shuffle block, replayed some windows at a time. lengths + order + packing -> segments.

A step reads from a block of each canonical node. With many nodes, replaying whole blocks would take too long before the
first step, and too much memory. Only the next packs are kept, with the state of packing after the last of them: packing
proceeds by windows, and the packs of some windows equal the packs of the whole block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .lengths import Lengths
from .order import BegunBlock, EpochOrder, OrderConfig, RestOrder
from .packing import (
    NO_OPEN_PACKS,
    BlockSegments,
    OpenPacks,
    PackingConfig,
    Packs,
    block_seed,
    pack,
    pack_segments,
    pack_window,
    to_segments,
)
from .sample_order import SampleOrder

KEPT_SEGMENTS = 1 << 21  # for all canonical nodes together: whole blocks of 8 nodes
MIXED_SEGMENTS = 1 << 23  # for all sources of a mixture together: 128 MiB
LEAST_SEGMENTS = 1 << 12  # for each canonical node, for any number of nodes
EVENED_SEGMENTS = 1 << 16  # of even_fit, for each canonical node: a tenth of a second
WINDOW_SEGMENTS = 1 << 14  # minimum segments per call: smaller calls cost more than their packs

Order = EpochOrder | SampleOrder  # of an epoch, over whole datasets or over streams
_Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInputs:
    """Inputs of a plan's packs, besides the epoch. kept_segments: see PackPlan."""

    index: Lengths
    order: OrderConfig
    packing: PackingConfig
    kept_segments: int

    def lengths(self, order: Order, node: int, block: int, sample_ids: _Numbers) -> NDArray[np.integer[Any]]:
        """Return the tokens of a block's samples, or of the rest of a begun block."""
        begun = begun_block(order, node, block)
        return self.index.lengths[sample_ids] if begun is None else begun.lengths.astype(self.index.lengths.dtype)

    def patches(self, sample_ids: _Numbers) -> NDArray[np.integer[Any]] | None:
        """Return the patches of some samples; None for a dataset without media."""
        return None if self.index.patches is None else self.index.patches[sample_ids]


def begun_block(order: Order, node: int, block: int) -> BegunBlock | None:
    """Return the rest of a block begun before a change of packing_length; None for a whole block."""
    return order.begun(node, block) if isinstance(order, RestOrder) else None


def pack_block(inputs: PlanInputs, order: Order, node: int, block: int) -> Packs:
    """Return all packs of a block, over samples in epoch order."""
    sample_ids = order.block(node, block)
    lengths, patches = inputs.lengths(order, node, block, sample_ids), inputs.patches(sample_ids)
    inputs.index.release()
    seed = block_seed(order.config.seed, epoch=order.epoch, node=node, block=block)
    return pack(lengths, config=inputs.packing, seed=seed, patches=patches)


class _Start(NamedTuple):
    """State of packing before a window: its first pack and segment, and the open packs.

    carried: indices in the block of the open packs' segments.
    """

    pack: int = 0
    segment: int = 0
    waiting: OpenPacks = NO_OPEN_PACKS
    carried: _Numbers = np.empty(0, np.int64)


class _Window(NamedTuple):
    """The packs closed by a window: indices of their segments in the block, and the first segment of each pack.

    after: start of the next window; None at the end of the block.
    """

    segments: _Numbers
    offsets: _Numbers
    after: _Start | None


class BlockPacks:
    """The packs of a block; packs [first, stop) are in memory; see replay_to.

    sample_ids, lengths: int64[num_segments] of these packs, in pack order. offsets: int64[num_packs + 1].

    Memory comes from `before`, the unused packs of another block, if large enough: allocations of this size that come
    and go would fragment the heap.
    """

    def __init__(self, inputs: PlanInputs, order: Order, node: int, block: int, *, before: BlockPacks | None = None):
        self.block = block
        self._inputs = inputs
        self._order = order
        self._node = node
        self._seed = block_seed(order.config.seed, epoch=order.epoch, node=node, block=block)
        self._most = max(1, inputs.kept_segments // order.num_canonical_nodes)
        if inputs.packing.evens:
            self._most = min(self._most, EVENED_SEGMENTS)
        nothing = np.empty(0, np.int64)
        self._memory: tuple[_Numbers, _Numbers] = (nothing, nothing) if before is None else before._memory
        self._next: _Start | None = None
        self.first = self.stop = 0
        self.sample_ids = self.lengths = np.empty(0, np.int64)
        self.offsets = np.zeros(1, np.int64)
        self._pieces: NDArray[np.int32] | None = None
        self._begun = begun_block(order, node, block)
        self._begins: _Numbers | None = None  # first tokens of the segments' rests of samples
        self._repeats: _Numbers | None = None

    def starts_of(self, segments: _Numbers | slice) -> _Numbers | int:
        """Return the first token of each segment in its sample."""
        begins = 0 if self._begins is None else self._begins[segments]
        if self._pieces is None:
            return begins
        starts: _Numbers = self._pieces[segments].astype(np.int64) * self._inputs.packing.packing_length
        return starts + begins

    def repeats_of(self, segments: _Numbers | slice) -> _Numbers | None:
        """Return how often the sample of each segment came earlier in the epoch; None without repeats."""
        return None if self._repeats is None else self._repeats[segments]

    def replay_to(self, number: int) -> bool:
        """Load pack `number` and following packs within the memory limit; return whether the pack was missing."""
        if self.first <= number < self.stop:
            return False
        ids = self._order.block(self._node, self.block)
        lengths = self._inputs.lengths(self._order, self._node, self.block, ids)
        patches = self._inputs.patches(ids)
        segments = to_segments(lengths, config=self._inputs.packing, patches=patches)
        self._inputs.index.release()
        if len(segments.lengths) <= self._most:
            packs = pack_segments(segments.lengths, self._inputs.packing, self._seed)
            self._keep(ids, segments, packs.order, packs.offsets, first=0)
        else:
            self._keep(ids, segments, *self._stretch(segments, number), first=number)
        return True

    def _stretch(self, segments: BlockSegments, number: int) -> tuple[_Numbers, _Numbers]:
        """Return the packs from `number` on within the memory limit, in the form of _Window."""
        start = self._next if self._next is not None and self._next.pack <= number else _Start()
        found = [np.empty(0, np.int64)]
        ends = [np.zeros(1, np.int64)]
        num_kept = 0
        following: _Start | None = start
        config = self._inputs.packing
        while following is not None and num_kept < self._most:
            start = following
            window = self._pack_window(segments, start, config.counted)
            if config.evens and number < start.pack + len(window.offsets) - 1:
                window = self._pack_window(segments, start, config)  # only windows with packs to keep
            first = min(max(number - start.pack, 0), len(window.offsets) - 1)
            room = int(window.offsets[first]) + self._most - num_kept
            stop = int(np.searchsorted(window.offsets, room, side="right")) - 1
            if first < len(window.offsets) - 1:
                stop = max(stop, first + (not num_kept))  # at least a pack, of any number of segments
                begin, end = int(window.offsets[first]), int(window.offsets[stop])
                found.append(window.segments[begin:end])
                ends.append(window.offsets[first + 1 : stop + 1] - begin + num_kept)
                num_kept += end - begin
                if stop < len(window.offsets) - 1:
                    break  # the next call packs the rest of this window again
            following = window.after
        self._next = following
        return np.concatenate(found), np.concatenate(ends)

    def _pack_window(self, segments: BlockSegments, start: _Start, config: PackingConfig) -> _Window:
        """Return the packs of the window at a start, or of several small windows of the config."""
        num_segments = len(segments.lengths)
        size = config.samples_at_once or num_segments
        stop = min(num_segments, start.segment + size * max(1, WINDOW_SEGMENTS // size))
        packs = pack_window(
            segments.lengths[start.segment : stop],
            config=config,
            seed=self._seed,
            waiting=start.waiting,
            position=start.segment,
            last=stop == num_segments,
        )
        indices = np.concatenate([start.carried, np.arange(start.segment, stop)])[packs.order]
        closed = int(packs.offsets[packs.num_closed])
        after = None
        if stop < num_segments:
            waiting = OpenPacks(
                lengths=segments.lengths[indices[closed:]],
                offsets=packs.offsets[packs.num_closed :] - closed,
                firsts=packs.firsts,
            )
            after = _Start(start.pack + packs.num_closed, stop, waiting, indices[closed:])
        return _Window(indices[:closed], packs.offsets[: packs.num_closed + 1], after)

    def _keep(
        self,
        ids: _Numbers,
        segments: BlockSegments,
        order: NDArray[np.integer[Any]],
        offsets: _Numbers,
        *,
        first: int,
    ) -> None:
        """Keep these packs in memory. order: of their segments, indices in the block."""
        if len(self._memory[0]) < len(order):
            room = max(len(order), min(self._most, self._order.config.shuffle_block_size))
            self._memory = np.empty(room, np.int64), np.empty(room, np.int64)
        self.sample_ids, self.lengths = (memory[: len(order)] for memory in self._memory)
        np.take(ids, segments.positions[order], out=self.sample_ids)
        self.lengths[:] = (segments.lengths if segments.whole is None else segments.whole)[order]
        self._pieces = None if segments.pieces is None else segments.pieces[order]
        self._begins = None if self._begun is None else self._begun.starts[segments.positions[order]]
        repeats = self._order.repeats(self._node, self.block)
        self._repeats = None if repeats is None else repeats[segments.positions[order]]
        self.offsets = offsets
        self.first, self.stop = first, first + len(offsets) - 1
