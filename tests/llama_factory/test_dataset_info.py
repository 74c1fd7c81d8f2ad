"""Which rows entries of LLaMA-Factory's dataset_info.json name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from lmms_stream.doors.llama_factory import _MOOT, KEYS, V1_KEYS
from lmms_stream.errors import LmmsStreamError

from ..converters.sources.source_rows import json_lines, opened, read, write

ROWS = [{"instruction": str(number), "input": "", "output": "x"} for number in range(4)]


def info(folder: Path, **entries: Any) -> Path:
    return write(folder / "dataset_info.json", orjson.dumps(entries))


def test_one_several_and_all_datasets_are_chosen(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.json", orjson.dumps(ROWS[number : number + 1]))
    path = info(tmp_path, a={"file_name": "0.json"}, b={"file_name": "1.json"}, c={"file_name": "2.json"})
    assert read(f"{path}#b") == ROWS[1:2]
    assert read(f"{path}#c, a") == [ROWS[2], ROWS[0]]
    assert read(f"{path}#*") == ROWS[:3]
    with pytest.raises(LmmsStreamError, match=r"names 3 datasets \(a, b, c\): choose by .*json#NAME, several by #NAM"):
        read(path)
    with pytest.raises(LmmsStreamError, match=r"dataset_info\.json names no dataset 'd': choose one of a, b, c"):
        read(f"{path}#d")
    assert read(info(tmp_path, a={"file_name": "0.json"})) == ROWS[:1]


def test_each_key_stands_in_the_page_with_its_effect() -> None:
    page = (Path(__file__).parents[2] / "docs/llama_factory.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (honoured|moot|refused)[: ,]", page, re.M)
    assert sorted(name for name, _ in rows) == sorted([*KEYS, *V1_KEYS])
    assert {name for name, fate in rows if fate == "moot"} == {*_MOOT}


def test_files_folders_and_numbers_of_samples_are_meant_as_llama_factory_means_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "all" / "train.jsonl", json_lines(ROWS[:2]))
    write(tmp_path / "all" / "test.jsonl", json_lines(ROWS[2:]))
    path = info(tmp_path, mine={"file_name": "all", "num_samples": 3, "split": "train", "file_sha1": "x"})
    with opened(f"{path}#mine") as (sources, _):
        assert [Path(source.name).name for source in sources] == ["test.jsonl", "train.jsonl"]
        folders = {unit.folder for source in sources for unit in source.units()}
    assert folders == {str(tmp_path)}  # media lie beside the description
    assert [each.getMessage().partition("#")[2] for each in caplog.records] == [
        f"mine: file_sha1 cannot matter here: {_MOOT['file_sha1']}"
    ]
    assert read(f"{path}#mine") == [*ROWS[2:], ROWS[0]]


def test_a_text_file_has_a_row_a_line(tmp_path: Path) -> None:
    write(tmp_path / "wiki.txt", "One line.\nAnother, of é.".encode())
    path = info(tmp_path, wiki={"file_name": "wiki.txt", "columns": {"prompt": "text"}})
    assert read(f"{path}#wiki") == [{"text": "One line."}, {"text": "Another, of é."}]


def test_a_local_copy_of_a_dataset_of_the_hub_comes_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "org" / "chats" / "data" / "train.jsonl", json_lines(ROWS))
    write(tmp_path / "org" / "chats" / "data" / "test.jsonl", json_lines(ROWS[:1]))
    entry = {"hf_hub_url": "org/chats", "ms_hub_url": "other/chats", "file_name": "nowhere.json", "folder": "data"}
    path = info(tmp_path, train=entry, test={**entry, "split": "test"}, some={**entry, "num_samples": 2})
    assert read(f"{path}#train") == ROWS
    assert read(f"{path}#test") == ROWS[:1]
    assert read(f"{path}#some") == ROWS[:2]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"ms_hub_url": "a/b"}, "#x: ms_hub_url 'a/b' names a dataset of ModelScope, which is not read: download it"),
        ({"om_hub_url": "a/b"}, "om_hub_url 'a/b' names a dataset of OpenMind, which is not read"),
        ({"script_url": "a"}, "script_url 'a' names a loading script, which is not read: download it"),
        ({"formatting": "alpaca"}, "#x: has no path of its rows: add a file_name"),
        ({"file_nme": "a"}, r"#x: unknown key 'file_nme': did you mean 'file_name'"),
        ({"file_name": 3}, "file_name is 3: expected text"),
        ({"file_name": "no.json"}, r"no\.json: no such file or folder"),
        ({"file_name": "a", "split": "test"}, "split is 'test', and the rows of files are all of split train: leave"),
        ({"file_name": "a", "formatting": "sharegtp"}, "formatting 'sharegtp' is not known: did you mean 'sharegpt'"),
        ({"file_name": "a", "ranking": "yes"}, "ranking is 'yes': write true or false"),
        ({"file_name": "a", "ranking": True, "columns": {"prompt": "a", "chosen": "b"}}, "columns has no rejected"),
        ({"file_name": "a", "columns": {"promt": "a"}}, "#x: columns: unknown key 'promt': did you mean 'prompt'"),
        ({"file_name": "a", "columns": ["a"]}, r"columns is \['a'\]: expected an object of names"),
        ({"file_name": "a", "columns": {"prompt": ["a"]}}, r"columns: prompt is \['a'\]: expected text"),
        ({"file_name": "a", "columns": {"response": "a"}}, "columns has no prompt, which formatting alpaca needs"),
        ({"file_name": "a", "formatting": "openai", "columns": {"system": "s"}}, "columns has no messages"),
        ({"file_name": "a", "tags": {"role": "a"}}, "#x: tags: unknown key 'role': did you mean 'role_tag'"),
        ({"file_name": "a", "num_samples": 0}, "#x: num_samples is 0: expected a number of rows, at least 1"),
        ("a", r"#x: expected an object, found 'a': write"),
    ],
)  # fmt: skip
def test_entries_that_cannot_be_meant_are_refused(tmp_path: Path, entry: Any, message: str) -> None:
    path = info(tmp_path, x=entry, y={"file_name": "a"})
    with pytest.raises(LmmsStreamError, match=message):
        read(f"{path}#x")


def test_other_files_of_that_name_are_read_as_json(tmp_path: Path) -> None:
    assert read(write(tmp_path / "dataset_info.json", orjson.dumps(ROWS))) == ROWS
    with pytest.raises(LmmsStreamError, match=r"dataset_info\.json: not valid JSON .*: correct it"):
        read(write(tmp_path / "dataset_info.json", b'{"a": {"file_name": '))


def test_a_list_names_described_datasets_and_says_nothing_of_their_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.json", orjson.dumps(ROWS))
    info(tmp_path, a={"file_name": "a.json"})
    path = write(tmp_path / "list.yaml", b"datasets: [{path: 'dataset_info.json#a', limit: 1}]")
    assert read(path) == ROWS[:1]
    write(path, b"datasets: [{path: 'dataset_info.json#a', system: x}]")
    with pytest.raises(LmmsStreamError, match=r"dataset_info\.json#a already sets how its rows are read: leave"):
        read(path)
    with pytest.raises(LmmsStreamError, match="a list of datasets is not sliced: set num_samples of its entries"):
        read(f"{tmp_path}/dataset_info.json#a@[1:]")


def v1_list(folder: Path, **entries: Any) -> Path:
    return write(folder / "v1.yaml", orjson.dumps(entries))


def test_paths_of_a_v1_yaml_file_start_from_the_working_directory_or_near_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    write(here / "data" / "rows.json", orjson.dumps(ROWS[:1]))
    write(tmp_path / "repo" / "data" / "rows.json", orjson.dumps(ROWS[1:2]))
    write(tmp_path / "repo" / "data" / "lists" / "rows.json", orjson.dumps(ROWS[2:]))
    write(tmp_path / "repo" / "data" / "all" / "test.jsonl", json_lines(ROWS[3:]))
    monkeypatch.chdir(tmp_path)
    entries = {name: {"path": path, "source": "local"} for name, path in (("far", "data/rows.json"), ("all", "all"))}
    path = v1_list(tmp_path / "repo" / "data", **entries)
    assert read(path) == [*ROWS[1:2], *ROWS[3:]]
    monkeypatch.chdir(here)
    assert read(path) == [*ROWS[:1], *ROWS[3:]]
    assert (
        read(v1_list(tmp_path / "repo" / "data" / "lists", near={"path": "rows.json", "source": "local"})) == ROWS[2:]
    )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"source": "ms_hub"}, r"v1\.yaml#x: source 'ms_hub' is not read: download the dataset, and name its files"),
        ({"converter": "alpacca"}, "#x: converter 'alpacca' is not known: did you mean 'alpaca'"),
        ({"converter": "mine"}, "convert FILES --map FILE.py:FUNCTION"),
        ({"weight": 0.5}, "#x: weight 0.5 repeats or leaves out rows at random, which is not supported: leave it"),
        ({"size": 0}, "#x: size is 0: expected a number of rows, at least 1"),
        ({"source": "local", "split": "test"}, "#x: split is 'test', and the rows of files are all of split train"),
        ({"source": "local"}, r"nowhere\.json: no such file or folder"),
        ({"path": ""}, "#x: path is ''"),
        ({"pth": "a"}, "#x: unknown key 'pth': did you mean 'path'"),
    ],
)  # fmt: skip
def test_entries_of_v1_that_cannot_be_read_are_refused(tmp_path: Path, entry: Any, message: str) -> None:
    path = v1_list(tmp_path, x={"path": "nowhere.json", **entry}, y={"path": "a"})
    with pytest.raises(LmmsStreamError, match=message):
        read(f"{path}#x")


def test_a_v1_dataset_without_a_source_is_one_of_the_hub_or_its_local_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "org" / "chats" / "test.jsonl", json_lines(ROWS))
    path = v1_list(tmp_path, x={"path": "org/chats", "split": "test", "size": 2})
    assert read(path) == ROWS[:2]
    with pytest.raises(LmmsStreamError, match=r"v1\.yaml names no dataset 'y'"):
        read(f"{path}#y")
    ours = write(tmp_path / "list.yaml", b"datasets: [{path: org/chats/test.jsonl}]")
    with pytest.raises(LmmsStreamError, match="#x: a list of sources has no names to choose from: leave out #x"):
        read(f"{ours}#x")
