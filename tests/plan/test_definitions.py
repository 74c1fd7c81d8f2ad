"""The compiled loops give what plain definitions give: lists instead of bitmaps, linked lists and heaps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.plan.packing import PackingConfig, pack

from ..strategies import examples, seeds

Bin = list[int]  # positions of samples
FILLER_SHARE = 0.2


def key(seed: int, position: int) -> int:
    """The hash that sorts closed packs: splitmix64 of the position of a sample."""
    mask = (1 << 64) - 1
    value = (seed + position * 0x9E3779B97F4A7C15) & mask
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
    return value ^ (value >> 31)


def put(lengths: Sequence[int], turns: Sequence[int], opened: list[Bin], limit: int, most: int) -> None:
    """Best fit: the fullest open bin with room, of equally full bins the last changed one, or a new bin."""
    changed = [*opened]
    for position in turns:
        rooms = [limit - sum(lengths[at] for at in samples) for samples in changed]
        fits = [room >= lengths[position] and len(changed[at]) < most for at, room in enumerate(rooms)]
        chosen = min((at for at, is_fit in enumerate(fits) if is_fit), key=lambda at: (rooms[at], -at), default=-1)
        samples = changed.pop(chosen) if chosen >= 0 else []
        if not samples:
            opened.append(samples)
        samples.append(position)
        changed.append(samples)


def best_fit(lengths: Sequence[int], limit: int, most: int, window: int, seed: int, *, evens: bool) -> list[Bin]:
    packs: list[Bin] = []
    opened: list[Bin] = []
    for start in range(0, len(lengths), window):
        positions = range(start, min(start + window, len(lengths)))
        by_length = sorted(positions, key=lambda at: -lengths[at])
        budget, filler = int(sum(lengths[at] for at in positions) * FILLER_SHARE), 0
        for size in sorted({lengths[at] for at in positions}):  # samples of a length are fillers together
            if sum(lengths[at] for at in positions if lengths[at] <= size) > budget:
                break
            filler = size
        before = [*opened]
        turns = [at for at in positions if lengths[at] > filler] + [at for at in by_length if lengths[at] <= filler]
        put(lengths, turns, opened, limit, most)
        closed: list[Bin] = []
        kept: list[Bin] = []
        for samples in opened:
            room = limit - sum(lengths[at] for at in samples)
            is_full = room < max(1, int(limit / 512)) or len(samples) >= most
            is_done = is_full or samples in before or positions.stop == len(lengths)
            (closed if is_done else kept).append(samples)
        closed.sort(key=lambda samples: key(seed, samples[0]))
        packs += evened(lengths, closed, limit, most) if evens else closed
        opened = kept
    return packs


def evened(lengths: Sequence[int], packs: Sequence[Bin], limit: int, most: int) -> list[Bin]:
    """Exchange samples between heavy and light packs: of up to 8 samples each, the subsets with the most gain."""

    def work(samples: Sequence[int]) -> int:
        return sum(lengths[at] ** 2 for at in samples)

    def tokens(samples: Sequence[int]) -> int:
        return sum(lengths[at] for at in samples)

    def insert(samples: Bin, position: int) -> None:
        """Longest first, before samples as long."""
        samples.insert(sum(lengths[at] > lengths[position] for at in samples), position)

    def subsets(samples: Bin, turn: int) -> list[Bin]:
        """Subsets of samples that a turn looks at, by tokens, then by mask."""
        count, chosen, last = min(len(samples), 8), [], -1
        for number in range(count):
            last = max(last + 1, (number * len(samples) + turn * len(samples) // 16) // count)
            chosen.append(samples[last])
        masks = [[at for bit, at in enumerate(chosen) if mask >> bit & 1] for mask in range(1 << count)]
        return sorted(masks, key=tokens)  # stable

    sorted_packs: list[Bin] = [[] for _ in packs]
    for samples, unsorted in zip(sorted_packs, packs, strict=True):
        for position in unsorted:
            insert(samples, position)
    half, least_gap = len(packs) // 2, sum(map(work, packs)) // max(1, len(packs)) >> 6
    for turn in range(16):
        ranks = sorted(range(len(packs)), key=lambda pack: work(sorted_packs[pack]))
        for number in range(half):
            heavy, light = sorted_packs[ranks[-1 - number]], sorted_packs[ranks[(number + turn * half // 16) % half]]
            gap = work(heavy) - work(light)
            if gap <= least_gap:
                continue
            best, pair = gap >> 8, None
            of_light = subsets(light, turn)
            for given_away in subsets(heavy, turn):
                for received in of_light:
                    more = tokens(received) - tokens(given_away)
                    fits = tokens(heavy) + more <= limit and tokens(light) - more <= limit
                    change = len(received) - len(given_away)
                    moved = work(given_away) - work(received)
                    gain = min(moved, gap - moved)
                    if fits and gain > best and len(heavy) + change <= most and len(light) - change <= most:
                        best, pair = gain, (given_away, received)
                if best >= gap // 2 - gap // 16:
                    break
            for moves, of, to in [(pair[0], heavy, light), (pair[1], light, heavy)] if pair else []:
                for position in moves:
                    of.remove(position)
                for position in moves:
                    insert(to, position)
    return sorted_packs


def window_fit(lengths: Sequence[int], limit: int, most: int, window: int, seed: int) -> list[Bin]:
    packs: list[Bin] = []
    waiting: list[int] = []
    for start in range(0, len(lengths), window):
        stop = min(start + window, len(lengths))
        pool = [*waiting, *range(start, stop)]
        total = sum(lengths[at] for at in pool)
        by_length, budget, filler = sorted(pool, key=lambda at: -lengths[at]), int(total * FILLER_SHARE), 0
        for position in reversed(by_length):
            budget -= lengths[position]
            if budget < 0:
                break
            filler = lengths[position]
        large = [at for at in pool if lengths[at] > filler]
        tries = []
        for turns in (by_length, large + by_length[len(large) :], pool):
            bins: list[Bin] = []
            put(lengths, turns, bins, limit, most)
            rooms = [limit - sum(lengths[at] for at in samples) for samples in bins]
            done = [
                room < max(1, int(limit / 64)) or any(at in waiting for at in samples)
                for room, samples in zip(rooms, bins, strict=True)
            ]
            lost = sum(room for room, is_done in zip(rooms, done, strict=True) if is_done)
            tries.append((len(bins), lost, bins, done))
            if len(bins) == -(-total // limit) and not lost:
                break
        _, _, bins, done = min(tries, key=lambda each: each[:2])
        waiting, closed = [], []
        for samples, is_done in zip(bins, done, strict=True):
            if is_done or len(samples) >= most or stop == len(lengths):
                closed.append(samples)
            else:
                waiting += samples
        waiting.sort()
        packs += sorted(closed, key=lambda samples: key(seed, samples[-1]))
    return packs


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int, int, int]:
    limit = draw(st.sampled_from([1, 7, 100, 5000]))
    longest = draw(st.sampled_from([limit, max(1, limit // 3)]))
    lengths = draw(st.lists(st.integers(max(1, longest // 3), longest), max_size=40))
    return lengths, limit, draw(st.integers(1, 5) | st.just(100)), draw(st.sampled_from([3, 16, 100])), draw(seeds())


def packs_of(strategy: str, lengths: list[int], limit: int, most: int, window: int, seed: int) -> list[Bin]:
    config = PackingConfig(packing_length=limit, strategy=strategy, window=window, max_samples_per_pack=most)
    packs = pack(np.array(lengths, np.int64), config=config, seed=seed)
    return [packs.order[a:b].tolist() for a, b in pairwise(packs.offsets)]


@examples(150, many=5000)
@given(case=cases())
def test_packs_of_best_fit_and_window_n_are_those_of_their_definitions(
    case: tuple[list[int], int, int, int, int],
) -> None:
    window = case[3]
    assert packs_of("best_fit", *case) == best_fit(*case, evens=False)
    assert packs_of(f"window_{window}", *case) == window_fit(*case)


@examples(60, many=3000)
@given(case=cases())
def test_packs_of_even_fit_are_those_of_its_definition(case: tuple[list[int], int, int, int, int]) -> None:
    assert packs_of("even_fit", *case) == best_fit(*case, evens=True)
