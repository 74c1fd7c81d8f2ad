from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.converters.rows.mapper import find_mapper
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.sources import webdataset as archives
from lmms_stream.converters.sources.table import by_index
from lmms_stream.errors import DataError, ObjectMissingError
from lmms_stream.storage.storage import open_storage

from ...strategies import examples
from ..media_files import image_bytes
from .source_rows import num_units, opened, read, read_numbered, write


def write_tar(path: Path, files: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@given(
    samples=st.lists(
        st.dictionaries(st.sampled_from(["jpg", "seg.png", "bin"]), st.binary(max_size=1500), min_size=1), min_size=1
    ),
    unit_bytes=st.integers(1, 4000),
    folder_name=st.sampled_from(["", "a.b/", "./"]),
)
@examples(60)
def test_files_of_one_name_are_a_sample(samples: list[dict[str, bytes]], unit_bytes: int, folder_name: str) -> None:
    files = [
        (f"{folder_name}{number:04d}.{extension}", data)
        for number, sample in enumerate(samples)
        for extension, data in sample.items()
    ]
    keys = [f"{folder_name.removeprefix('./')}{number:04d}" for number in range(len(samples))]
    with tempfile.TemporaryDirectory() as folder:
        path = write_tar(Path(folder) / "a.tar", files)
        wanted = [{"__key__": key} | sample for key, sample in zip(keys, samples, strict=True)]
        assert read(path, unit_bytes=unit_bytes) == wanted
        assert read(f"{path}@[-1:]", unit_bytes=unit_bytes) == wanted[-1:]


def test_json_and_text_of_a_sample_are_decoded_and_nothing_else_is(tmp_path: Path) -> None:
    pickled = b"cos\nsystem\n(S'exit 1'\ntR."
    files = [("a.JSON", b'{"x": [1]}'), ("a.txt", "é".encode()), ("a.cls", b"7"), ("a.pyd", pickled), ("a.npy", b"N")]
    path = write_tar(tmp_path / "a.tar", files)
    assert read(path) == [{"__key__": "a", "json": {"x": [1]}, "txt": "é", "cls": "7", "pyd": pickled, "npy": b"N"}]


def test_columns_may_be_nested_in_the_json_of_a_sample(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "a cat"}]
    image = image_bytes()
    files = [("a.jpg", image), ("a.json", orjson.dumps({"conversations": turns, "id": 1}))]
    (row,) = read(write_tar(tmp_path / "a.tar", files))
    mapper = find_mapper([row], SchemaOptions(columns={"messages": "json.conversations", "images": "jpg"}))
    assert (
        mapper.description
        == "sharegpt; reads json.conversations as messages, jpg as images; leaves out __key__, json.id"
    )
    sample = mapper(row, None)
    assert sample["media"] == image
    assert [message["role"] for message in orjson.loads(sample["messages"])] == ["user", "assistant"]
    with pytest.raises(DataError, match=r"no column json.talk \(messages\), found __key__, jpg, json: correct"):
        find_mapper([row], SchemaOptions(columns={"messages": "json.talk"}))


@pytest.mark.parametrize("name", ["../secret.txt", "../../secret.txt", "a/../../secret.txt", "{root}/secret.txt"])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_members_that_point_out_of_the_folder_read_and_write_no_file_there(
    tmp_path: Path, name: str, kind: bytes
) -> None:
    folder = tmp_path / "inner" / "sources"
    folder.mkdir(parents=True)
    for each in (tmp_path, tmp_path / "inner"):
        (each / "secret.txt").write_text("secret")
    path = name.format(root=tmp_path)
    with tarfile.open(folder / "a.tar", "w") as archive:
        member = tarfile.TarInfo(path if kind == tarfile.REGTYPE else "link.txt")
        member.type, member.linkname, member.size = kind, path, 8 if kind == tarfile.REGTYPE else 0
        archive.addfile(member, io.BytesIO(b"archived"))
    before = sorted(tmp_path.rglob("*"))
    found = read_numbered(folder / "a.tar")
    if kind == tarfile.REGTYPE:
        assert [row["txt"] for _, row in found] == ["archived"]
    else:
        assert "'link.txt' is not a plain file of the archive" in str(found)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "secret.txt").read_text() == (tmp_path / "inner" / "secret.txt").read_text() == "secret"


