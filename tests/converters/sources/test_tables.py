from __future__ import annotations

import datetime
import os
import re
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.converters.sources import arrow as tables
from lmms_stream.errors import DataError, StorageError

from ...strategies import examples
from .source_rows import MESSY, json_lines, num_units, opened, read, read_numbered, write

TABLE = pyarrow.Table.from_pylist(MESSY)


def write_stream(path: Path, table: Any, *, batch_rows: int = 7) -> Path:
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return path


def write_file(path: Path, table: Any, *, batch_rows: int = 7, compression: str | None = None) -> Path:
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return path


def write_parquet(path: Path, table: Any, *, batch_rows: int = 7) -> Path:
    pyarrow.parquet.write_table(table, path, row_group_size=batch_rows)
    return path


def write_dictionaries(path: Path, table: Any, *, batch_rows: int = 7) -> Path:
    coded = table.set_column(1, "text", table["text"].combine_chunks().dictionary_encode())
    return write_stream(path, coded, batch_rows=batch_rows)


WRITERS = {"parquet": write_parquet, "file": write_file, "stream": write_stream, "dictionaries": write_dictionaries}


@given(
    kind=st.sampled_from(sorted(WRITERS)),
    num_rows=st.integers(1, 100),
    batch_rows=st.integers(1, 40),
    unit_bytes=st.integers(1, 3000),
    bounds=st.tuples(st.none() | st.integers(-110, 110), st.none() | st.integers(-110, 110)),
)
@examples(150)
def test_units_and_slices_of_tables_give_their_rows(
    kind: str, num_rows: int, batch_rows: int, unit_bytes: int, bounds: tuple[int | None, int | None]
) -> None:
    wanted = [(number + 1, MESSY[number]) for number in range(num_rows)[slice(*bounds)]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("a.parquet" if kind == "parquet" else "a.arrow")
        WRITERS[kind](path, TABLE.slice(0, num_rows), batch_rows=batch_rows)
        start, stop = ("" if bound is None else str(bound) for bound in bounds)
        if wanted:
            assert read_numbered(f"{path}@[{start}:{stop}]", unit_bytes=unit_bytes) == wanted
        else:
            with pytest.raises(DataError, match="holds no rows from"):
                read_numbered(f"{path}@[{start}:{stop}]", unit_bytes=unit_bytes)


def test_small_row_groups_share_a_unit_and_all_bytes_are_accounted_for(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", TABLE, batch_rows=1)
    assert num_units(path, unit_bytes=1) == 100
    assert 2 < num_units(path, unit_bytes=2000) < 30
    with opened(path, unit_bytes=2000) as ((source,), _):
        assert sum(unit.num_bytes for unit in source.units()) == source.num_bytes == path.stat().st_size


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_feather_and_compressed_batches_are_read(tmp_path: Path, compression: str) -> None:
    pyarrow.feather.write_feather(TABLE, str(tmp_path / "a.feather"), compression=compression, chunksize=9)
    assert read(tmp_path / "a.feather", unit_bytes=500) == MESSY
    assert read(write_file(tmp_path / "a.arrow", TABLE, compression=compression), unit_bytes=500) == MESSY


def test_wide_rows_are_turned_into_python_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "STEP_BYTES", 1000)
    rows = [{"image": bytes([number]) * 400, "nested": {"a": [number]}} for number in range(30)]
    table = pyarrow.Table.from_pylist(rows)
    assert read(write_parquet(tmp_path / "a.parquet", table, batch_rows=30)) == rows
    assert read(write_stream(tmp_path / "a.arrow", table, batch_rows=30)) == rows


def test_a_value_that_python_cannot_hold_is_an_error_of_its_row(tmp_path: Path) -> None:
    text = pyarrow.array([b"a", b"\xff", b"c"], pyarrow.binary()).view(pyarrow.string())
    day = pyarrow.array([0, 1, 10**9], pyarrow.int32()).view(pyarrow.date32())
    path = write_parquet(tmp_path / "a.parquet", pyarrow.table({"text": text, "day": day}))
    found = read_numbered(path)
    assert found[0] == (1, {"text": "a", "day": datetime.date(1970, 1, 1)})
    for number, values in found[1:]:
        assert re.search("a value has no form in Python .*: write the column as text or numbers", values), number


def test_decimals_are_the_texts_of_their_digits(tmp_path: Path) -> None:
    rows = [{"price": Decimal("1.50"), "seen": [{"at": Decimal("-0.003")}]}, {"price": None, "seen": None}]
    path = write_parquet(tmp_path / "a.parquet", pyarrow.Table.from_pylist(rows))
    assert read(path) == [{"price": "1.50", "seen": [{"at": "-0.003"}]}, {"price": None, "seen": None}]


def test_maps_of_texts_are_objects_at_any_depth(tmp_path: Path) -> None:
    kind = pyarrow.map_(pyarrow.string(), pyarrow.struct([("x", pyarrow.decimal128(3, 1)), ("y", pyarrow.int64())]))
    pairs = [("a", {"x": Decimal("1.5"), "y": None}), ("b", None)]
    table = pyarrow.table(
        {
            "meta": pyarrow.array([pairs, None], kind),
            "calls": pyarrow.array([[{"arguments": [("city", "Bonn")]}], []], pyarrow.list_(
                pyarrow.struct([("arguments", pyarrow.map_(pyarrow.string(), pyarrow.string()))]))),
            "counts": pyarrow.array([[(1, 2)], []], pyarrow.map_(pyarrow.int64(), pyarrow.int64())),
            "twice": pyarrow.array([[("a", 1), ("a", 2)], []], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        }
    )  # fmt: skip
    assert read(write_parquet(tmp_path / "a.parquet", table)) == [
        {
            "meta": {"a": {"x": "1.5"}, "b": None}, "calls": [{"arguments": {"city": "Bonn"}}], "counts": [(1, 2)],
            "twice": [("a", 1), ("a", 2)],
        },
        {"meta": None, "calls": [], "counts": [], "twice": {}},
    ]  # fmt: skip


CALLED = [
    {"messages": [{"role": "user", "content": "weather?"}], "meta": {"zone": "CET", "seen": [{"at": 1}, None]}},
    {
        "messages": [
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"city": "Bonn"}}]},
            {"role": "assistant", "tool_calls": [{"name": "g", "arguments": {"zone": "CET", "days": [1, None]}}]},
        ],
        "meta": None,
    },
]


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_nulls_that_arrow_pads_nested_rows_with_are_left_out_at_any_depth(tmp_path: Path, kind: str) -> None:
    table = pyarrow.Table.from_pylist(CALLED)
    assert table.to_pylist() != CALLED  # padded
    path = WRITERS[kind](tmp_path / ("a.parquet" if kind == "parquet" else "a.arrow"), table, batch_rows=1)
    assert read(path) == CALLED


