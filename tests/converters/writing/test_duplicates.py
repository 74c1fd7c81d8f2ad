"""Samples that come again are left out: the first stays, whatever the number of workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream import ConvertOptions, SchemaOptions
from lmms_stream.converters.convert import convert
from lmms_stream.converters.dry_run import dry_run
from lmms_stream.converters.report import ConvertReport
from lmms_stream.converters.writing.placement import Seen
from lmms_stream.errors import ConfigError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.processors.chat import ChatProcessor

from ..held import chat
from ..test_convert_runs import written


@given(
    batches=st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=20), max_size=30),
)
def test_each_hash_is_new_once_and_at_its_first_place(batches: list[list[tuple[int, int]]]) -> None:
    seen, known = Seen(), set()
    for batch in batches:
        expected = []
        for each in batch:
            expected.append(each not in known)
            known.add(each)
        assert seen.add(np.array(batch, np.uint64).reshape(-1, 2)).tolist() == expected


def test_runs_of_hashes_stay_few_and_hold_each_once() -> None:
    hashes = np.random.default_rng(3).integers(0, 1 << 63, (50_000, 2)).astype(np.uint64)
    seen = Seen()
    for at in range(0, len(hashes), 500):
        assert seen.add(hashes[at : at + 500]).all()
    assert sum(len(high) for high, _ in seen._runs) == len(hashes)
    assert len(seen._runs) < 6
    assert not seen.add(hashes).any()


def converted(source: Path, target: Path, **options: Any) -> ConvertReport:
    return convert([source], str(target), dedup="exact", unit_bytes=5000, shard_bytes=1 << 14, **options)


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repeated") / "chats.jsonl"
    numbers = [*range(200), *range(100, 300), *range(50), *[7] * 20, 300]
    path.write_text("".join(json.dumps(chat(number)) + "\n" for number in numbers))
    return path


def test_samples_that_come_again_are_left_out_for_any_number_of_workers(repeated: Path, tmp_path: Path) -> None:
    reports = [converted(repeated, tmp_path / str(workers), num_workers=workers) for workers in (1, 3)]
    assert [(report.num_rows, report.num_duplicates) for report in reports] == [(301, 170)] * 2
    stored = [json.loads(sample["messages"]) for sample in PackedStreamingDataset(tmp_path / "1")[:]]
    assert stored == [chat(number)["messages"] for number in range(301)]
    assert written(str(tmp_path / "1")) == written(str(tmp_path / "3"))
    assert json.loads((tmp_path / "1" / "_lmms" / "dataset.json").read_text())["num_duplicates"] == 170


def test_lengths_order_splits_and_limit_are_those_of_the_samples_that_are_left(
    repeated: Path, tmp_path: Path, chat_processor: ChatProcessor
) -> None:
    unique = tmp_path / "unique.jsonl"
    unique.write_text("".join(json.dumps(chat(number)) + "\n" for number in range(301)))
    options: dict[str, Any] = {"processor": chat_processor, "shuffle_seed": 3, "splits": {"a": 0.5, "b": 0.5}}
    for source, name in ((repeated, "repeated"), (unique, "unique")):
        converted(source, tmp_path / name, num_workers=1, **options)
    shown = [
        {
            name: data
            for name, data in written(str(tmp_path / name)).items()
            if "dataset.json" not in name and "provenance" not in name  # they say which sources and rows these were
        }
        for name in ("repeated", "unique")
    ]
    assert shown[0] == shown[1]
    report = converted(repeated, tmp_path / "few", num_workers=1, limit=260)
    assert (report.num_rows, report.num_duplicates) == (260, 100)


def test_what_is_stored_beside_a_text_tells_samples_apart(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(f'{{"text": "same", "number": {number % 3}}}\n' for number in range(9)))
    assert convert([source], str(tmp_path / "texts"), dedup="exact").num_rows == 1
    assert convert([source], str(tmp_path / "all"), dedup="exact", schema=SchemaOptions(keep=("number",))).num_rows == 3
    with pytest.raises(ConfigError, match="dedup must be 'exact' or None, got 'near'"):
        convert([source], str(tmp_path / "near"), dedup="near")


def test_a_dry_run_leaves_out_what_the_conversion_does(repeated: Path, tmp_path: Path) -> None:
    functions = tmp_path / "own.py"
    functions.write_text(
        "def even(row):\n    return len(row['messages'][0]['content']) % 2 == 0\n\n\n"
        "def short(row):\n    return row if len(row['messages'][-1]['content']) % 3 else None\n"
    )
    options: dict[str, Any] = {
        "dedup": "exact",
        "schema": SchemaOptions(filter=f"{functions}:even", map=f"{functions}:short"),
    }
    expected = dry_run([repeated], options=ConvertOptions(**options))
    done = convert([repeated], str(tmp_path / "out"), options=ConvertOptions(**options), num_workers=1)
    names = ("num_left_out_by_filter", "num_left_out_by_map", "num_duplicates")
    assert expected.num_samples == done.num_rows
    assert [getattr(expected, name) for name in names] == [getattr(done, name) for name in names]
    assert min(getattr(done, name) for name in names) > 0