def test_members_that_make_no_sample_are_errors_of_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_SAMPLE_BYTES", 1 << 20)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:

        def add(name: str, data: bytes = b"x", **settings: object) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            for key, value in settings.items():
                setattr(member, key, value)
            archive.addfile(member, io.BytesIO(data))

        add("0.txt")
        add("folder", b"", type=tarfile.DIRTYPE)
        add("README")
        add("2.txt", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add("3.txt", b"\xff")
        add("4.json", b"{")
        add("5.a")
        add("5.A")
        add("6.bin", b"x" * (2 << 20))
        add("7.txt")
    found = read_numbered(tmp_path / "a.tar")
    errors = [
        "'README' has no extension: name it KEY.EXTENSION",
        "'2.txt' is not a plain file of the archive",
        "3.txt is not what its name says ('utf-8' codec",
        "4.json is not what its name says (",
        "sample '5' has .a more than once: give its files names of their own",
        "sample '6' is larger than 1 MiB: store its media beside",
    ]
    assert [number for number, _ in found] == list(range(1, 9))
    assert (found[0][1], found[7][1]) == ({"__key__": "0", "txt": "x"}, {"__key__": "7", "txt": "x"})
    for error, (_, values) in zip(errors, found[1:7], strict=True):
        assert error in values


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    files = [(f"{number}.bin", bytes(2000)) for number in range(20)]
    whole = write_tar(tmp_path / "a.tar", files).read_bytes()
    with pytest.raises(DataError, match=r"a.tar: ends within \d.bin: copy it again|not readable as a tar"):
        read(write(tmp_path / "a.tar", whole[:20_000]))
    header = 2560 * 3
    damaged = whole[:header] + b"x" * 512 + whole[header + 512 :]
    with pytest.raises(DataError, match=rf"a.tar: the header at byte {header} is damaged: write the archive again"):
        read(write(tmp_path / "a.tar", damaged))
    with pytest.raises(
        DataError, match=r"a.tar: more data follows the end of the archive at byte \d+, for example another"
    ):
        read(write(tmp_path / "a.tar", whole + whole))
    assert len(read(write(tmp_path / "a.tar", whole + bytes(1 << 21)))) == 20
    with pytest.raises(DataError, match=r"x: not readable as a tar \(.*\): copy it again, or write it again"):
        read(write(tmp_path / "x", b"z" * 5000), format="webdataset")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for number in range(30):
        write(tmp_path / "texts" / f"part{number % 3}" / f"{number:02d}.txt", f"text {number}\r\n".encode())
    return tmp_path / "texts"


def test_texts_of_a_folder_are_rows(texts: Path) -> None:
    rows = read(texts)
    assert [row["name"] for row in rows] == sorted(f"part{number % 3}/{number:02d}.txt" for number in range(30))
    assert rows[0] == {"text": "text 0\r\n", "name": "part0/00.txt"}
    assert read(texts, unit_bytes=20) == rows
    assert num_units(texts, unit_bytes=20) == 10
    assert num_units(texts, unit_bytes=1 << 20) == 1
    assert read_numbered(f"{texts}@[28:]") == [(29, rows[28]), (30, rows[29])]
    assert read(f"{texts}/**/*.txt") == rows
    assert [row["name"] for row in read(f"{texts}/*1/0*.txt@[1:]")] == ["part1/04.txt", "part1/07.txt"]
    lines = write(texts.parent / "lines.txt", b'{"a": 1}\n{"a": 2}')
    assert read(lines, format="jsonl") == [{"a": 1}, {"a": 2}]
    assert read(texts / "part0" / "03.txt") == [{"text": "text 3\r\n", "name": "03.txt"}]


def test_texts_may_have_any_names_where_the_format_says_so(tmp_path: Path) -> None:
    write(tmp_path / "code" / "b.py", b"\xef\xbb\xbfprint()")
    write(tmp_path / "code" / "a" / "README.md", b"# a")
    write(tmp_path / "code" / ".git" / "config", b"hidden")
    write(tmp_path / "code" / "z.bin", b"\xff")
    found = read_numbered(tmp_path / "code", format="text")
    assert found[:2] == [(1, {"text": "# a", "name": "a/README.md"}), (2, {"text": "print()", "name": "b.py"})]
    assert found[2][1] == "z.bin is not valid UTF-8 (byte 0xff at byte 1): write it as UTF-8"


def test_images_of_a_folder_are_rows_with_their_class(tmp_path: Path) -> None:
    for name in "dog/2.jpg", "cat/b.png", "cat/a.JPEG", "cat/more/c.webp", "loose.png":
        write(tmp_path / "set" / name, b"not read")
    with opened(tmp_path / "set") as ((source,), _):
        (unit,) = source.units()
        assert unit.folder == str(tmp_path / "set")
        assert unit.num_bytes == source.num_bytes == 5 * 8
        rows = [row.values or row.error for row in unit.rows()]
    assert rows[:4] == [
        {"image": "cat/a.JPEG", "label": "cat"},
        {"image": "cat/b.png", "label": "cat"},
        {"image": "cat/more/c.webp", "label": "cat"},
        {"image": "dog/2.jpg", "label": "dog"},
    ]
    assert rows[4] == "loose.png lies in no sub-folder, which names its class: move it into one"
    with pytest.raises(DataError, match=r"loose.png: a single image is not a source: name the folder of the class"):
        read(tmp_path / "set" / "loose.png")
    write(tmp_path / "set" / "README.txt", b"no row")
    with pytest.raises(
        DataError, match=r"set: .* 5 images, 1 text: pass --format images, or the glob \S+/\*\.txt"
    ) as raised:
        read(tmp_path / "set")
    assert raised.match("--format text takes files of all names for texts")
    assert read(str(tmp_path / "set/**/*.txt")) == [{"text": "no row", "name": "README.txt"}]
    write(tmp_path / "set" / "rows.jsonl", b'{"a": 1}')
    (tmp_path / "set" / "README.txt").unlink()
    assert read(tmp_path / "set") == [{"a": 1}]


def test_a_folder_that_names_a_split_is_no_class(tmp_path: Path) -> None:
    for name in "train/dog/2.jpg", "train/cat/a.JPEG", "train/loose.png", "test/cat/1.jpg":
        write(tmp_path / "set" / name, b"not read")
    found = [values for _, values in read_numbered(f"{tmp_path / 'set'}?split=train")]
    assert found[:2] == [{"image": "train/cat/a.JPEG", "label": "cat"}, {"image": "train/dog/2.jpg", "label": "dog"}]
    assert found[2] == "train/loose.png lies in no sub-folder, which names its class: move it into one"
    with pytest.raises(
        DataError, match=r"set: holds splits test \(1 files\), train \(3 files\): name one, as \S+split="
    ):
        read(tmp_path / "set")


@pytest.mark.parametrize(
    "names",
    [
        ("train-0.jsonl", "train-1.jsonl", "test-0.jsonl"),
        ("train/a.jsonl", "dev/b.jsonl"),
        ("split=train/0.jsonl", "split=dev/0.jsonl"),
    ],
)
def test_splits_of_a_folder_are_not_merged_without_a_word(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        write(tmp_path / "data" / name, b'{"text": "%s"}' % name.encode())
    write(tmp_path / "data" / "dataset_infos.json", b'{"default": {"features": {}}}')
    other = "test" if "test-0.jsonl" in names else "validation"
    with pytest.raises(
        DataError, match=rf"data: holds splits .*{other} \(1 files\).*name one, as '\S+data\?split=train', or all"
    ):
        read(tmp_path / "data")
    assert [row["text"] for row in read(f"{tmp_path / 'data'}?split=train")] == list(names[:-1])
    assert [row["text"] for row in read(f"{tmp_path / 'data'}?split={other}@[0:1]")] == [names[-1]]
    with pytest.raises(DataError, match=r"data: holds no files of split night, found .*train \(\d files\)"):
        read(f"{tmp_path / 'data'}?split=night")
    with pytest.raises(DataError, match=r"only a folder has configurations and splits: leave out \?split=train"):
        read(f"{tmp_path / 'data' / names[0]}?split=train")
    assert len(read(f"{tmp_path / 'data'}/**/*.jsonl")) == len(names)
    assert len(read(f"{tmp_path / 'data'}/**/*.jsonl?split=train")) == len(names) - 1


def test_splits_whose_names_say_more_are_splits_of_their_own(tmp_path: Path) -> None:
    for name in ("train_sft", "train_prefs", "test_sft"):
        write(tmp_path / "set/data" / f"{name}-00000-of-00001.jsonl", b'{"text": "%s"}' % name.encode())
    source = str(tmp_path / "set")
    for wanted in ("", "?split=train"):
        with pytest.raises(DataError, match=r"train_sft \(1 files\): name one, as '\S+set\?split=train_prefs', or all"):
            read(source + wanted)
    with pytest.raises(DataError, match=r"no files of split dev, found test_sft \(1 files\), .*: correct"):
        read(f"{source}?split=dev")
    assert read(f"{source}?split=train_sft") == [{"text": "train_sft"}]
    assert read(f"{source}?split=test") == [{"text": "test_sft"}]


GSM8K = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - split: train
    path: [socratic/train-*]
---
# GSM8K
"""
FILES = (
    "main/train-00000-of-00001.jsonl", "main/test-00000-of-00001.jsonl", "socratic/train-00000-of-00001.jsonl"
)  # fmt: skip


def written(folder: Path, names: Sequence[str], readme: str = "") -> str:
    """A folder of files that hold their own names."""
    for name in names:
        write(folder / name, b'{"text": "%s"}\n' % name.encode())
    if readme:
        write(folder / "README.md", readme.encode())
    return str(folder)


def texts_of(source: str) -> list[str]:
    return [row["text"] for row in read(source)]


def remedies(source: str) -> list[str]:
    """The sources that an error offers instead of this one."""
    with pytest.raises(DataError) as raised:
        read(source)
    return [word for word in re.findall(r"'([^']+)'", str(raised.value)) if "?" in word]


@pytest.mark.parametrize("readme", [GSM8K, GSM8K.replace("\n", "\r\n"), "", "---\nnot: [YAML\n---\n"])
def test_configurations_of_a_folder_are_not_merged_without_a_word(tmp_path: Path, readme: str) -> None:
    source = written(tmp_path / "gsm8k", FILES, readme)
    for asked in (source, f"{source}?split=train"):
        with pytest.raises(DataError, match=r"holds 2 configurations, main, socratic: name one, as .*, or all of them"):
            read(asked)
    assert [*map(texts_of, remedies(source))] == [[FILES[0]], [FILES[0], FILES[2]]]
    assert remedies(f"{source}?config=main") == [f"{source}?config=main&split=train"]
    one, all_of_them = remedies(f"{source}?split=train")
    assert texts_of(one) == [FILES[0]]
    assert texts_of(f"{source}?split=train&config=main@[0:1]") == [FILES[0]]
    assert texts_of(all_of_them) == [FILES[0], FILES[2]]
    assert texts_of(f"{source}?config=socratic") == [FILES[2]]
    assert texts_of(f"{source}/socratic") == [FILES[2]]
    with pytest.raises(DataError, match=r"no configuration night, found main, socratic: correct or leave out"):
        read(f"{source}?config=night")
    for other in (f"{source}/{FILES[0]}?config=main", f"{source}/**/*.jsonl?config=main"):
        with pytest.raises(DataError, match=r"only a folder has .*: leave out \?config=main"):
            read(other)


def test_configurations_and_values_of_folders_are_told_apart_in_stores(s3_folder: str) -> None:
    store = open_storage(s3_folder)
    for name in FILES:
        store.write(name.replace("/", "/lang=en/"), b'{"text": "%s"}\n' % name.encode())
    store.write("README.md", GSM8K.replace("/train", "/lang=en/train").encode())
    one, _ = remedies(f"{s3_folder}?split=train")
    assert read(one) == [{"text": FILES[0], "lang": "en"}]


def test_a_readme_says_which_files_are_of_which_split(tmp_path: Path) -> None:
    readme = """---
configs:
- {config_name: default, data_files: [{split: cot, path: data/cot-*}, {split: tir, path: "data/tir-*"}]}
- {config_name: absent, data_dir: elsewhere}
---"""
    names = ("data/cot-00000-of-00001.jsonl", "data/tir-00000-of-00001.jsonl")
    source = written(tmp_path / "math", names, readme)
    with pytest.raises(DataError, match=r"holds splits cot \(1 files\), tir \(1 files\): name one, as \S+split=cot"):
        read(source)
    assert texts_of(f"{source}?split=tir") == [names[1]]


def test_files_of_a_configuration_may_be_of_another_format(tmp_path: Path) -> None:
    readme = """---
configs:
- config_name: a(b)
  data_dir: one
- config_name: 2024
  data_files: "*.csv"
---
"""
    source = written(tmp_path / "set", ["one/a.jsonl", "one/more/b.jsonl"], readme)
    write(tmp_path / "set" / "c.csv", b"text\nc")
    assert remedies(source) == [f"{source}?config=a(b)", f"{source}?config=*"]
    assert texts_of(f"{source}?config=a(b)") == ["one/a.jsonl", "one/more/b.jsonl"]
    assert texts_of(f"{source}?config=2024") == ["c"]


@pytest.mark.parametrize(
    "names",
    [
        ("a/part-0.jsonl", "b/part-0.jsonl"),  # no splits
        ("data/train-0.jsonl", "data/train-1.jsonl"),
        ("train/a/0.jsonl", "train/b/0.jsonl"),
        ("lang=en/train.jsonl", "lang=de/train.jsonl"),
    ],
)
def test_folders_without_splits_of_their_own_are_no_configurations(tmp_path: Path, names: Sequence[str]) -> None:
    source = written(tmp_path / "set", names)
    assert texts_of(source) == sorted(names)
    assert texts_of(f"{source}?config=*") == sorted(names)
    with pytest.raises(DataError, match=r"no configuration b, found .*: correct or leave out \?config="):
        read(f"{source}?config=b")


def test_data_without_a_split_is_not_merged_with_what_is_tested_on(tmp_path: Path) -> None:
    source = written(tmp_path / "set", ["data.jsonl", "more.jsonl", "test.jsonl"])
    with pytest.raises(
        DataError, match=r"holds splits none \(2 files\), test \(1 files\): name one, as \S+split=test'"
    ):
        read(source)
    assert texts_of(f"{source}?split=test") == ["test.jsonl"]
    (tmp_path / "set/test.jsonl").rename(tmp_path / "set/train.jsonl")
    assert len(read(source)) == 3


@pytest.mark.parametrize("name", ["b.jsonl.zip", "b.parquet.aria2", "b.json.lz4", "more/b.csv.part"])
def test_files_of_rows_that_are_packed_or_not_whole_are_not_passed_over(tmp_path: Path, name: str) -> None:
    source = written(tmp_path / "set", ["a.jsonl", name, "images.zip", "a.jsonl.bak"])
    with pytest.raises(
        DataError, match=rf"holds {name}, which cannot be read directly: unpack it or complete its download, or"
    ):
        read(source)
    assert texts_of(f"{source}/*.jsonl") == ["a.jsonl"]


@pytest.mark.parametrize("extension", ["jsonl", "parquet", "csv.gz"])
def test_folders_that_name_a_value_are_a_column_of_the_rows_below_them(tmp_path: Path, extension: str) -> None:
    """The rows are those that pyarrow reads with hive partitioning."""
    for folder in ("lang=en/day=2024%2F1", "lang=de/day=__HIVE_DEFAULT_PARTITION__"):
        path = write(tmp_path / "set" / folder / f"part-0.{extension}", b"")
        if extension == "parquet":
            pq.write_table(pa.table({"text": [folder]}), path)
        else:
            write(path, b'{"text": "%s"}\n' % folder.encode() if extension == "jsonl" else gzip.compress(b"text\n1"))
    rows = read(tmp_path / "set")
    assert [(row["lang"], row["day"]) for row in rows] == [("de", None), ("en", "2024/1")]
    assert read(f"{tmp_path}/set/lang=*/*/*") == rows
    assert [(row.get("lang"), row["day"]) for row in read(f"{tmp_path}/set/lang=en")] == [(None, "2024/1")]
    if extension == "parquet":
        partitioning = pa.dataset.partitioning(pa.schema({"lang": pa.string(), "day": pa.string()}), flavor="hive")
        theirs = pa.dataset.dataset(tmp_path / "set", partitioning=partitioning, format="parquet").to_table()
        assert theirs.to_pylist() == rows
    with opened(tmp_path / "set") as (sources, _):
        (unit,) = sources[1].units()
        assert [row.values for row in by_index(unit).rows([0])] == rows[1:]


def test_a_column_of_the_file_comes_before_one_of_its_folder(tmp_path: Path) -> None:
    write(tmp_path / "set/lang=en/a.jsonl", b'{"text": "a", "lang": "de"}\n{"text": "b"}\n{')
    with opened(tmp_path / "set") as ((source,), _):
        (unit,) = source.units()
        assert [row.values and row.values["lang"] for row in unit.rows()] == ["de", "en", None]


def test_a_folder_of_texts_has_splits_only_where_all_of_them_are_of_one(tmp_path: Path) -> None:
    for name in "train/a.txt", "notes on test.txt", "b.txt":
        write(tmp_path / name, b"x")
    assert len(read(tmp_path)) == 3
    (tmp_path / "b.txt").unlink()
    with pytest.raises(DataError, match="holds splits test"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            "data/a.jsonl.zst",
            r"holds data/a\.jsonl and data/a\.jsonl\.zst, possibly the same .* twice: remove one,",
        ),
        (
            "_delta_log/00000000000000000000.json",
            r"a table whose log \(_delta_log/0+\.json\) lists .*: write the table as",
        ),
        (".hoodie/hoodie.properties", r"a table whose log \(\.hoodie/"),
    ],
)
def test_rows_that_lie_in_a_folder_twice_or_count_no_more_are_refused(tmp_path: Path, other: str, message: str) -> None:
    write(tmp_path / "set/data/a.jsonl", b'{"a": 1}')
    write(tmp_path / "set" / other, b"not read")
    with pytest.raises(DataError, match=message):
        read(tmp_path / "set")
    assert read(f"{tmp_path}/set/data/*.jsonl") == [{"a": 1}]


def test_what_datasets_made_of_rows_beside_them_is_no_data(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"a": [1, 2]})
    for name in ("set-train.arrow", "cache-0123456789abcdef.arrow", "cache-fedcba9876543210_00000_of_00001.arrow"):
        with ArrowWriter(path=str(tmp_path / name), schema=rows.data.schema) as writer:
            writer.write_table(rows.data.table)
    assert read(tmp_path) == [{"a": 1}, {"a": 2}]
    (tmp_path / "set-train.arrow").unlink()
    assert len(read(tmp_path)) == 4


def test_numbered_files_of_a_folder_are_all_there(tmp_path: Path) -> None:
    for name in "train-00000-of-00003-0ab1.jsonl", "train-00002-of-00003-9cd2.jsonl", "test-00000-of-00001.jsonl":
        write(tmp_path / "set" / name, b'{"a": 1}\n')
    with pytest.raises(DataError, match="set: holds 2 of the 3 files train-NNNNN-of-00003: download the missing"):
        read(f"{tmp_path}/set?split=train")
    assert len(read(f"{tmp_path}/set/train-*.jsonl")) == 2
    assert len(read(f"{tmp_path}/set?split=test")) == 1
    write(tmp_path / "set" / "train-00003-of-00003-0ab1.jsonl", b'{"a": 1}\n')  # some count from 1
    assert len(read(f"{tmp_path}/set?split=train")) == 3


@pytest.mark.parametrize("name", ["c4-train.{}-of-0002.jsonl", "part_{}_of_0002.jsonl", "{}-of-0002.jsonl"])
def test_files_may_be_numbered_in_several_ways(name: str, tmp_path: Path) -> None:
    write(tmp_path / name.format("0000"), b'{"a": 1}\n')
    with pytest.raises(DataError, match=f"1 of the 2 files {name.format('NNNN').removesuffix('.jsonl')}: download"):
        read(tmp_path)
    write(tmp_path / name.format("0001"), b'{"a": 1}\n')
    assert len(read(tmp_path)) == 2


@pytest.mark.parametrize(
    ("older", "both"),
    [
        ("train-00000-of-00001.jsonl", "train-NNNNN-of-00001 and train-NNNNN-of-00002"),
        ("train-00000-of-00002-0123456789abcdef.jsonl", r"\S+-0123456789abcdef.jsonl and \S+-fedcba9876543210.jsonl"),
    ],
)
def test_files_of_two_versions_of_a_dataset_are_not_read_together(older: str, both: str, tmp_path: Path) -> None:
    for name in older, *(f"train-0000{number}-of-00002-fedcba9876543210.jsonl" for number in range(2)):
        write(tmp_path / name, b'{"a": 1}\n')
    with pytest.raises(DataError, match=f"holds {both}, possibly .*: remove the older files, or name"):
        read(tmp_path)
    assert len(read(f"{tmp_path}/train-*-of-00002-fedcba9876543210.jsonl")) == 2


def test_links_are_followed_to_files_and_once_to_each_folder(texts: Path, tmp_path: Path) -> None:
    names = [row["name"] for row in read(texts)]
    (texts / "loop").symlink_to(texts)
    (texts / "part0/again").symlink_to(texts / "part2")
    (texts / "zz.txt").symlink_to(write(tmp_path / "elsewhere.txt", b"linked"))
    write(tmp_path / "other/a/b.txt", b"linked")
    (texts / ".hidden").symlink_to(tmp_path / "other")
    (texts / "zy").symlink_to(tmp_path / "other")
    write(texts / "_v1/d/e.txt", b"linked")
    (texts / "zx").symlink_to("_v1")
    rows = read(texts)
    assert [row["name"] for row in rows] == [*names, "zx/d/e.txt", "zy/a/b.txt", "zz.txt"]
    assert [row["text"] for row in rows[-3:]] == ["linked"] * 3
    assert read(f"{texts}/**/*.txt") == rows
    assert read(f"{texts}/z*/*/*.txt") == rows[-3:-1]
    (texts / "zzz.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(ObjectMissingError, match=r"zzz.txt is a link to .*nothing, which leads to no file"):
        read(texts)


def test_the_identity_of_a_folder_changes_with_its_files(texts: Path) -> None:
    def identity() -> Mapping[str, Any]:
        with opened(texts) as ((source,), _):
            return source.identity

    before = identity()
    assert before == identity()
    os.utime(texts / "part0" / "00.txt", (5, 5))
    assert before != identity()


def test_files_that_macos_puts_beside_the_files_of_a_tar_are_no_samples(tmp_path: Path) -> None:
    files = [("d/0.jpg", b"a"), ("d/0.txt", b"b"), ("1.txt", b"c")]
    beside = [(f"{name.rpartition('/')[0]}/._{name.rpartition('/')[2]}".lstrip("/"), b"\0") for name, _ in files]
    path = write_tar(tmp_path / "a.tar", [each for pair in zip(beside, files, strict=True) for each in pair])
    assert read(path) == [{"__key__": "d/0", "jpg": b"a", "txt": "b"}, {"__key__": "1", "txt": "c"}]


def test_a_sample_that_an_updated_tar_holds_twice_is_read_once(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.txt", b"old"), ("1.txt", b"b")])
    with tarfile.open(path, "a") as archive:
        archive.addfile(tarfile.TarInfo("0.txt"))
    first, second, third = read_numbered(path)
    assert (first[1], second[1]) == ({"__key__": "0", "txt": "old"}, {"__key__": "1", "txt": "b"})
    assert third == (
        3,
        "sample '0' is there before, as where an archive was updated, or its files are apart: write the archive again",
    )


def test_texts_and_json_in_a_tar_lose_their_byte_order_mark(tmp_path: Path) -> None:
    files = [("0.txt", "caf\u00e9\r\n"), ("0.caption", "a cat"), ("0.json", '{"w": 1}'), ("0.cls", "3")]
    path = write_tar(tmp_path / "a.tar", [(name, b"\xef\xbb\xbf" + text.encode()) for name, text in files])
    assert read(path) == [{"__key__": "0", "txt": "caf\u00e9\r\n", "caption": "a cat", "json": {"w": 1}, "cls": "3"}]
