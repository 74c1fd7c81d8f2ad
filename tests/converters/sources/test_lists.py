"""What entries of a YAML list say of their sources."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
from lmms_stream import PackedStreamingDataset
from lmms_stream.converters.append import append
from lmms_stream.converters.convert import convert
from lmms_stream.converters.rows import user_functions
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.sources.jsonl import LinesTable
from lmms_stream.converters.sources.table import Location, TableSource, limited
from lmms_stream.errors import ConfigError, LmmsStreamError

from .source_rows import json_lines, opened, read, write
from .test_tables import write_parquet


def listed(folder: Path, *entries: Any) -> Path:
    return write(folder / "list.yaml", yaml.safe_dump({"datasets": list(entries)}).encode())


def test_sources_of_different_columns_become_one_dataset(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", 'Frage;Antwort\nwie;"gut; so"\n'.encode("latin-1"))
    write_parquet(tmp_path / "b.parquet", pyarrow.Table.from_pylist([{"instr": "x", "out": str(n)} for n in range(3)]))
    dialog = [{"who": "U", "says": "hi"}, {"who": "tool", "says": "1"}, {"who": "A", "says": "ho"}]
    write(tmp_path / "c.jsonl", json_lines([{"dialog": dialog, "id": 1}]))
    path = listed(
        tmp_path,
        {
            "path": "a.csv",
            "csv": {"delimiter": ";", "encoding": "latin-1"},
            "columns": {"question": "Frage", "answer": "Antwort"},
            "system": "Deutsch",
        },
        {"path": "b.parquet@[1:]", "kind": "alpaca", "columns": {"instruction": "instr", "output": "out"}, "limit": 1},
        {
            "path": "c.jsonl",
            "columns": {"messages": "dialog"},
            "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "U", "assistant_tag": "A"},
            "learn": "last",
        },
    )
    report = convert([path], str(tmp_path / "out"), num_workers=1, schema=SchemaOptions(system="English"))
    samples = PackedStreamingDataset(tmp_path / "out")
    assert report.num_rows == 3
    assert [samples[number]["messages"] for number in range(3)] == [
        '[{"role":"system","content":"Deutsch"},{"role":"user","content":"wie"},'
        '{"role":"assistant","content":"gut; so"}]',
        '[{"role":"system","content":"English"},{"role":"user","content":"x"},{"role":"assistant","content":"1"}]',
        '[{"role":"system","content":"English"},{"role":"user","content":"hi"},{"role":"tool","content":"1"},'
        '{"role":"assistant","content":"ho"}]',
    ]


def test_settings_decide_what_is_written_so_others_are_another_conversion(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", b"text;b\nx;y\n")

    def converted(**settings: Any) -> int:
        path = listed(tmp_path, {"path": "a.csv", "csv": {"delimiter": ";"}, **settings})
        return convert([path], str(tmp_path / "out"), num_workers=1).num_rows

    assert converted() == converted() == 1
    for others in ({"columns": {"text": "b"}}, {"keep": "b"}, {"csv": {"delimiter": ";", "encoding": "latin-1"}}):
        with pytest.raises(LmmsStreamError, match="--overwrite"):
            converted(**others)


def test_a_slice_of_other_rows_is_another_conversion(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json_lines([{"text": str(number)} for number in range(9)]))
    convert([f"{path}@[0:2]"], str(tmp_path / "out"), num_workers=1)
    with pytest.raises(LmmsStreamError, match="--overwrite"):
        convert([f"{path}@[0:3]"], str(tmp_path / "out"), num_workers=1)


def test_settings_are_of_the_source_that_has_them(tmp_path: Path) -> None:
    """In another entry they are another conversion; sources that are added may have settings of their own."""
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", json_lines([{"text": name, "note": f"note of {name}"}]))
    first, second = {"path": "a.jsonl", "columns": {"text": "note"}}, {"path": "b.jsonl"}
    convert([listed(tmp_path, first, second)], str(tmp_path / "out"), num_workers=1)
    moved = {"path": "a.jsonl"}, {"path": "b.jsonl", "columns": {"text": "note"}}
    with pytest.raises(LmmsStreamError, match="--overwrite"):
        convert([listed(tmp_path, *moved)], str(tmp_path / "out"), num_workers=1)
    convert([listed(tmp_path, first, second)], str(tmp_path / "other"), num_workers=1)
    assert append([listed(tmp_path, *moved)], str(tmp_path / "other"), num_workers=1).num_new_sources == 2
    write(tmp_path / "c.jsonl", json_lines([{"text": "c", "note": "note of c"}]))
    added = append(
        [listed(tmp_path, first, second, {"path": "c.jsonl", "columns": {"text": "note"}})],
        str(tmp_path / "out"),
        num_workers=1,
    )
    assert (added.num_new_sources, added.num_samples) == (1, 3)
    stored = PackedStreamingDataset(str(tmp_path / "out"))[:]
    assert [sample["text"] for sample in stored] == ["note of a", "b", "note of c"]


@pytest.mark.parametrize("limit", range(1, 9))
def test_a_limit_is_of_the_first_rows_of_all_files_that_an_entry_names(tmp_path: Path, limit: int) -> None:
    rows = [{"id": number} for number in range(6)]
    write(tmp_path / "parts" / "a.jsonl", json_lines(rows[:3]))
    write(tmp_path / "parts" / "b.jsonl", json_lines(rows[3:4]))
    write(tmp_path / "parts" / "c.jsonl", json_lines(rows[4:]))
    assert read(listed(tmp_path, {"path": "parts", "limit": limit})) == rows[:limit]
    assert read(listed(tmp_path, {"path": "parts/*.jsonl", "limit": limit}, {"path": "parts/b.jsonl"}))[-1] == rows[3]
    assert read(listed(tmp_path, {"path": "parts/c.jsonl@[-1:]", "limit": limit})) == rows[5:]


def test_files_are_counted_once_for_a_limit_and_anew_where_they_changed(tmp_path: Path) -> None:
    files = [write(tmp_path / "parts" / f"{name}.jsonl", json_lines([{"id": 1}, {"id": 2}])) for name in "ab"]
    counted: list[str] = []

    class Counting(LinesTable):
        def num_rows(self) -> int:
            counted.append(self._location.name)
            return super().num_rows()

    def look() -> list[slice]:
        with opened(tmp_path / "parts") as (sources, _):
            tables = [each for each in sources if isinstance(each, TableSource)]
            for source, file in zip(tables, files, strict=True):
                location = Location(
                    path=file, name=str(file), folder=None, key=None, scratch=tmp_path / "none", unit_bytes=100
                )
                source._open_table = partial(Counting, location)
            return [source.rows for source in limited(tables, 3)]

    assert [look(), look()] == [[slice(0, 3), slice(0, 1)]] * 2
    assert counted == [str(files[0])]
    files[0].write_bytes(json_lines([{"id": 1}]))
    assert look() == [slice(0, 3), slice(0, 2)]
    assert counted == [str(files[0])] * 2


def test_an_appended_entry_may_have_a_function_of_its_own_and_a_known_one_keeps_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two", "three"):
        write(tmp_path / f"{name}.jsonl", json_lines([{"text": name}]))
    write(tmp_path / "old_map.py", b"def loud(row):\n    return {'text': row['text'].upper()}\n")
    write(tmp_path / "new_map.py", b"def twice(row):\n    return [row, row]\n")
    first = {"path": "one.jsonl", "map": f"{tmp_path}/old_map.py:loud"}
    second = {"path": "two.jsonl", "map": f"{tmp_path}/new_map.py:twice"}
    convert([listed(tmp_path, first)], "out", num_workers=1)
    added = append([listed(tmp_path, first, second)], "out", num_workers=1)
    assert (added.num_new_sources, added.num_samples) == (1, 3)
    assert append([listed(tmp_path, first, second)], "out", num_workers=1).num_new_sources == 0
    assert [sample["text"] for sample in PackedStreamingDataset("out")[:]] == ["ONE", "two", "two"]
    write(tmp_path / "new_map.py", b"def twice(row):\n    return [row, row, row]\n")
    for name in [name for name, module in [*sys.modules.items()] if getattr(module, "twice", None)]:
        monkeypatch.delitem(sys.modules, name)
    user_functions._in_use.clear()
    third = {"path": "three.jsonl", "map": f"{tmp_path}/new_map.py:twice"}
    with pytest.raises(
        ConfigError, match=r"was converted with other code of .*new_map\.py:twice: restore this code, or g"
    ):
        append([listed(tmp_path, first, second, third)], "out", num_workers=1)
    assert append([listed(tmp_path, first, {"path": "three.jsonl"})], "out", num_workers=1).num_samples == 4


def test_an_entry_names_the_split_of_a_folder(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / "set" / f"{split}.jsonl", json_lines([{"split": split}]))
    assert read(listed(tmp_path, {"path": "set", "split": "test"})) == [{"split": "test"}]
    assert read(listed(tmp_path, {"path": "set", "split": "train", "data_type": "hf_dataset"})) == [{"split": "train"}]
    with pytest.raises(LmmsStreamError, match=r"split is 'test', and the path .*/set\?split=train names a split, too"):
        read(listed(tmp_path, {"path": "set?split=train", "split": "test"}))


def test_media_start_from_the_folder_that_an_entry_names(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", json_lines([{"a": 1}]))
    with opened(listed(tmp_path, {"path": "a.jsonl", "media_root": "media"})) as ((source,), _):
        assert source.settings == {"media_root": str(tmp_path / "media")}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"colums": {}}, r"list\.yaml: entry 1 of datasets: unknown key 'colums': did you mean 'columns'"),
        ({"columns": ["a"]}, r"entry 1 of datasets: columns is \['a'\]: expected names and texts, as \{NAME: TEXT\}"),
        ({"columns": {"promt": "a"}}, r"a\.jsonl: no column has the role promt"),
        ({"tags": {"role": "who"}}, "entry 1 of datasets: tags is .*: there is no tag 'role': did you mean 'role_tag'"),
        ({"system": 3}, "entry 1 of datasets: system is 3: expected text"),
        ({"kind": "chat"}, r"a\.jsonl: kind 'chat' is not known: choose one of"),
        ({"learn": "all"}, r"a\.jsonl: learn must be 'assistant', 'last' or 'each', got 'all'"),
        ({"keep": 3}, "entry 1 of datasets: keep is 3: expected names of columns, or true for all"),
        ({"limit": 0}, "entry 1 of datasets: limit is 0: expected a number of rows, at least 1"),
        ({"weight": -1}, "entry 1 of datasets: weight is -1: expected a share of the tokens, above 0"),
        ({"csv": {"sep": ";"}}, "entry 1 of datasets: csv has no 'sep'"),
        ({"csv": {"quote": 3}}, "entry 1 of datasets: csv.quote is 3: expected text"),
        (
            {"csv": ";"},
            r"entry 1 of datasets: csv is ';': write csv: \{delimiter: …, quote: …, encoding: …, header: …\}",
        ),
        ({"csv": {"delimiter": ";"}}, "is jsonl, and csv says how CSV and TSV are written: leave csv out of its entry"),
        ({"split": "train"}, "only a folder has configurations and splits"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write(tmp_path / "a.jsonl", json_lines([{"text": "x"}]))
    with pytest.raises(LmmsStreamError, match=message):
        convert([listed(tmp_path, {"path": "a.jsonl", **settings})], str(tmp_path / "out"), num_workers=1)
    assert not (tmp_path / "out" / "index.json").exists()
