"""The compiled loops: plain definitions of their results, refused arguments, memory, and builds with sanitizers."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import sysconfig
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream._core import loops
from lmms_stream.plan.kernels.best_fit import best_fit, first_fit, next_fit

from .arrows import ROOT, files, imports
from .core_calls import CALLS, try_all
from .rounds import in_long_rounds
from .strategies import examples, seeds

FOLDER = ROOT / "lmms_stream" / "_core"
WORD = (1 << 64) - 1
SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]


def test_every_loop_has_arguments_to_try() -> None:
    assert sorted(CALLS) == sorted(name for name in dir(loops) if not name.startswith("_"))


def test_wrong_arguments_are_refused_and_nothing_leaks() -> None:
    """Buffers that were not released would keep arrays from being resized, and their memory."""
    try_all(loops, 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try_all(loops, 60)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4 << 10
    lengths = np.full(4, 9, np.int32)
    with pytest.raises(ValueError, match="best_fit: lengths are from 1 to the limit"):
        best_fit(lengths, np.zeros(1, np.int64), np.empty(0, np.int64), 0, True, 8, 4, 64, 0.2, 1)
    with pytest.raises(TypeError, match="argument 1 of next_fit has values of the format 'l': pass an array of int32"):
        next_fit(lengths.astype(np.int64), 8, 4)
    lengths.resize(8)  # refused while a buffer is in use


def pack_key(seed: int, first: int) -> int:
    value = (seed + first * 0x9E3779B97F4A7C15) & WORD
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & WORD
    return value ^ value >> 31


def plain_best_fit(lengths: list[int], limit: int, most: int, window: int, share: float, seed: int) -> list[list[int]]:
    """Best fit window by window: lists of rooms, of which the pack that was last put into comes first."""
    packs: list[list[int]] = []
    waiting: list[list[int]] = []
    for start in range(0, len(lengths), window):
        mine = range(start, min(start + window, len(lengths)))
        budget, threshold = int(sum(lengths[n] for n in mine) * share), 0
        for length in sorted({lengths[n] for n in mine}):
            if sum(lengths[n] for n in mine if lengths[n] <= length) <= budget:
                threshold = length
        fillers = sorted((n for n in mine if lengths[n] <= threshold), key=lambda n: -lengths[n])
        latest, num_carried = list(waiting), len(waiting)
        for n in [n for n in mine if lengths[n] > threshold] + fillers:
            fits = [p for p in latest if len(p) < most and sum(lengths[m] for m in p) + lengths[n] <= limit]
            chosen = max(reversed(fits), key=lambda p: sum(lengths[m] for m in p), default=None)
            if chosen is None:
                waiting.append(chosen := [])
            else:
                latest = [p for p in latest if p is not chosen]
            chosen.append(n)
            latest.append(chosen)
        least, is_last = max(1, int(limit / 512)), mine.stop == len(lengths)
        closing = [
            p for at, p in enumerate(waiting)
            if is_last or at < num_carried or len(p) >= most or limit - sum(lengths[m] for m in p) < least
        ]  # fmt: skip
        packs += sorted(closing, key=lambda p: pack_key(seed, p[0]))
        waiting = [p for p in waiting if not any(p is each for each in closing)]
    return packs


def lists_of(order: Any, offsets: Any) -> list[list[int]]:
    return [order[start:stop].tolist() for start, stop in pairwise(offsets)]


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[int], int, int]:
    limit = draw(st.sampled_from([7, 64, 1500]))
    lengths = draw(st.lists(st.integers(1, limit) | st.integers(1, max(1, limit // 6)), max_size=90))
    return lengths, limit, draw(st.sampled_from([1, 3, 100]))


@examples(60)
@given(
    case=packings(), window=st.sampled_from([1, 5, 30, 70, 1000]), share=st.sampled_from([0.0, 0.2, 1.0]), seed=seeds()
)
def test_best_fit_is_its_plain_definition(
    case: tuple[list[int], int, int], window: int, share: float, seed: int
) -> None:
    lengths, limit, most = case
    none = np.empty(0, np.int64)
    order, offsets, _ = best_fit(
        np.array(lengths, np.int32), np.zeros(1, np.int64), none, 0, True, limit, most, window, share, seed
    )
    assert lists_of(order, offsets) == plain_best_fit(lengths, limit, most, window, share, seed)


@examples(40)
@given(case=packings())
def test_first_fit_and_next_fit_are_their_plain_definitions(case: tuple[list[int], int, int]) -> None:
    lengths, limit, most = case
    for looked_at, loop in ((None, first_fit), (1, next_fit)):
        packs: list[list[int]] = []
        for n, length in enumerate(lengths):
            known = packs if looked_at is None else packs[-looked_at:]
            fits = (p for p in known if len(p) < most and sum(lengths[m] for m in p) + length <= limit)
            if (chosen := next(fits, None)) is None:
                packs.append(chosen := [])
            chosen.append(n)
        assert lists_of(*loop(np.array(lengths, np.int32), limit, most)) == packs


@examples(40)
@given(seed=seeds(), ranks=st.integers(1, 6), each=st.integers(1, 5))
def test_dealing_is_its_plain_definition(seed: int, ranks: int, each: int) -> None:
    rng = np.random.default_rng(seed)
    lists, costs = rng.integers(0, 2, ranks * each), rng.integers(0, 9, ranks * each)
    order = np.lexsort((-costs, lists))
    dealt = np.full(2 * ranks * each, -1)
    packs: list[list[list[int]]] = [[[] for _ in range(ranks)] for _ in range(2)]
    loops.deal(order, costs, lists, ranks, each, dealt)
    for number in order:
        free = [rank for rank in packs[lists[number]] if len(rank) < each]
        min(free, key=lambda rank: sum(costs[n] for n in rank)).append(number)
    padded = [[*rank, *[-1] * (each - len(rank))] for of_list in packs for rank in of_list]
    assert dealt.reshape(-1, each).tolist() == padded


@examples(40)
@given(seed=seeds(), num_nodes=st.integers(1, 5))
def test_settling_is_its_plain_definition(seed: int, num_nodes: int) -> None:
    rng = np.random.default_rng(seed)
    rooms = rng.integers(0, 6, num_nodes) + 2
    homes = rng.integers(0, num_nodes, 2 * num_nodes)
    settled, left = homes.copy(), rooms.tolist()
    loops.settle(settled, rooms)
    stays = [(left.__setitem__(home, left[home] - 1) or True) if left[home] else False for home in homes]
    for home, stay, found in zip(homes, stays, settled, strict=True):
        expected = home if stay else next(node for node in range(num_nodes) if left[node])
        left[expected] -= not stay
        assert found == expected


@examples(40)
@given(seed=seeds(), limit=st.integers(1, 30))
def test_a_cache_is_its_plain_definition(seed: int, limit: int) -> None:
    rng = np.random.default_rng(seed)
    steps, shards, sizes = np.arange(40) + 5, rng.integers(0, 9, 40), rng.integers(1, 9, 9)
    used_at, held, missed = rng.integers(0, 5, 9).astype(np.int32), rng.random(9) < 0.4, np.empty(40, bool)
    victims, expected = np.flatnonzero(held)[::-1].copy(), []
    inside, ages, queue = {*np.flatnonzero(held).tolist()}, used_at.tolist(), victims.tolist()
    used = loops.use_needed_last(steps, shards, sizes, limit, used_at, held, victims, 4, int(sizes[held].sum()), missed)
    for step, shard in zip(steps.tolist(), shards.tolist(), strict=True):
        expected.append(shard not in inside)
        while expected[-1] and inside and sum(sizes[n] for n in inside) + sizes[shard] > limit:
            queue = [n for n in queue if n in inside and ages[n] <= 4]
            inside.remove(queue[0] if queue else min(inside, key=lambda n: (ages[n], n)))
        inside.add(shard)
        ages[shard] = step
    assert missed.tolist() == expected
    assert used == sum(sizes[n] for n in inside)


@examples(20)
@given(text=st.text("ab c", max_size=40), size=st.integers(1, 9), salt=seeds())
def test_a_sketch_is_its_plain_definition(text: str, size: int, salt: int) -> None:
    codes, sketch = np.array([ord(letter) for letter in text], np.uint32), np.zeros(3, np.uint16)
    factors, shifts = np.array([3, 5, 1 << 31 | 1], np.uint32), np.array([7, 0, 1 << 31], np.uint32)
    loops.sketch(codes, np.array([len(codes)]), np.array([size]), np.array([salt], np.uint64), factors, shifts, sketch)
    hashes = []
    for first in range(max(len(text) - size + 1, bool(text))):
        piece = 0xCBF29CE484222325 ^ salt
        for letter in text[first : first + size]:
            piece = (piece ^ ord(letter)) * 0x100000001B3 & WORD
        hashes.append(((piece ^ piece >> 32) * 0xD6E8FEB86659FD93 & WORD) >> 32)
    for factor, shift, value in zip(factors.tolist(), shifts.tolist(), sketch.tolist(), strict=True):
        least = min(((factor * each + shift) & 0xFFFFFFFF for each in hashes), default=0)
        assert value == (least ^ least >> 16) & 0xFFFF


def test_nothing_is_compiled_in_a_run() -> None:
    """Loops that numba compiles would do so again in each new container, in every rank at once."""
    assert [name for name in files() if {"numba", "llvmlite"} & imports(name)[1]] == []


def test_sources_that_are_compiled_are_listed() -> None:
    listed = re.findall(r"lmms_stream/_core/(\w+\.c)", (ROOT / "pyproject.toml").read_text())
    assert listed == sorted(path.name for path in FOLDER.glob("*.c"))


@in_long_rounds
@pytest.mark.parametrize(
    "flags", [[], ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"], ["-fanalyzer"]]
)
def test_the_core_compiles_without_warnings_and_bears_wrong_arguments(flags: list[str], tmp_path: Path) -> None:
    library = tmp_path / "loops.so"
    include = sysconfig.get_path("include")
    strict = ["-Wall", "-Wextra", "-Werror", "-O2", "-fwrapv", "-ffp-contract=off", "-shared", "-fPIC", f"-I{include}"]
    sources = [str(path) for path in sorted(FOLDER.glob("*.c"))]
    subprocess.run(["gcc", *strict, *flags, *sources, "-o", str(library)], check=True, timeout=600)
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"}
    if flags == SANITIZED:
        asan = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
        environment["LD_PRELOAD"] = asan.stdout.strip()
    command = [sys.executable, "-m", "tests.core_calls", str(library), "400"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 4000
