from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.loader.row_memory import MAX_FREE, RowMemory
from lmms_stream.types import Rows

KEPT: dict[str, Callable[[Rows], Any]] = {
    "row": lambda rows: rows[2],
    "slice": lambda rows: rows[2][:, 10:20][:, 2:],
    "tensor": lambda rows: torch.from_numpy(rows[2][:, 10:20]),
    "slice of a tensor": lambda rows: torch.from_numpy(rows[2])[0, 5:],
    "array of a tensor": lambda rows: torch.from_numpy(rows[2][:, 10:20]).numpy()[0],
}


def address(rows: Rows) -> int:
    """Where the first row lies in memory."""
    return int(rows[0].__array_interface__["data"][0])


def test_rows_are_apart_and_as_long_as_asked() -> None:
    rows = RowMemory().rows(100)
    for number, row in enumerate(rows):
        row[:] = number
    assert [row.shape for row in rows] == [(1, 100)] * 3
    assert [set(row.ravel().tolist()) for row in rows] == [{0}, {1}, {2}]


def test_memory_is_used_again_once_nobody_refers_to_it() -> None:
    memory = RowMemory()
    rows = memory.rows(100)
    before = address(rows)
    del rows
    again = memory.rows(80)
    assert address(again) == before


@pytest.mark.parametrize("keep", KEPT)
def test_memory_is_not_used_again_while_something_of_it_is_left(keep: str) -> None:
    memory = RowMemory()
    rows = memory.rows(100)
    before = address(rows)
    rows[2][:] = 7
    kept = KEPT[keep](rows)
    del rows
    gc.collect()
    others = [memory.rows(100) for _ in range(8)]
    for other in others:
        for row in other:
            row[:] = 1
    assert before not in [address(other) for other in others]
    assert np.all(np.asarray(kept) == 7)
    del kept
    assert address(memory.rows(100)) == before


def test_larger_rows_get_memory_of_their_own() -> None:
    memory = RowMemory()
    memory.rows(10)
    assert memory.rows(1000)[2].shape == (1, 1000)


def test_little_memory_is_kept_for_later() -> None:
    memory = RowMemory()
    many = [memory.rows(10) for _ in range(3 * MAX_FREE)]
    del many
    assert len(memory._free) == MAX_FREE


def test_another_process_begins_with_none() -> None:
    memory = RowMemory()
    memory.rows(10)
    assert pickle.loads(pickle.dumps(memory))._free == []