def test_nulls_that_arrow_pads_nested_rows_with_are_left_out_of_saved_datasets(hub: Path) -> None:
    import datasets

    dataset = datasets.Dataset.from_list(CALLED)
    dataset.save_to_disk(hub / "saved")
    dataset.to_parquet(hub / "set" / "train.parquet")
    dataset.select([1, 0]).save_to_disk(hub / "selected")
    assert read(hub / "saved") == CALLED
    assert read(f"hf:{hub / 'set'}") == read(f"hf:{hub / 'set'}?streaming=1") == CALLED
    assert read(hub / "selected") == CALLED[::-1]


def test_a_null_that_images_of_a_table_hold_stays_beside_their_path(tmp_path: Path) -> None:
    rows = [{"image": {"bytes": None, "path": "a.png"}, "text": None}]
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    schema = pyarrow.schema({"image": kind, "text": pyarrow.string()})
    assert read(write_parquet(tmp_path / "a.parquet", pyarrow.Table.from_pylist(rows, schema))) == rows


def test_json_of_the_library_is_parsed(hub: Path) -> None:
    import datasets

    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "tool_calls": [{"arguments": {"a": 1, "zone": None}}]}], "meta": {"a": [None]}},
        {"messages": [{"role": "user", "tool_calls": [{"arguments": "x"}]}, {"role": "tool"}], "meta": "1"},
    ]
    calls = datasets.List(datasets.Json())
    features = datasets.Features(
        messages=datasets.List({"role": datasets.Value("string"), "tool_calls": calls}), meta=datasets.Json()
    )
    dataset = datasets.Dataset.from_list(rows, features=features)
    dataset.to_parquet(hub / "set" / "train.parquet")
    dataset.save_to_disk(hub / "saved")
    wanted = [dataset[0], {**dataset[1], "messages": rows[1]["messages"]}]
    assert wanted[0] == rows[0]
    for spec in hub / "set", hub / "saved", f"hf:{hub / 'set'}", f"hf:{hub / 'set'}?streaming=1":
        assert read(spec) == wanted
    broken = pyarrow.array(["{", '{"a": 1}']).cast(pyarrow.json_())
    found = read_numbered(write_parquet(hub / "broken.parquet", pyarrow.table({"meta": broken})))
    assert found[1] == (2, {"meta": {"a": 1}})
    assert "a value has no form in Python" in found[0][1]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_damaged_tables_are_named(tmp_path: Path, name: str) -> None:
    kind = name[2:]
    rows = pyarrow.table({"a": np.random.default_rng(0).integers(0, 1 << 60, 100_000)})
    whole = (write_parquet if kind == "parquet" else write_file)(tmp_path / name, rows, batch_rows=50_000).read_bytes()
    error = rf"{name}: not readable as {kind.title()} \(.*\): copy it again, or write it again"
    with pytest.raises(DataError, match=error):
        read(write(tmp_path / name, whole[: len(whole) // 2]))
    if kind == "parquet":
        with pytest.raises(DataError, match=error):
            read(write(tmp_path / name, whole[:20_000] + b"\xff" * 500_000 + whole[520_000:]))
    with pytest.raises(DataError, match=error):
        read(write(tmp_path / name, b"nothing of the kind"), format=kind)


@pytest.mark.parametrize("writer", [write_stream, write_dictionaries])
def test_what_follows_the_end_of_a_stream_is_named(tmp_path: Path, writer: Any) -> None:
    stream = writer(tmp_path / "a.arrow", TABLE).read_bytes()
    with pytest.raises(DataError, match=r"a.arrow: more data follows the end of its stream, for example another"):
        read(write(tmp_path / "a.arrow", stream + stream))
    assert read(write(tmp_path / "a.arrow", stream + bytes(512))) == MESSY


def test_tables_without_rows_or_with_a_column_twice_are_refused(tmp_path: Path) -> None:
    for writer, name in (write_parquet, "a.parquet"), (write_file, "a.arrow"), (write_stream, "b.arrow"):
        with pytest.raises(DataError, match=rf"{name} holds no rows: leave it out, or write it again"):
            read(writer(tmp_path / name, TABLE.slice(0, 0)))
        twice = pyarrow.Table.from_arrays([pyarrow.array([1])] * 2, names=["a", "a"])
        with pytest.raises(DataError, match="column 'a' occurs more than once: rename one of them"):
            read(writer(tmp_path / name, twice))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for datasets, with a cache of the library beside it."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.utils.tqdm, "_hf_datasets_progress_bars_disabled", True, raising=False)
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def test_saved_datasets_are_read_in_the_order_of_their_state(hub: Path) -> None:
    import datasets

    dataset = datasets.Dataset.from_list(MESSY)
    dataset.save_to_disk(hub / "saved", num_shards=3)
    assert read(hub / "saved", unit_bytes=300) == MESSY
    assert read_numbered(f"{hub / 'saved'}@[30:-20]", unit_bytes=300) == [(n + 1, MESSY[n]) for n in range(30, 80)]
    dataset.select([5, 3, 99, 3]).save_to_disk(hub / "selected")
    assert read(hub / "selected") == [MESSY[5], MESSY[3], MESSY[99], MESSY[3]]
    with opened(hub / "saved") as ((source,), _):
        assert source.name == str(hub / "saved")
        assert source.identity["num_files"] == 5
        assert sum(unit.num_bytes for unit in source.units()) == source.num_bytes


def test_a_selection_that_was_saved_as_indices_is_followed(hub: Path) -> None:
    import datasets

    folder = hub / "saved"
    datasets.Dataset.from_list(MESSY).save_to_disk(folder, num_shards=2)
    chosen = [70, 2, 2, 99, 0]
    write_stream(folder / "indices.arrow", pyarrow.table({"indices": pyarrow.array(chosen, pyarrow.uint64())}))
    state = orjson.loads((folder / "state.json").read_bytes())
    write(folder / "state.json", orjson.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    assert read(folder) == [MESSY[number] for number in chosen]
    assert read_numbered(f"{folder}@[-2:]") == [(4, MESSY[99]), (5, MESSY[0])]


def test_a_split_of_several_is_to_be_named(hub: Path) -> None:
    import datasets

    splits = {"train": datasets.Dataset.from_list(MESSY), "test": datasets.Dataset.from_list(MESSY[:3])}
    datasets.DatasetDict(splits).save_to_disk(hub / "both")
    with pytest.raises(DataError, match=r"both: holds 2 splits: name one of them, \S+both/train or \S+both/test"):
        read(hub / "both")
    assert (
        read(f"{hub / 'both'}?split=test")
        == read(hub / "both" / "test")
        == read(f"hf:{hub / 'both'}?split=test")
        == MESSY[:3]
    )
    datasets.DatasetDict(train=splits["train"]).save_to_disk(hub / "one")
    assert read(hub / "one") == read(f"hf:{hub / 'one'}") == MESSY


def test_a_state_that_names_other_files_is_refused(hub: Path) -> None:
    import datasets

    datasets.Dataset.from_list(MESSY).save_to_disk(hub / "saved")
    state = hub / "saved" / "state.json"
    write(state, orjson.dumps({"_data_files": [{"filename": "../../x.arrow"}]}))
    with pytest.raises(DataError, match=r"'../../x.arrow' is not a file of the folder: save the dataset again"):
        read(hub / "saved")
    write(state, orjson.dumps({"_data_files": [{"filename": "x.arrow"}]}))
    with pytest.raises(DataError, match=r"x.arrow: this file, named in state.json, is missing"):
        read(hub / "saved")
    write(state, b"{")
    with pytest.raises(DataError, match=r"state.json: not valid JSON .*: save the dataset again"):
        read(hub / "saved")


@pytest.mark.parametrize("streaming", ["", "&streaming=1"])
def test_datasets_of_the_library_are_read_from_local_files(hub: Path, streaming: str) -> None:
    write(hub / "set" / "train.jsonl", json_lines(MESSY))
    write(hub / "set" / "test.jsonl", json_lines(MESSY[:4]))
    assert read(f"hf:{hub / 'set'}?split=train{streaming}", unit_bytes=500) == MESSY
    assert read(f"hf://{hub / 'set'}?split=test{streaming}") == MESSY[:4]
    assert read_numbered(f"hf:{hub / 'set'}?split=train{streaming}@[90:95]") == [
        (n + 1, MESSY[n]) for n in range(90, 95)
    ]
    write_parquet(hub / "a.parquet", TABLE)
    files = f"data_files={hub / 'a.parquet'}&data_files={hub / 'a.parquet'}"
    assert read(f"hf:parquet?{files}{streaming}") == MESSY * 2
    if streaming:
        with pytest.raises(DataError, match="the number of rows is unknown in a stream: count rows from the"):
            read(f"hf:{hub / 'set'}?split=train&streaming=1@[-5:]")
    else:
        assert read(f"hf:{hub / 'set'}?split=train@[-5:]") == MESSY[-5:]


@pytest.mark.parametrize("bounds", ["3:50", "3:50:4", ":9", "40:", "::7", "5::2", "90:400:3"])
def test_a_slice_of_a_split_has_its_rows_also_while_it_streams_and_of_a_saved_dataset(hub: Path, bounds: str) -> None:
    import datasets

    write(hub / "set" / "train.jsonl", json_lines(MESSY))
    rows = slice(*(int(bound) if bound else None for bound in bounds.split(":")))
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"n": n} for n in range(len(MESSY))])})
    saved.save_to_disk(hub / "saved")
    for split in f"train[{bounds}]", f"train%5B{bounds}%5D":
        for streaming in "", "&streaming=1":
            assert read(f"hf:{hub / 'set'}?split={split}{streaming}", unit_bytes=500) == MESSY[rows]
            assert read(f"hf:{hub / 'set'}?split={split}{streaming}@[1:6]") == MESSY[rows][1:6]
        assert [row["n"] for row in read(f"hf:{hub / 'saved'}?split={split}")] == [*range(len(MESSY))][rows]
    assert [row["n"] for row in read(f"{hub / 'saved'}?split=train[{bounds}]")] == [*range(len(MESSY))][rows]
    assert [row["n"] for row in read(f"hf:{hub / 'saved' / 'train'}?split=train[{bounds}]")] == [*range(len(MESSY))][
        rows
    ]


