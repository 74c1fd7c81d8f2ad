"""Encoded units in the order of the sources -> samples in the order of the outputs -> the shards of each output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...mds.provenance import packed_rows
from ..stored.row_counts import RowCounts, Unread, joined_unread, unread_of
from .documents import MADE, Concatenation
from .dropped_rows import DroppedRows, Dropping, without
from .encoded_units import NONE_FITS, OnError, UnitTask
from .encoding import ShardFormat
from .reading import Reading
from .shards import Cut, Output, ShardTask
from .unit_files import EncodedUnit, PlacedSamples, about_path, failed_path, samples_path
from .work import RowError, WorkFolder, free_numbers

_DEALT = 1 << 20  # samples dealt in one step


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
    """Places encoded units in order, yields shards that become full, and removes units after their last shard."""

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
        self._bytes_left: dict[int, int] = {}  # unit -> bytes for shards that are not made yet
        self._kept: list[PlacedSamples] = []  # samples kept until all are placed and can be shuffled
        # Listed once: a network file system may cache the absence of a file that another machine has written since.
        self._encoded_before = {path.name for path in work.units.iterdir()}

    @property
    def is_full(self) -> bool:
        return self._options.limit is not None and self.num_samples >= self._options.limit

    def is_encoded(self, task: UnitTask) -> bool:
        """Whether an earlier run encoded the unit."""
        return about_path(self._work.units, task.number).name in self._encoded_before

    def place(self, task: UnitTask, reading: Reading, *, is_whole: bool) -> Iterator[ShardTask]:
        """Yield the shards that the next unit fills; RowError for a row that does not fit, unless on_error is "skip".

        is_whole: no row ended the unit early. Rows behind the limit are not counted.
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
            if reason.endswith(NONE_FITS) and not self.num_samples:
                raise RowError(f"{source}:{row}: {reason}")
            reason = reason.removesuffix(NONE_FITS)
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
        """Cut a unit behind the row of the limit's last sample; return the unit, and a mask of the samples to store.

        Samples of dropped rows and duplicates are not stored. dropped: numbers of rows in the unit.
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
        """Yield the last shards after all units are placed."""
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
                    f"the split {name!r} holds none of the {self.num_samples} samples: choose a larger share than "
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
        """Record a shard that is in its target. entry: of index.json."""
        self._work.keep_shard(task.output, task.number, entry)
        self._let_go(task)

    def _let_go(self, task: ShardTask) -> None:
        """Remove units that only this shard still needed."""
        units = task.runs[:, 0]
        for number in np.unique(units[units != MADE]).tolist():
            self._bytes_left[number] -= int(task.runs[task.runs[:, 0] == number, 2].sum())
            self._remove_if_unused(number)

    def _remove_if_unused(self, number: int) -> None:
        if not self._bytes_left[number]:
            del self._bytes_left[number]
            samples_path(self._work.units, number).unlink(missing_ok=True)


# Duplicates by content. hashes, in order -> a mask of new samples. Pure.

Hashes = NDArray[np.uint64]  # [n, 2]: the halves of 128 bits
_RATIO = 4  # a run is merged into the run before it, unless the earlier run is _RATIO times longer


class Seen:
    """Hashes of all samples so far, in sorted runs: 16 bytes each, and 56 during the merge of two runs.

    For n different samples, the probability of two equal hashes is n^2 / 2^129: 10^-21 for n = 10^9.
    """

    def __init__(self) -> None:
        self._runs: list[
            tuple[NDArray[np.uint64], NDArray[np.uint64]]
        ] = []  # halves, sorted by the first; long to short

    def add(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Add hashes; return a mask of the first samples of each content, bool[n]. hashes: uint64[n, 2]."""
        high, low = hashes[:, 0], hashes[:, 1]
        order = np.lexsort((low, high))  # stable: equal hashes keep their order
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
            order = np.argsort(high, kind="stable")  # stable sort detects the two runs and merges them
            high, low = high[order], low[order]
        self._runs.append((high, low))


def _holds(
    run: tuple[NDArray[np.uint64], NDArray[np.uint64]], high: NDArray[np.uint64], low: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """Return whether a run holds each hash, bool[n]."""
    at = np.searchsorted(run[0], high)
    inside = np.minimum(at, len(run[0]) - 1)
    same_high = run[0][inside] == high
    found: NDArray[np.bool_] = same_high & (run[1][inside] == low)
    for index in np.flatnonzero(same_high & ~found):  # another hash of the run may have the same first half
        stop = np.searchsorted(run[0], high[index], side="right")
        found[index] = bool((run[1][at[index] : stop] == low[index]).any())
    return found
