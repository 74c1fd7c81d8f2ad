"""Valid arguments of every compiled loop, and faulty ones: `python -m tests.core_calls FILE ROUNDS` tries them."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Random = np.random.Generator
FAULTS = (np.float16, np.int8, ">i8", np.complex128)
EXTREMES = (-1, 0, 1, 1 << 31, 1 << 62, 1 << 64)
REFUSALS = (TypeError, ValueError, BufferError, OverflowError, MemoryError)


def _packing(rng: Random, *, rules: list[Any], waits: bool) -> list[Any]:
    count, open_packs = int(rng.integers(3)) * 150 + 2, int(rng.integers(3)) if waits else 0
    lengths = rng.integers(1, 33, count).astype(np.int32)
    ends = np.arange(open_packs + 1)
    still = [np.empty(count, np.int64)] if waits else []
    before = [ends, ends[1:] * 0, 7, True] if waits else []
    return [lengths, *before, *rules, np.empty(count, np.int32), np.empty(count + 1, np.int64), *still]


def _deal(rng: Random, *, both: bool) -> list[Any]:
    order, lists, costs = rng.permutation(12), np.arange(12) % 3, rng.integers(0, 99, (12, 2))
    if both:
        return [order, np.array([[0, 6, 0], [6, 12, 2]]), costs, 2, 3, np.full(18, -1)]
    return [order, costs[:, 0].copy(), lists, 2, 2, np.full(12, -1)]


def _pack_epochs(rng: Random) -> list[Any]:
    sizes = np.array([5, 0, 9])
    packed = [np.empty(28, np.int32) for _ in range(3)]
    rules = [int(rng.integers(5)), 32, 4, 6, 0.2, False]
    lengths = rng.integers(1, 33, 14).astype(np.int32)
    return [
        3, True, True, 2, 4, sizes, np.cumsum(sizes) - sizes, lengths, np.ones(14, np.int32), *rules, 5, 2, *packed,
        np.empty(29, np.int64), np.empty(28, np.int32), np.empty(28, np.int32), np.empty(3, np.int64),
    ]  # fmt: skip


def _sizes(rng: Random) -> list[Any]:
    tokens, used, goes_on = rng.integers(1, 3, (2, 30)), np.zeros(2, np.int64), np.zeros(2, bool)
    return [tokens, used, used + 30, goes_on, 2]


def _take_epochs(rng: Random) -> list[Any]:
    quotas, ends = np.array([[3, 5], [6, 2]]), np.array([18, 1 << 62])
    return [
        40, np.zeros(2, np.int64), np.zeros(2, np.int64), rng.integers(1, 9, 6), np.array([0, 3, 6]),
        np.zeros(2, np.int64), quotas, ends, 16, 1, np.array([-1, 0, 0]), 3, 4, np.zeros((9, 4), np.int64),
        *_sizes(rng),
    ]  # fmt: skip


def _take_turns(rng: Random) -> list[Any]:
    credits, taken = np.zeros((2, 2), np.int64)
    return [9, rng.integers(1, 9, 2), credits, *_take_epochs(rng)[6:10], taken, *_sizes(rng)]


def _fill(rng: Random) -> list[Any]:
    sample = b"".join(np.uint32(each).tobytes() for each in (21, 11)) + b"\x06" + np.arange(5, dtype=np.int32).tobytes()
    sample += b"\x08\x01\x02" + np.array([1, 4], np.int32).tobytes()
    table = np.array([1, 12, 12 + len(sample)], np.uint32).tobytes()
    _fill.shard = np.frombuffer(table + sample, np.uint8)  # type: ignore[attr-defined]
    ones = np.ones(2, np.int64)
    rows = [np.empty(8, np.int64) for _ in range(3)]
    addresses = ones * _fill.shard.ctypes.data  # type: ignore[attr-defined]
    return [addresses, ones * 0, ones * 0, ones * 4, ones * -1, -ones, 0, 1, -100, *rows, np.empty(2, np.int64)]


def _wait(rng: Random) -> list[Any]:
    steps, numbers = np.sort(rng.integers(0, 5, 6)), np.arange(6)
    begins, waits = np.zeros(5, bool), np.empty(5)
    return [
        np.array([0, 6]),
        steps,
        steps // 2,
        steps,
        numbers + 1,
        numbers,
        numbers,
        2.0,
        0.1,
        2,
        3,
        1,
        begins,
        0.5,
        waits,
    ]


def _use(rng: Random) -> list[Any]:
    held, missed = np.zeros(4, bool), np.zeros(9, bool)
    shards = rng.integers(0, 4, 9)
    return [np.arange(9), shards, np.arange(1, 5), 6, np.zeros(4, np.int32), held, np.arange(2), -1, 0, missed]


def _image(rng: Random, *shape: int) -> Any:
    return rng.integers(0, 256, shape, dtype=np.uint8)


def _patches() -> list[Any]:
    return [np.zeros((3, 256), np.float32), np.empty((16, 96), np.float32)]


def _sketch(rng: Random) -> list[Any]:
    codes, hashes = rng.integers(0, 9, 30).astype(np.uint32), rng.integers(0, 1 << 32, (2, 5), dtype=np.uint32)
    stops, salts = np.array([0, 12, 30]), np.zeros(3, np.uint64)
    return [codes, stops, np.full(3, 4), salts, hashes[0], hashes[1], np.zeros((3, 5), np.uint16)]


RULES, SEED = [32, 4, 64], np.uint64(5)
CALLS: Mapping[str, Callable[[Random], list[Any]]] = {
    "best_fit": lambda rng: _packing(rng, rules=[*RULES, 0.2, SEED], waits=True),
    "compare": lambda rng: [np.zeros((4, 3), np.uint16), 3, np.arange(4), np.zeros(4, np.uint64), 2, np.full(4, -1)],
    "deal": lambda rng: _deal(rng, both=False),
    "deal_both": lambda rng: _deal(rng, both=True),
    "even_fit": lambda rng: _packing(rng, rules=[*RULES, 0.2, SEED], waits=True),
    "fill": _fill,
    "first_fit": lambda rng: _packing(rng, rules=RULES[:2], waits=False),
    "next_fit": lambda rng: _packing(rng, rules=RULES[:2], waits=False),
    "pack_epochs": _pack_epochs,
    "resize_height": lambda rng: [_image(rng, 1, 9, 60), 1, 9, 60, 5, 1, _image(rng, 1, 5, 60)],
    "resize_width": lambda rng: [_image(rng, 70, 60), 70, 20, 9, 2, _image(rng, 70, 27)],
    "settle": lambda rng: [rng.integers(0, 3, 6), np.array([2, 2, 2])],
    "shuffle": lambda rng: [np.arange(3, dtype=np.uint32), np.arange(40)],
    "sketch": _sketch,
    "take_epochs": _take_epochs,
    "take_turns": _take_turns,
    "to_patches": lambda rng: [_image(rng, 3, 8, 16, 3), 3, 8, 16, 4, 2, 2, *_patches()],
    "use_needed_last": _use,
    "wait": _wait,
    "window_fit": lambda rng: (args := _packing(rng, rules=[*RULES, SEED], waits=True))[:1] + args[2:],
}


def faulty(rng: Random, arguments: list[Any]) -> list[Any]:
    """Return arguments with a fault: an array of another type, size or layout, read-only, or another number."""
    number = int(rng.integers(len(arguments)))
    value: Any = arguments[number]
    if not isinstance(value, np.ndarray):
        value = EXTREMES[rng.integers(len(EXTREMES))]
    else:
        kind = int(rng.integers(5))
        if kind == 0:
            with warnings.catch_warnings(action="ignore"):
                value = value.astype(FAULTS[rng.integers(len(FAULTS))])
        elif kind == 1:
            value = value[: int(rng.integers(2))].copy()
        elif kind == 2:
            value = np.repeat(value, 2, axis=0)[::2]
        elif kind == 3:
            value = np.frombuffer(value.tobytes(), value.dtype)
        else:
            value = None
    return [*arguments[:number], value, *arguments[number + 1 :]]


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("loops", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def try_all(loops: Any, rounds: int) -> int:
    """Call each loop with valid arguments, and with faults that it refuses or bears; return the number of refusals."""
    rng, refused = np.random.default_rng(0), 0
    for _ in range(rounds):
        for name, arguments in CALLS.items():
            getattr(loops, name)(*arguments(rng))
            try:
                getattr(loops, name)(*faulty(rng, arguments(rng)))
            except REFUSALS:
                refused += 1
    return refused


if __name__ == "__main__":
    sys.stdout.write(f"{try_all(load(sys.argv[1]), int(sys.argv[2]))} refused\n")
