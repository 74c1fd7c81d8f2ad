"""Packs of samples with unknown lengths. order + measure -> [lanes] -> packs; arithmetic only.

A lane is a canonical node of the epoch order, epoch after epoch without end. A lane measures a window of samples at a
time, and packs the window like the plan of a lengths index: in every epoch the packs of lane l are the plan's packs of
canonical node l, in the same order.

Pack g of a run comes from lane g mod M, with M lanes. Rank r of R reads the packs with g mod R == r, and worker w of W
of this rank reads each W-th of these, from number w on. Each reader (a worker of a rank) has its own lanes if R * W
divides M.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, CursorError, PackingError
from ..types import PackSegments
from .lane_cursor import CarriedPacks, LaneAfter, LaneCursor, LaneState
from .order import EpochOrder, OrderConfig, shards_of
from .packing import MAX_LENGTH, BlockSegments, OpenPacks, PackingConfig, block_seed, cut_overlong, pack_window
from .planner import Planned, StepConfig, Work

MAX_DEFAULT_LANES = 64
MIN_WINDOWS_PER_DEFAULT_LANE = 2


def default_lanes(num_samples: int, window: int) -> int:
    """Return a power of two with at least two windows of samples per lane, from 1 to 64.

    >>> [default_lanes(n, 512) for n in (100, 5000, 10**6)]
    [1, 4, 64]
    """
    lanes = max(1, min(MAX_DEFAULT_LANES, num_samples // (MIN_WINDOWS_PER_DEFAULT_LANE * window)))
    return 1 << (lanes.bit_length() - 1)


def allowed_readers(num_lanes: int) -> list[int]:
    """Return the numbers of readers (ranks times workers) that can share the lanes: its divisors, ascending."""
    return [count for count in range(1, num_lanes + 1) if num_lanes % count == 0]


def check_lanes(num_lanes: int, num_ranks: int, num_workers: int) -> None:
    """Raise ConfigError if readers cannot have their own lanes. num_workers: per rank, at least 1."""
    readers = num_ranks * num_workers
    if num_lanes % readers:
        allowed = ", ".join(map(str, allowed_readers(num_lanes)))
        raise ConfigError(
            f"{num_ranks} ranks of {num_workers} workers are {readers} readers, which cannot share {num_lanes} lanes: "
            f"ranks times workers must be one of {allowed}; change the number of workers, or set num_canonical_nodes "
            f"to a multiple of {readers}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LanePack:
    """A pack, as in PackRange: sample_ids, starts and lengths are int64[num_segments].

    expected, patches: int64[num_segments], measured tokens and patches of each segment's sample.
    """

    sample_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    expected: NDArray[np.int64]
    patches: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class _LaneWindow:
    """The packs closed by a window, pack after pack, and the state of the lane after these packs."""

    segments: LanePack
    offsets: NDArray[np.int64]
    num_packs: int
    after: LaneState

    def pack(self, number: int) -> LanePack:
        first, stop = self.offsets[number : number + 2]
        return LanePack(**{field.name: getattr(self.segments, field.name)[first:stop] for field in fields(LanePack)})


class Lane:
    """The packs of lane `lane`, without end, from the beginning or from a state.

    measure is called with the ids of up to a window of samples (PackingConfig.samples_at_once; with first_fit a whole
    shuffle block), and must always return the same lengths. A lane that resumes from a state measures a window again,
    at its first pack.

    Raises ConfigError for an unknown lane or a lane without samples, and CursorError for a state that does not fit the
    lane, order or packing.
    """

    def __init__(
        self,
        samples_per_shard: Sequence[int] | NDArray[np.int64],
        *,
        order: OrderConfig,
        packing: PackingConfig,
        lane: int,
        measure: Measure,
        state: LaneState | None = None,
    ):
        self._state = state or LaneState()
        self._samples_per_shard = np.asarray(samples_per_shard, dtype=np.int64)
        self._order = EpochOrder(self._samples_per_shard, config=order, epoch=self._state.epoch)
        self._packing = packing
        self._lane = lane
        self._measure = measure
        self._block: tuple[tuple[int, int], MeasuredBlock] | None = None  # with its epoch and number
        self._window: _LaneWindow | None = None
        self.epoch = self._state.epoch  # epoch of the last pack
        self._check()

    @property
    def state(self) -> LaneState:
        """State of the lane after the last pack."""
        return self._state

    def next_pack(self) -> LanePack:
        """Return the next pack.

        Raises PackingError for a sample without tokens, with overlong "error" for an overlong sample, and for a whole
        epoch of the lane without a pack because all samples are dropped or unmeasured. The state is then unchanged.
        """
        state, window = self._state, self._window
        if window is None:
            window = self._pack_window(state)
            if 0 < state.taken >= window.num_packs:
                raise CursorError(
                    f"the saved lane state has taken {state.taken} packs of a window with {window.num_packs} packs: "
                    "measured lengths have changed; restore the dataset and its processor"
                )
        begins_epoch = state.block == state.sample == state.piece == state.taken == 0
        first_whole_epoch = state.epoch if begins_epoch else state.epoch + 1
        while not window.num_packs:
            state = window.after
            if state.epoch > first_whole_epoch:
                raise PackingError(
                    f"lane {self._lane} has no packs in epoch {first_whole_epoch}, all its samples are longer than "
                    f"packing_length {self._packing.packing_length} and dropped, or cannot be measured: raise "
                    "packing_length, set overlong to truncate, split or keep, or correct the processor"
                )
            window = self._pack_window(state)
        self.epoch = state.epoch
        if state.taken + 1 < window.num_packs:
            self._window = window
            self._state = replace(state, taken=state.taken + 1, num_packs=state.num_packs + 1)
        else:
            self._window = None
            self._state = replace(window.after, num_packs=state.num_packs + 1)
        return window.pack(state.taken)

    def _pack_window(self, state: LaneState) -> _LaneWindow:
        """Return the packs of the window at a state."""
        block = self._block_at(state)
        window = block.window(state.sample, state.piece)
        last = window.next_sample == len(block.sample_ids)
        seed = block_seed(self._order.config.seed, epoch=state.epoch, node=self._lane, block=state.block)
        before = state.carried.segments()
        waiting = OpenPacks(
            lengths=self._segment_lengths(*before[1:3]).astype(np.int32),
            offsets=np.cumsum([0, *state.carried.sizes], dtype=np.int64),
            firsts=np.array(state.carried.firsts, np.int64),
        )
        packs = pack_window(
            window.lengths, config=self._packing, seed=seed, waiting=waiting, position=state.segment, last=last
        )
        now = window.samples, window.expected, window.pieces, window.patches
        samples, expected, pieces, patches = (
            np.concatenate(both)[packs.order] for both in zip(before, now, strict=True)
        )
        after = replace(state, taken=0, num_overlong=state.num_overlong + window.num_overlong)
        if last:
            further, number = divmod(state.block + 1, self._order.num_blocks(self._lane))
            after = replace(
                after, epoch=state.epoch + further, block=number, sample=0, piece=0, segment=0, carried=CarriedPacks()
            )
        else:
            kept = packs.offsets[packs.num_closed]
            carried = CarriedPacks(
                sizes=tuple(np.diff(packs.offsets[packs.num_closed :]).tolist()),
                firsts=tuple(packs.firsts.tolist()),
                samples=tuple(samples[kept:].tolist()),
                expected=tuple(expected[kept:].tolist()),
                pieces=tuple(pieces[kept:].tolist()) if pieces[kept:].any() else (),
                patches=tuple(patches[kept:].tolist()) if patches[kept:].any() else (),
            )
            segment = state.segment + len(window.lengths)
            after = replace(after, sample=window.next_sample, piece=window.next_piece, segment=segment, carried=carried)
        segments = LanePack(
            sample_ids=block.sample_ids[samples],
            starts=pieces * self._packing.packing_length,
            lengths=expected if self._packing.overlong == "keep" else self._segment_lengths(expected, pieces),
            expected=expected,
            patches=patches,
        )
        return _LaneWindow(segments=segments, offsets=packs.offsets, num_packs=packs.num_closed, after=after)

    def _segment_lengths(self, expected: NDArray[np.int64], pieces: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the packed tokens of segments."""
        limit = self._packing.packing_length
        lengths: NDArray[np.int64] = np.minimum(expected - pieces * limit, limit)
        return lengths

    def _block_at(self, state: LaneState) -> MeasuredBlock:
        if self._order.epoch != state.epoch:
            self._order = EpochOrder(self._samples_per_shard, config=self._order.config, epoch=state.epoch)
        key = state.epoch, state.block
        if self._block is None or self._block[0] != key:
            sample_ids = self._order.block(self._lane, state.block)
            block = MeasuredBlock(sample_ids, state.sample, packing=self._packing, measure=self._measure)
            self._block = key, block
        return self._block[1]

    def _check(self) -> None:
        """Raise the errors of the class."""
        num_lanes, state, carried = self._order.num_canonical_nodes, self._state, self._state.carried
        if not 0 <= self._lane < num_lanes:
            raise ConfigError(
                f"lane must be from 0 to {num_lanes - 1}, got {self._lane}: there is a lane for each of "
                "num_canonical_nodes"
            )
        first, stop = self._order.node_bounds(self._lane)
        if first == stop:
            raise ConfigError(
                f"lane {self._lane} of {num_lanes} has no samples, the shards hold {self._order.num_samples}: "
                "set num_canonical_nodes to at most that number"
            )
        first += state.block * self._order.config.shuffle_block_size
        lengths, pieces = self._segment_lengths(*carried.segments()[1:3]), carried.segments()[2].tolist()
        fills = np.diff(np.cumsum(lengths)[np.cumsum(carried.sizes, dtype=np.int64) - 1], prepend=0)
        if not (
            (state.epoch <= state.num_packs or state == LaneState(epoch=state.epoch))  # an iteration begins an epoch
            and state.num_overlong <= (state.epoch + 1) * (stop - self._order.node_bounds(self._lane)[0])
            and first + state.sample < min(stop, first + self._order.config.shuffle_block_size)
            and max(carried.samples, default=0) <= state.sample
            and max(carried.firsts, default=-1) < state.segment
            and len({*zip(carried.samples, pieces, strict=True)}) == len(pieces)
            and min(lengths, default=1) >= 1
            and max(fills, default=0) <= self._packing.packing_length
            and (not carried.sizes or self._packing.strategy != "first_fit")
            and (self._packing.overlong == "split" or not any((state.piece, *pieces)))
            and (self._packing.overlong == "split" or state.segment <= state.sample)
        ):
            raise CursorError(
                f"the saved lane state does not fit lane {self._lane} (block {state.block}, sample {state.sample}, "
                f"{len(carried.sizes)} packs carried): restore its dataset, order and packing settings, or use another "
                "checkpoint"
            )


