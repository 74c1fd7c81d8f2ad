"""Encoded units in the order of the sources -> samples in the order of the outputs -> the shards of each output.

A shard is full where MDSWriter would say so: with one sample more it would be larger than it may be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...mds.provenance import packed_rows
from ...processors.not_shown import counts_of
from ..stored.row_counts import RowCounts, Unread, joined_unread, unread_of
from .documents import Concatenation
from .dropped_rows import DroppedRows, Dropping, without
from .encoded_units import OnError, UnitTask
from .encoding import MAX_SHARD_BYTES, ShardFormat
from .reading import Reading
from .shards import MADE, ShardTask, shard_name
from .unit_files import EncodedUnit, PlacedSamples, about_path, failed_path, samples_path
from .work import RowError, WorkFolder, free_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Ends of shards other than by size: after a number of samples, or for a number of shards."""

    num_shards: int | None = None
    samples_per_shard: int | None = None

    @property
    def by_samples(self) -> bool:
        return self.num_shards is not None or self.samples_per_shard is not None


@dataclass(slots=True)
class Output:
    """The shards of one dataset as they fill. number: among the outputs of a conversion.

    file_numbers: which the files of its shards have in their names, in turn. rows: what its samples were made of, as
    packed_rows gives it. concatenation: makes samples of documents, where what is added are those. not_shown: samples,
    or documents, whose chat template does not show some content, by the kind of content.
    """

    number: int
    format: ShardFormat
    file_numbers: Iterator[int] = field(default_factory=count)
    cut: Cut = Cut()
    concatenation: Concatenation | None = None
    num_shards: int = 0
    num_samples: int = 0
    lengths: list[NDArray[np.uint32]] = field(default_factory=list)
    rows: list[NDArray[np.int64]] = field(default_factory=list)
    not_shown: Counter[str] = field(default_factory=Counter)
    _waiting: list[NDArray[np.int64]] = field(default_factory=list)  # for each sample: unit, first byte, size
    _bytes: int = 0  # of the shard that the waiting samples will make

    def add(self, placed: PlacedSamples) -> Iterator[ShardTask]:
        """Samples that follow, or documents; gives shards that are full."""
        if placed.not_shown is not None:
            self.not_shown.update(counts_of(placed.not_shown))
        yield from self._fill(placed if self.concatenation is None else self.concatenation.add(placed))

    def end_documents(self, *, drop_tail: bool) -> Iterator[ShardTask]:
        """The tokens that are left of documents as a last, shorter sample, or dropped; gives a shard that is full."""
        if self.concatenation is not None:
            yield from self._fill(self.concatenation.finish(drop_tail=drop_tail))

    def _fill(self, placed: PlacedSamples) -> Iterator[ShardTask]:
        if placed.lengths is not None:
            self.lengths.append(placed.lengths)
        self.num_samples += len(placed.samples)
        self.rows.append(placed.samples[:, 3].copy())
        samples = placed.samples[:, :3]
        if self.cut.by_samples:
            self._waiting.append(samples)
            yield from self._take_counted()
            return
        ends = np.cumsum(samples[:, 2] + 4)
        first, before = 0, 0  # the first sample that no shard has yet; bytes of all before it
        while first < len(samples):
            if not self._waiting:
                self._bytes = self.format.empty_bytes
            room = self.format.shard_bytes - self._bytes
            end = int(np.searchsorted(ends, before + room, side="right"))
            if end <= first and not self._waiting:
                end = first + 1  # this sample alone is larger than a shard may be
            if end > first:
                self._waiting.append(samples[first:end])
                self._bytes += int(ends[end - 1]) - before
                first, before = end, int(ends[end - 1])
            if first < len(samples):
                yield self._take()

    def finish(self) -> Iterator[ShardTask]:
        """The last shard; all of them, where their number is asked for."""
        if self.cut.num_shards is not None and self._waiting:
            yield from self._take_equal(self.cut.num_shards)
        elif self._waiting:
            yield self._take()

    def _take_counted(self) -> Iterator[ShardTask]:
        """The shards of as many samples as are asked for."""
        count = self.cut.samples_per_shard
        if count is None or sum(map(len, self._waiting)) < count:
            return
        samples = np.concatenate(self._waiting)
        whole = len(samples) // count * count
        self._waiting = [samples[whole:]] if whole < len(samples) else []
        for first in range(0, whole, count):
            yield self._task(samples[first : first + count])

    def _take_equal(self, num_shards: int) -> Iterator[ShardTask]:
        """So many shards, whose numbers of samples differ by one at most."""
        samples = np.concatenate(self._waiting)
        self._waiting = []
        if num_shards > len(samples):
            raise DataError(f"{len(samples)} samples cannot fill {num_shards} shards: ask for fewer with --num-shards")
        for number in range(num_shards):
            first, stop = (len(samples) * each // num_shards for each in (number, number + 1))
            yield self._task(samples[first:stop])

    def _take(self) -> ShardTask:
        samples = np.concatenate(self._waiting)
        self._waiting = []
        return self._task(samples)

    def _task(self, samples: NDArray[np.int64]) -> ShardTask:
        num_bytes = self.format.empty_bytes + int(samples[:, 2].sum()) + 4 * len(samples)
        if self.cut.by_samples and num_bytes > MAX_SHARD_BYTES:
            raise DataError(
                f"a shard of {len(samples)} samples would have {num_bytes} bytes, and MDS has shards below 4 GiB: "
                "ask for fewer samples a shard, or for more shards"
            )
        self.num_shards += 1
        runs, made = (samples, b"") if self.concatenation is None else self.concatenation.runs(len(samples))
        return ShardTask(
            output=self.number,
            number=self.num_shards - 1,
            name=shard_name(next(self.file_numbers)),
            sizes=samples[:, 2].copy(),
            runs=_joined(runs),
            made=made,
        )


def _joined(samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Merge adjacent runs: the same bytes in as few runs as possible."""
    ends = samples[:, 1] + samples[:, 2]
    begins = np.ones(len(samples), bool)
    begins[1:] = (samples[1:, 0] != samples[:-1, 0]) | (samples[1:, 1] != ends[:-1])
    firsts = np.flatnonzero(begins)
    runs = samples[firsts].copy()
    runs[:, 2] = np.add.reduceat(samples[:, 2], firsts)
    return runs


_DEALT = 1 << 20  # samples that are dealt at once


class PlacementOptions(Protocol):
    """Fields of ConvertOptions that decide the place of each sample."""

    @property
    def on_error(self) -> OnError: ...
    @property
    def limit(self) -> int | None: ...
    @property
    def dedup(self) -> str | None: ...
    @property
    def shuffle_seed(self) -> int | None: ...
    @property
    def splits(self) -> Mapping[str, float] | None: ...
    @property
    def split_seed(self) -> int: ...
    @property
    def cut(self) -> Cut: ...
    @property
    def concat(self) -> int | None: ...
    @property
    def drop_tail(self) -> bool: ...


class Placement:
    """Takes encoded units in order, gives the shards that they fill, and removes those that no shard needs any more."""

    def __init__(
        self, format: ShardFormat, options: PlacementOptions, work: WorkFolder, dropped: DroppedRows | None = None
    ):
        self.outputs = [
            Output(
                number=number,
                format=format,
                file_numbers=free_numbers(replaced),
                cut=options.cut,
                concatenation=None if options.concat is None else Concatenation(options.concat),
            )
            for number, replaced in enumerate(work.replaced)
        ]
        self.next_unit = 0
        self.rejects: list[tuple[str, int, str]] = []
        self.left_out = RowCounts()
        self.unread: dict[str, Unread] = {}
        self.is_finished = False
        self._options = options
        self._work = work
        self._dropping = Dropping(dropped)
        self.num_samples = 0
        self._seen = Seen()
        self._draws = np.random.default_rng(options.split_seed)  # draws a number for each sample, in order
        self._bytes_left: dict[int, int] = {}  # of each unit, bytes that go into shards which are not made yet
        self._kept: list[PlacedSamples] = []  # kept until all are there and can be shuffled
        # Listed once: a network folder that is asked for a file by name may remember for a while that it was missing,
        # also when another machine has written it since.
        self._encoded_before = {path.name for path in work.units.iterdir()}

    @property
    def is_full(self) -> bool:
        return self._options.limit is not None and self.num_samples >= self._options.limit

    def is_encoded(self, task: UnitTask) -> bool:
        """Whether an earlier run encoded the unit."""
        return about_path(self._work.units, task.number).name in self._encoded_before

    def place(self, task: UnitTask, reading: Reading, *, is_whole: bool) -> Iterator[ShardTask]:
        """The shards that the next unit fills; RowError at a row that does not fit, unless such rows are skipped.

        is_whole: no row ended it early. Rows after the last that the limit asks for count as if they were not there.
        """
        assert task.number == self.next_unit
        self.next_unit += 1
        encoded = EncodedUnit.load((about_path if is_whole else failed_path)(self._work.units, task.number))
        first_row = reading.rows_before(task)
        numbers = self._dropping.numbers(encoded, task.source, first_row)
        encoded, is_kept = self._kept_of(encoded, numbers)
        encoded, num_dropped = without(encoded, numbers)
        rows = packed_rows(task.source, first_row + encoded.rows)
        rejects = reading.rejects(task, encoded)
        if rejects and self._options.on_error == "fail":
            source, row, reason = rejects[0]
            raise RowError(f"{source}:{row}: {reason} (or pass --on-error skip to leave such rows out)")
        self.rejects += rejects
        num_duplicates = int((~is_kept & ~np.isin(encoded.rows, numbers)).sum())
        self.left_out += RowCounts.of_unit(
            encoded.left_out, num_rejected=len(rejects), num_duplicates=num_duplicates, num_dropped=num_dropped
        )
        self.unread = joined_unread(
            [self.unread, unread_of(encoded.unread, source=task.source_name, first_row=first_row)]
        )
        sizes = encoded.sizes
        samples = np.stack([np.full(len(sizes), task.number), encoded.first_bytes, sizes, rows], axis=1)
        placed = PlacedSamples(samples, encoded.lengths, encoded.spans, encoded.not_shown).take(np.flatnonzero(is_kept))
        self._bytes_left[task.number] = int(placed.samples[:, 2].sum())
        self._remove_if_unused(task.number)
        self.num_samples += len(placed.samples)
        if self._options.shuffle_seed is None:
            yield from self._deal(placed)
        else:
            self._kept.append(placed)

    def _kept_of(self, encoded: EncodedUnit, dropped: NDArray[np.int64]) -> tuple[EncodedUnit, NDArray[np.bool_]]:
        """The unit up to the row with the last sample that the limit asks for, and which of its samples are stored.

        Those are of no row that is dropped, and came nowhere before. dropped: numbers of rows in the unit.
        """
        is_kept = ~np.isin(encoded.rows, dropped)
        if encoded.hashes is not None:
            is_kept[is_kept] = self._seen.add(encoded.hashes[is_kept])
        room = None if self._options.limit is None else self._options.limit - self.num_samples
        if room is not None and is_kept.sum() >= room:
            encoded = encoded.first(int(np.flatnonzero(is_kept)[room - 1]) + 1)
            return encoded, is_kept[: len(encoded.rows)]
        return encoded, is_kept

    def finish(self) -> Iterator[ShardTask]:
        """The shards that are left when all units were placed."""
        self.is_finished = True
        if not self.is_full:
            self._dropping.finish()
        if not self.num_samples:
            reasons = [f"{source}:{row}: {reason}" for source, row, reason in self.rejects[:1]]
            counts = self.left_out
            reasons += [f"{counts.num_filtered} were left out for their length"] if counts.num_filtered else []
            reasons += [f"the text of {counts.num_empty} is empty"] if counts.num_empty else []
            by_options = {
                "--filter": counts.num_left_out_by_filter,
                "--map": counts.num_left_out_by_map,
                "--drop": counts.num_dropped,
            }
            reasons += [f"{option} left out {number}" for option, number in by_options.items() if number]
            raise DataError(f"no sample is left to write ({'; '.join(reasons)}): check the sources and the options")
        if self._options.shuffle_seed is not None:
            order = np.random.default_rng(self._options.shuffle_seed).permutation(self.num_samples)
            placed = PlacedSamples.join(self._kept)
            self._kept = []
            for first in range(0, len(order), _DEALT):
                yield from self._deal(placed.take(order[first : first + _DEALT]))
        for output in self.outputs:
            yield from self._not_done(output.end_documents(drop_tail=self._options.drop_tail))
        self._check_outputs()
        for output in self.outputs:
            yield from self._not_done(output.finish())

    def _check_outputs(self) -> None:
        for output in self.outputs:
            joined = output.concatenation
            if joined is not None and joined.num_dropped_tokens and not output.num_samples:
                raise DataError(
                    f"{joined.num_documents} documents have {joined.num_dropped_tokens} tokens, too few for a sample "
                    f"of {self._options.concat}, and a shorter one is dropped: choose a smaller --concat, or leave "
                    "--drop-tail out"
                )
        for output, (name, share) in zip(self.outputs, (self._options.splits or {}).items(), strict=False):
            if not output.num_samples:
                raise DataError(
                    f"the split {name!r} holds none of the {self.num_samples} samples: give it a larger share than "
                    f"{share}, another --split-seed, or leave it out"
                )

    def _deal(self, placed: PlacedSamples) -> Iterator[ShardTask]:
        """To the outputs, by their shares."""
        if self._options.splits is None:
            yield from self._not_done(self.outputs[0].add(placed))
            return
        ends = np.cumsum(list(self._options.splits.values()))[:-1]
        chosen = np.searchsorted(ends, self._draws.random(len(placed.samples)), side="right")
        for output in self.outputs:
            yield from self._not_done(output.add(placed.take(np.flatnonzero(chosen == output.number))))

    def _not_done(self, tasks: Iterator[ShardTask]) -> Iterator[ShardTask]:
        for task in tasks:
            if (task.output, task.number) in self._work.done:  # by an earlier run
                self._let_go(task)
            else:
                yield task

    def begin(self, task: ShardTask) -> None:
        """Called before a shard is made."""
        self._work.announce(task.output, task.number)

    def keep(self, task: ShardTask, entry: dict[str, Any]) -> None:
        """A shard is in its target. entry: of index.json."""
        self._work.keep_shard(task.output, task.number, entry)
        self._let_go(task)

    def _let_go(self, task: ShardTask) -> None:
        """Units that no shard but this one needs may go."""
        units = task.runs[:, 0]
        for number in np.unique(units[units != MADE]).tolist():
            self._bytes_left[number] -= int(task.runs[task.runs[:, 0] == number, 2].sum())
            self._remove_if_unused(number)

    def _remove_if_unused(self, number: int) -> None:
        if not self._bytes_left[number]:
            del self._bytes_left[number]
            samples_path(self._work.units, number).unlink(missing_ok=True)


# Samples whose content came before. hashes, in order -> which of them are new. Pure.

Hashes = NDArray[np.uint64]  # [n, 2]: the halves of 128 bits
_RATIO = 4  # a run is joined with the run before it, unless that run is _RATIO times as long


class Seen:
    """The hashes of all samples so far, in sorted runs: 16 bytes each, and for a moment 56 while two runs are joined.

    Among n samples, two that differ have the same hash with a probability of n^2 / 2^129: for 10^9 of them, 10^-21.
    """

    def __init__(self) -> None:
        self._runs: list[
            tuple[NDArray[np.uint64], NDArray[np.uint64]]
        ] = []  # halves, sorted by the first; long to short

    def add(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Which of these are the first of their content, bool[n]; they are known from then on. hashes: uint64[n, 2]."""
        high, low = hashes[:, 0], hashes[:, 1]
        order = np.lexsort((low, high))  # keeps the order of equal ones
        high, low = high[order], low[order]
        is_new = np.ones(len(order), bool)
        is_new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        for run in self._runs:
            is_new &= ~_holds(run, high, low)
        if is_new.any():
            self._keep(high[is_new], low[is_new])
        is_first = np.zeros(len(order), bool)
        is_first[order[is_new]] = True
        return is_first

    def _keep(self, high: NDArray[np.uint64], low: NDArray[np.uint64]) -> None:
        while self._runs and len(self._runs[-1][0]) < _RATIO * len(high):
            before_high, before_low = self._runs.pop()
            high, low = np.concatenate([before_high, high]), np.concatenate([before_low, low])
            order = np.argsort(high, kind="stable")  # which finds the two runs, and only merges them
            high, low = high[order], low[order]
        self._runs.append((high, low))


def _holds(
    run: tuple[NDArray[np.uint64], NDArray[np.uint64]], high: NDArray[np.uint64], low: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """Whether a run holds each of these hashes."""
    at = np.searchsorted(run[0], high)
    inside = np.minimum(at, len(run[0]) - 1)
    same_high = run[0][inside] == high
    found: NDArray[np.bool_] = same_high & (run[1][inside] == low)
    for index in np.flatnonzero(same_high & ~found):  # another one may have the same first half
        stop = np.searchsorted(run[0], high[index], side="right")
        found[index] = bool((run[1][at[index] : stop] == low[index]).any())
    return found
