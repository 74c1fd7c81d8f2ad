"""Epochs of few samples, many at a time. lengths + order + packing -> packs of any epochs, and their counts.

A source of four packs ends dozens of times in a step. A compiled loop packs some hundred epochs of a source at once.
The packs are kept as arrays, in runs of equally many epochs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .kernels.best_fit import FILLER_SHARE, BestFit, FirstFit, NextFit
from .kernels.even_fit import EvenFit
from .kernels.short_epochs import (
    STATE_WORDS,
    EpochPacks,
    Rules,
    SourceFacts,
    begin_stream,
    pack_epochs,
    seeded_words,
    shuffle,
)
from .kernels.window_fit import WindowFit
from .lengths import Lengths
from .order import OrderConfig
from .packing import MAX_LENGTH, PackingConfig, PackRange, cut_overlong, ends_of, runs

MAX_SAMPLES = 1 << 13  # of a short epoch; in a longer epoch Python's share of the time is small
MAX_SEGMENTS = 1 << 16
RUN_SEGMENTS = 1 << 15  # segments to pack in a call
RUN_EPOCHS = 32  # epochs to pack in a call: a thousand sources are packed before the first batch
EPOCH_SEGMENTS = 32  # an epoch with fewer segments, canonical nodes and shards takes equally long to pack
MAX_RUNS = 16  # runs to keep
MAX_KNOWN = 1 << 16  # epochs with equal counts to return in a call
_NODE_BITS = 32

_Numbers = NDArray[np.int64]


class ShortEpochs:
    """Packs of a source's epochs. Epochs, and numbers of packs in their epoch, are int64[num_packs] each.

    kept_segments: segments of packs to keep in memory, 12 bytes each and 16 more for each pack; a fourth of this number
    of pack counts is kept, 8 bytes each. Not safe for several threads.
    """

    def __init__(
        self,
        index: Lengths,
        samples_per_shard: _Numbers,
        *,
        order: OrderConfig,
        packing: PackingConfig,
        num_canonical_nodes: int,
        kept_segments: int,
    ):
        lengths = np.ascontiguousarray(index.lengths, np.int32)
        self._patches = None if index.patches is None else np.asarray(index.patches)
        cut = cut_overlong(lengths, config=packing, has_media=None if self._patches is None else self._patches > 0)
        self._facts = SourceFacts(
            seed=order.seed,
            shuffles=order.shuffle,
            reshuffles=order.reshuffle,
            num_nodes=num_canonical_nodes,
            block_size=order.shuffle_block_size,
            sizes=samples_per_shard,
            first_ids=np.cumsum(samples_per_shard) - samples_per_shard,
            lengths=lengths,
            num_pieces=np.bincount(cut.positions, minlength=len(lengths)).astype(np.int32),
        )
        self._rules, self._counted = _rules(packing, len(lengths)), _rules(packing.counted, len(lengths))
        segments = max(1, int(self._facts.num_pieces.sum()))
        work = max(segments, num_canonical_nodes, len(samples_per_shard), EPOCH_SEGMENTS)
        self._run_epochs = min(RUN_EPOCHS, max(1, min(RUN_SEGMENTS, kept_segments // 4) // work))
        self._most_runs = max(2, min(MAX_RUNS, kept_segments // (self._run_epochs * segments)))
        self._runs: OrderedDict[int, EpochPacks] = OrderedDict()
        self._counts: OrderedDict[int, _Numbers] = OrderedDict()  # of the last used runs
        self._most_counts = max(2, kept_segments // 4 // self._run_epochs)
        self._sums: dict[int, int] = {}  # packs of whole runs
        self._equal = self._equal_counts()

    @property
    def num_runs(self) -> int:
        """Number of kept runs of epochs."""
        return len(self._runs)

    def counts(self, epoch: int) -> _Numbers:
        """Return the number of packs of an epoch, and of the known epochs after it: int64[1 or more]."""
        return self._equal if self._equal is not None else self._joined(self._counts_of, epoch)

    def _joined(self, of_run: Callable[[int], _Numbers], epoch: int) -> _Numbers:
        """Return values from an epoch to the end of its run; near the end, also those of the next run."""
        next_run = (epoch // self._run_epochs + 1) * self._run_epochs
        is_near = 2 * (epoch % self._run_epochs) >= self._run_epochs
        return np.append(of_run(epoch), of_run(next_run)) if is_near else of_run(epoch)

    def _counts_of(self, epoch: int) -> _Numbers:
        """Return the numbers of packs from an epoch to the end of its run."""
        number, at = divmod(epoch, self._run_epochs)
        if number not in self._counts:
            run = self._packed(number, self._counted) if self._rules.strategy is EvenFit else self._run(epoch)
            first_packs = run.first_packs
            self._counts[number], self._sums[number] = np.diff(first_packs), int(first_packs[-1])
            if len(self._counts) > self._most_counts:
                self._counts.popitem(last=False)
        self._counts.move_to_end(number)
        return self._counts[number][at:]

    def tokens(self, epoch: int) -> _Numbers:
        """Return the tokens of all packs of some epochs from an epoch on."""
        if self._equal is not None and self._equal[0] == 1:  # a pack of the same samples in each epoch
            return np.repeat(self._tokens_of(0)[:1], 2 * RUN_EPOCHS)
        return self._joined(self._tokens_of, epoch)

    def _tokens_of(self, epoch: int) -> _Numbers:
        """Return the tokens of the packs from an epoch to the end of its run."""
        run = self._run(epoch)
        offsets = run.offsets[run.first_packs[epoch % self._run_epochs] :]
        return np.add.reduceat(run.segments.lengths[: offsets[-1]], offsets[:-1], dtype=np.int64)

    def num_packs(self, first: int, stop: int) -> int:
        """Return the number of packs of the epochs [first, stop) together; a whole run is counted only once."""
        if self._equal is not None:
            return max(0, stop - first) * int(self._equal[0])
        total = 0
        while first < stop:
            number = first // self._run_epochs
            end = min(stop, (number + 1) * self._run_epochs)
            if end - first == self._run_epochs and number in self._sums:
                total += self._sums[number]
            else:
                total += int(self._counts_of(first)[: end - first].sum())
            first = end
        return total

    def packs(self, epochs: _Numbers, numbers: _Numbers) -> PackRange:
        """Return one or more packs, with sources 0. Epochs, and numbers within an epoch, must ascend; not checked."""
        return PackRange.joined([self._take(run, at) for run, at in self._found(epochs, numbers)])

    def canonical_nodes(self, epochs: _Numbers, numbers: _Numbers) -> _Numbers:
        """Return the canonical node of each pack."""
        return np.concatenate([run.nodes[at].astype(np.int64) for run, at in self._found(epochs, numbers)])

    def blocks(self, epochs: _Numbers, numbers: _Numbers) -> tuple[_Numbers, _Numbers, _Numbers]:
        """Return the index of the first pack of each block, and the canonical node and turn of the block."""
        pairs = [(run.nodes[at], run.turns[at]) for run, at in self._found(epochs, numbers)]
        nodes, turns = (np.concatenate(each).astype(np.int64) for each in zip(*pairs, strict=True))
        keys = nodes << _NODE_BITS | turns
        order = np.lexsort((keys, epochs))
        keys, of_epoch = keys[order], epochs[order]
        is_first = np.ones(len(order), bool)
        is_first[1:] = (keys[1:] != keys[:-1]) | (of_epoch[1:] != of_epoch[:-1])
        firsts = np.sort(order[is_first])
        return firsts, nodes[firsts], turns[firsts]

    def _found(self, epochs: _Numbers, numbers: _Numbers) -> list[tuple[EpochPacks, _Numbers]]:
        """Return the runs with these packs, and the indices of the packs in each run."""
        run_numbers = epochs // self._run_epochs
        begins = [0, *(np.flatnonzero(run_numbers[1:] != run_numbers[:-1]) + 1).tolist()]
        found = []
        for begin, end in zip(begins, [*begins[1:], len(epochs)], strict=True):
            run = self._run(int(epochs[begin]))
            of_run = epochs[begin:end] - int(run_numbers[begin]) * self._run_epochs
            found.append((run, run.first_packs[of_run] + numbers[begin:end]))
        return found

    def _take(self, run: EpochPacks, at: _Numbers) -> PackRange:
        begins = run.offsets[at]
        counts = run.offsets[at + 1] - begins
        segments = runs(begins, counts)
        sample_ids, starts, lengths = (each[segments].astype(np.int64) for each in run.segments)
        offsets = ends_of(counts)
        patches = None
        if self._patches is not None:
            of_segments = np.append(self._patches[sample_ids].astype(np.int64), 0)
            patches = np.add.reduceat(of_segments, offsets[:-1])
        return PackRange(
            sample_ids=sample_ids, starts=starts, lengths=lengths, offsets=offsets,
            canonical_nodes=run.nodes[at].astype(np.int64), sources=np.zeros(len(at), np.int64), patches=patches,
        )  # fmt: skip

    def _run(self, epoch: int) -> EpochPacks:
        number = epoch // self._run_epochs
        if number not in self._runs:
            self._runs[number] = self._packed(number, self._rules)
            if len(self._runs) > self._most_runs:
                self._runs.popitem(last=False)
        self._runs.move_to_end(number)
        return self._runs[number]

    def _packed(self, run: int, rules: Rules) -> EpochPacks:
        packed: EpochPacks = pack_epochs(self._facts, rules, run * self._run_epochs, self._run_epochs)
        return packed

    def _equal_counts(self) -> _Numbers | None:
        """Return the packs of each of MAX_KNOWN epochs, if equal for every order of samples; else None.

        Without split samples the number is constant if all samples fit into one pack, if no two fit into a pack, or for
        at most three samples that are packed together by a strategy other than next_fit. It is always constant without
        reshuffle.
        """
        facts, rules = self._facts, self._counted
        segments = np.repeat(facts.lengths, facts.num_pieces)
        if len(segments) == int((facts.num_pieces > 0).sum()):  # no sample is split
            segments = np.minimum(segments, rules.limit)
            two = np.sort(segments)[:2].sum() if len(segments) > 1 else rules.limit + 1
            is_alone = two > rules.limit or rules.max_samples == 1
            is_together = facts.num_nodes == 1 and len(facts.lengths) <= min(facts.block_size, rules.window)
            fits = is_together and segments.sum() <= rules.limit and len(segments) <= rules.max_samples
            any_order = is_together and len(segments) <= min(3, rules.max_samples) and rules.strategy is not NextFit
            if not (is_alone or fits or any_order or not facts.reshuffles):
                return None
        elif facts.reshuffles:
            return None
        return np.broadcast_to(pack_epochs(facts, rules, 0, 1).first_packs[1], MAX_KNOWN)


def has_short_epochs(
    index: Lengths, samples_per_shard: _Numbers, *, packing: PackingConfig, num_canonical_nodes: int
) -> bool:
    """Return whether ShortEpochs can pack a source: few samples, valid lengths, and NumPy's random streams."""
    num_samples = len(index.lengths)
    if not num_samples or max(num_samples, len(samples_per_shard), num_canonical_nodes) > MAX_SAMPLES:
        return False
    lengths = np.asarray(index.lengths)
    longest = int(lengths.max())
    if (
        int(lengths.min()) < 1
        or longest > MAX_LENGTH
        or (packing.overlong == "error" and longest > packing.packing_length)
    ):
        return False
    if packing.overlong == "split" and int((lengths.astype(np.int64) // packing.packing_length).sum()) > MAX_SEGMENTS:
        return False
    return streams_are_numpys()


def _rules(packing: PackingConfig, num_samples: int) -> Rules:
    of_strategy = {"best_fit": BestFit, "even_fit": EvenFit, "first_fit": FirstFit, "next_fit": NextFit}
    return Rules(
        strategy=of_strategy.get(packing.strategy, WindowFit),
        limit=packing.packing_length,
        max_samples=packing.max_samples_per_pack or MAX_SEGMENTS + 1,
        window=packing.samples_at_once or num_samples,
        filler_share=FILLER_SHARE,
        keeps=packing.overlong == "keep",
    )


@lru_cache(maxsize=1)
def streams_are_numpys() -> bool:
    """Return whether the compiled random streams give the numbers of the installed NumPy; other releases may differ."""
    for words in ([5], [1, 2, 3, 4], [(1 << 32) - 1, 0, 7, 1, 1]):
        entropy, state, word = np.array(words, np.uint64), np.empty(STATE_WORDS, np.uint64), np.empty(1, np.uint64)
        shuffled = np.arange(500)
        begin_stream(entropy, state)
        shuffle(state, shuffled)
        seeded_words(entropy, word)
        seed = np.random.SeedSequence(words).generate_state(1, np.uint64)
        expected = np.random.default_rng(words).permutation(500)
        if word[0] != seed[0] or not np.array_equal(shuffled, expected):
            return False
    return True