@pytest.mark.parametrize("bounds", [":10%", "15%:80%", "-30%:", "33%:34%"])
def test_percent_of_a_split_are_the_same_rows_while_it_streams(hub: Path, bounds: str) -> None:
    write(hub / "set" / "train.jsonl", json_lines(MESSY))
    expected = read(f"hf:{hub / 'set'}?split=train[{bounds}]")
    assert 0 < len(expected) < len(MESSY)
    assert read(f"hf:{hub / 'set'}?split=train[{bounds}]&streaming=1", unit_bytes=500) == expected


@pytest.mark.parametrize("bounds", ["-5:", ":-5", "-9:-2:3"])
def test_slices_from_the_end_are_the_same_rows_while_they_stream(hub: Path, bounds: str) -> None:
    write(hub / "set" / "train.jsonl", json_lines(MESSY))
    first, *others = (int(bound) if bound else None for bound in bounds.split(":"))
    expected = MESSY[slice(first, *others)]
    assert read(f"hf:{hub / 'set'}?split=train[{bounds}]") == expected
    assert read(f"hf:{hub / 'set'}?split=train[{bounds}]&streaming=1") == expected


@pytest.mark.parametrize("split", ["train[:5", "train[a:b]", "train[5]", "train[:10%]+test[", "train[::-1]"])
def test_a_split_with_a_slice_that_is_none_is_refused(hub: Path, split: str) -> None:
    write(hub / "set" / "train.jsonl", json_lines(MESSY))
    for streaming in ("", "&streaming=1"):
        with pytest.raises(DataError, match=r"split '.*' is no slice: write NAME\[START:STOP\] or NAME"):
            read(f"hf:{hub / 'set'}?split={split.replace('%', '%25').replace('+', '%2B')}{streaming}")


