"""The table of mutants fits the code, and the operators draw what they say."""

from __future__ import annotations

import ast
from collections import Counter

from .operators import OPERATORS, places
from .table import MOST_STRUCK, PER_ROOM, ROOMS, is_present, load

SOURCE = b"""
import numpy as np


def read(path, *, timeout_s=3, strict=True):
    if path.digest != path.checksum:
        raise ValueError(path)
    with path.lock:
        path.flush()
    path.event.wait()
    path.cache.clear()
    rng = np.random.default_rng([path.seed, path.epoch])
    return rng.integers(path.low, path.high + 1)
"""
FAULTS = {
    "flipped_comparison": ["(path.digest) == (path.checksum)"],
    "off_by_one": ["(path.high)"],
    "dropped_fence": ["if True", "pass"],
    "wrong_seed_word": ["0", "0"],  # of the list, and of the call that takes it
    "unchecked_checksum": ["False"],
    "lost_flush": ["pass"],
    "swapped_arguments": [],
    "removed_raise": ["pass"],
    "wrong_default": ["4", "False"],
    "stale_cache": ["pass"],
}


def test_each_operator_finds_its_places() -> None:
    found = {name: [place.edit.text for place in places(SOURCE) if place.operator == name] for name in OPERATORS}
    assert found == FAULTS
    for place in places(SOURCE):
        start, end, text, _ = place.edit
        ast.parse(SOURCE[:start] + text.encode() + SOURCE[end:])


def test_each_room_has_its_mutants_and_few_are_struck() -> None:
    table = load()
    assert Counter(mutant.room for mutant in table if not mutant.equivalent) == dict.fromkeys(ROOMS, PER_ROOM)
    assert sum(bool(mutant.equivalent) for mutant in table) <= MOST_STRUCK * len(table)
    assert len({mutant.name for mutant in table}) == len(table)


def test_the_code_holds_the_text_of_each_mutant_once() -> None:
    gone = [f"{mutant.file}: {mutant.old}" for mutant in load() if not is_present(mutant)]
    assert gone == [], "python -m tests.mutants draw takes the next of the draw"
