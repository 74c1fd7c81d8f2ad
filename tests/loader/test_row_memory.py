from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.loader.media_memory import MAX_FREE, RowMemory
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.plan.planner import TOKENS_PER_FILL
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.types import TokenRows

from ..conftest import write_tokens

KEPT: dict[str, Callable[[TokenRows], Any]] = {
    "row": lambda rows: rows[2],
    "slice": lambda rows: rows[2][:, 10:20][:, 2:],
    "tensor": lambda rows: torch.from_numpy(rows[2][:, 10:20]),
    "slice of a tensor": lambda rows: torch.from_numpy(rows[2])[0, 5:],
    "piece of a tensor": lambda rows: torch.unsafe_split_with_sizes(torch.from_numpy(rows[2]), [10, 90], dim=1)[1],
    "array of a tensor": lambda rows: torch.from_numpy(rows[2][:, 10:20]).numpy()[0],
}


def address(rows: TokenRows) -> int:
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


def test_without_workers_the_batches_of_a_step_are_made_as_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    rows = RowMemory.rows

    def counted(memory: RowMemory, num_tokens: int) -> TokenRows:
        asked.append(num_tokens)
        return rows(memory, num_tokens)

    monkeypatch.setattr(RowMemory, "rows", counted)
    write_tokens(tmp_path, num_samples=300, longest=4000)
    packing = PackingConfig(packing_length=TOKENS_PER_FILL // 2)
    dataset = PackedDataset([StreamConfig(local=tmp_path)], processor=TokensProcessor(), packing=packing)
    loader = PackedLoader(dataset, global_batch=8)
    batches = iter(loader)
    made = [len(asked) for _ in zip(range(8), batches, strict=False)]
    assert loader.micro_batches == 8
    assert made == [1, 1, 2, 2, 3, 3, 4, 4]  # two packs at a time


def test_a_batch_may_be_changed_while_another_of_its_step_waits_for_its_gradients(tmp_path: Path) -> None:
    write_tokens(tmp_path, num_samples=100, longest=100)
    packing = PackingConfig(packing_length=512)
    dataset = PackedDataset([StreamConfig(local=tmp_path)], processor=TokensProcessor(), packing=packing)
    first, second, *_ = PackedLoader(dataset, global_batch=4)
    assert first.input_ids.untyped_storage().data_ptr() == second.input_ids.untyped_storage().data_ptr()
    embedding = torch.nn.Embedding(1 + int(first.input_ids.max()), 2)
    loss = embedding(first.input_ids).sum()
    second.input_ids.zero_()
    loss.backward()
    assert embedding.weight.grad is not None