# A shuffle block with samples that are measured on demand. sample ids + measure -> segments.

UNMEASURED = -1  # tokens of a sample without a length: it is in no pack, as if missing in the dataset

# sample ids -> tokens of each, or UNMEASURED: int64[n]; in a dataset with media tokens and patches of each: int64[n, 2]
Measure = Callable[[NDArray[np.int64]], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSegments:
    """The segments of a window.

    samples: indices in the block. expected, patches: measured tokens and patches of each segment's sample. lengths:
    tokens of each segment. pieces: 0 unless samples are split. The next window begins with piece next_piece of sample
    next_sample; at the end of the block, next_sample is the number of samples. num_overlong: overlong samples with
    their first piece in the window.
    """

    samples: NDArray[np.int64]
    expected: NDArray[np.int64]
    patches: NDArray[np.int64]
    lengths: NDArray[np.int32]
    pieces: NDArray[np.int64]
    next_sample: int
    next_piece: int
    num_overlong: int


class MeasuredBlock:
    """A shuffle block whose samples are measured on demand, from its sample `first` on."""

    def __init__(self, sample_ids: NDArray[np.int64], first: int, *, packing: PackingConfig, measure: Measure):
        self.sample_ids = sample_ids
        self._packing = packing
        self._measure = measure
        self._lengths = np.zeros(len(sample_ids), np.int32)
        self._patches: NDArray[np.int64] | None = None  # if `measure` returns patches
        self._num_measured = first

    def window(self, sample: int, piece: int) -> WindowSegments:
        """Return the window that begins with a piece of a sample; measure its missing samples."""
        num_segments = self._packing.samples_at_once or sys.maxsize
        stop = piece + num_segments
        while True:
            # A further segment shows that the window is not the last of the block: later samples may be unmeasured.
            enough = stop + 1
            segments = self._segments(sample)
            if len(segments.lengths) >= enough or self._num_measured == len(self.sample_ids):
                break
            self._measure_next(enough - len(segments.lengths))
        samples = segments.positions.astype(np.int64) + sample
        pieces = np.zeros_like(samples) if segments.pieces is None else segments.pieces.astype(np.int64)
        if piece and samples[piece : piece + 1].tolist() != [sample]:
            raise CursorError(
                f"the saved lane state begins with piece {piece} of sample {sample} of its block, and there is no such "
                "piece: measured lengths have changed; restore the dataset and its processor"
            )
        following = self._num_measured, 0
        if len(samples) > stop:
            following = int(samples[stop]), int(pieces[stop])
        mine = samples[piece:stop]
        met = self._lengths[sample + (piece > 0) : following[0] + (following[1] > 0)]
        return WindowSegments(
            samples=mine,
            expected=self._lengths[mine].astype(np.int64),
            patches=np.zeros_like(mine) if self._patches is None else self._patches[mine],
            lengths=segments.lengths[piece:stop],
            pieces=pieces[piece:stop],
            next_sample=following[0],
            next_piece=following[1],
            num_overlong=int(np.count_nonzero(met > self._packing.packing_length)),
        )

    def _segments(self, first: int) -> BlockSegments:
        """Return the segments of the measured samples from `first` on; positions count from `first`."""
        lengths = self._lengths[first : self._num_measured]
        has_media = None if self._patches is None else self._patches[first : self._num_measured] > 0
        measured = np.flatnonzero(lengths != UNMEASURED).astype(np.int32)
        if len(measured) == len(lengths):
            return cut_overlong(lengths, config=self._packing, has_media=has_media)
        has_media = None if has_media is None else has_media[measured]
        segments = cut_overlong(lengths[measured], config=self._packing, has_media=has_media)
        return replace(segments, positions=measured[segments.positions])

    def _measure_next(self, count: int) -> None:
        """Measure up to `count` more samples, and check their lengths."""
        ids = self.sample_ids[self._num_measured : self._num_measured + count]
        measured = np.asarray(self._measure(ids))
        lengths = measured[:, 0] if measured.ndim == 2 else measured
        if lengths.shape != ids.shape:
            raise PackingError(
                f"measure gave {lengths.size} lengths for {len(ids)} samples: it must return a length for each sample"
            )
        limit = self._packing.packing_length
        for wrong, explanation in (
            ((lengths < 1) & (lengths != UNMEASURED), "a sample must have at least one token"),
            (lengths > MAX_LENGTH, f"a sample may have up to {MAX_LENGTH} tokens"),
            (
                (lengths > limit) & (self._packing.overlong == "error"),
                f"it is longer than packing_length {limit}; raise packing_length, or set overlong to drop, truncate, "
                "split or keep",
            ),
        ):
            if wrong.any():
                at = int(wrong.argmax())
                raise PackingError(f"sample {ids[at]} has length {lengths[at]}: {explanation}")
        here = slice(self._num_measured, self._num_measured + len(ids))
        self._lengths[here] = lengths
        if measured.ndim == 2:
            self._patches = np.zeros(len(self.sample_ids), np.int64) if self._patches is None else self._patches
            self._patches[here] = measured[:, 1]
        self._num_measured += len(ids)


# The work of a reader in lanes. order + measure + cursor -> [lane planner] -> (work, lane after it); arithmetic only.


class LanePlanner:
    """Plans the works of worker `worker` of num_workers in the group of config.world: a pack each, without end.

    The worker has whole lanes (see check_lanes). order: its canonical nodes are the lanes.
    """

    def __init__(
        self,
        samples_per_shard: Sequence[int] | NDArray[np.int64],
        config: StepConfig,
        *,
        source: str,
        order: OrderConfig,
        packing: PackingConfig,
        measure: Measure,
        worker: int = 0,
        num_workers: int = 1,
    ):
        self._samples_per_shard = np.asarray(samples_per_shard, np.int64)
        self._first_ids = np.cumsum(self._samples_per_shard) - self._samples_per_shard
        self._config = config
        self._source = source
        self._order = order
        self._packing = packing
        self._measure = measure
        self._worker = worker
        self._num_workers = num_workers

    def plan(self, cursor: LaneCursor) -> Iterator[Planned]:
        """Yield the work from a cursor on, pack by pack."""
        world, num_lanes = self._config.world, int(self._order.num_canonical_nodes or 1)
        lanes: dict[int, Lane] = {}
        begin = cursor.packs + (world.group - cursor.packs) % world.num_groups
        for batch_number in count(self._worker, self._num_workers):
            number = (begin + batch_number * world.num_groups) % num_lanes
            if number not in lanes:
                lanes[number] = Lane(
                    self._samples_per_shard,
                    order=self._order,
                    packing=self._packing,
                    lane=number,
                    measure=self._measure,
                    state=cursor.states.get(number),
                )
            pack = lanes[number].next_pack()
            shard_ids = shards_of(pack.sample_ids, self._first_ids)
            indices = pack.sample_ids - self._first_ids[shard_ids]
            segments = PackSegments(pack.sample_ids, pack.starts, pack.lengths, shard_ids, indices, pack.expected)
            step, micro_batch = divmod(batch_number, self._config.micro_batches)
            bounds = np.array([0, len(pack.sample_ids)])
            patches = [int(pack.patches.sum())] if pack.patches.any() else ()
            work = Work(self._source, step, [micro_batch], bounds, segments, patches, [lanes[number].epoch])
            yield Planned(work, LaneAfter(number, lanes[number].state))