def test_the_identity_of_a_dataset_changes_with_its_files(hub: Path) -> None:
    identities = []
    for rows in MESSY, MESSY[:50]:
        path = write(hub / "set" / "train.jsonl", json_lines(rows))
        os.utime(path, (len(rows), len(rows)))
        for spec in f"hf:{hub / 'set'}", f"hf:json?data_files={path}", path:
            with opened(spec) as ((source,), _):
                identities.append(orjson.dumps(source.identity))
    assert len(set(identities)) == len(identities)
    with opened(f"hf:{hub / 'set'}") as ((source,), _):
        assert orjson.dumps(source.identity) == identities[3]


def test_images_of_a_dataset_stay_bytes(hub: Path) -> None:
    from PIL import Image

    for label in "cat", "dog":
        (hub / "set" / "train" / label).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(hub / "set" / "train" / label / "1.png")
    for streaming in "", "?streaming=1":
        rows = read(f"hf:{hub / 'set'}{streaming}")
        assert [row["label"] for row in rows] == ["cat", "dog"]
        assert {type(row["image"]) for row in rows} == {dict}
        assert [row["image"].keys() for row in rows] == [{"bytes", "path"}] * 2


def test_what_the_hub_library_refuses_is_named(hub: Path) -> None:
    write(hub / "set" / "train.jsonl", json_lines(MESSY))
    write(hub / "set" / "test.jsonl", json_lines(MESSY))
    with pytest.raises(DataError, match=r"has splits train, test: name one, as \?split=train"):
        read(f"hf:{hub / 'set'}")
    with pytest.raises(DataError, match=r"split=other: .*correct it, as hf:NAME\?config=CONFIG&split=SPLIT"):
        read(f"hf:{hub / 'set'}?split=other")
    with pytest.raises((DataError, StorageError), match=r"hf:no/such: "):
        read("hf:no/such")
    write(hub / "scripted" / "scripted.py", b"raise SystemExit('the script ran')")
    with pytest.raises(DataError, match=r"has a loading script, which is never run: name its data files"):
        read(f"hf:{hub / 'scripted'}")
    write(hub / "a.pkl", b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(DataError, match="builder 'pandas' runs more than a parser of files, and is not"):
        read(f"hf:pandas?data_files={hub / 'a.pkl'}")


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("hf:x?splits=train", "unknown setting 'splits': expected one of config, split, streaming"),
        ("hf:x?split=", "split needs exactly one value: write split=VALUE once"),
        ("hf:x?split=a&split=b", "split needs exactly one value"),
        ("hf:x?streaming=yes", "streaming=yes is neither 0 nor 1"),
        ("hf:?split=a", "names no dataset: write hf:NAME"),
    ],
)
def test_a_hub_spec_that_is_unclear_is_refused(spec: str, error: str) -> None:
    with pytest.raises(DataError, match=error):
        read(spec)
