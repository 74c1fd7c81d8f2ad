from __future__ import annotations

import bz2
import gzip
import lzma
import sys
import tempfile
from pathlib import Path

import orjson
import pyarrow
import pyarrow.parquet
import pytest
from lmms_stream.converters.sources.specs import glob_base, glob_pattern, parse_spec
from lmms_stream.errors import DataError, LmmsStreamError, ObjectMissingError, StorageError
from lmms_stream.storage.storage import open_storage

from ...conftest import run_command
from .source_rows import MESSY, json_lines, numbered_rows, opened, read, read_numbered, write
from .test_folders import write_tar
from .test_tables import TABLE, write_file, write_parquet


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten rows in each of three files, and files that are no data."""
    for number in range(3):
        write(tmp_path / "data" / f"part{number}" / "a.jsonl", json_lines(MESSY[number * 10 : number * 10 + 10]))
    write(tmp_path / "data" / "README.md", b"# what it is")
    write(tmp_path / "data" / ".cache" / "b.parquet", b"hidden")
    write(tmp_path / "data" / "_SUCCESS", b"")
    return tmp_path / "data"


def names(*specs: str | Path, format: str | None = None) -> list[str]:
    with opened(*specs, format=format) as (sources, _):
        return [source.name for source in sources]


def test_folders_and_globs_are_read_in_the_order_of_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(folder) == read(f"{folder}/") == read(f"{folder}/**/*.jsonl") == read(f"{folder}/part?/*") == MESSY[:30]
    assert names(folder) == [f"{folder}/part{number}/a.jsonl" for number in range(3)]
    assert read(f"{folder}/part[!1]/a.jsonl") == MESSY[:10] + MESSY[20:30]
    assert read(f"{folder}/part2/a.jsonl", folder / "part0") == MESSY[20:30] + MESSY[:10]
    monkeypatch.chdir(folder)
    assert names("part1") == names("part1/*") == ["part1/a.jsonl"]
    assert names("*/a.jsonl") == ["part0/a.jsonl", "part1/a.jsonl", "part2/a.jsonl"]
    assert names("part0/a.jsonl", f"file://{folder}/part1/a.jsonl") == ["part0/a.jsonl", f"{folder}/part1/a.jsonl"]


def test_a_name_with_special_characters_is_taken_as_it_is(tmp_path: Path) -> None:
    for name in "a*.jsonl", "b@[1:2].jsonl", "c#d.jsonl", "e@[0:1]", "f?x=1.jsonl":
        path = write(tmp_path / name, json_lines(MESSY[:3]))
        assert read(path) == MESSY[:3]
        assert read_numbered(f"{path}@[-1:]") == [(3, MESSY[2])]


def test_numbers_of_a_slice_are_lines_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"a": 1}\n\n{"a": 3}\n{"a": 4}\n')
    assert read_numbered(f"{path}@[1:3]") == [(3, {"a": 3})]
    assert read_numbered(f"{path}@[:-1]") == [(1, {"a": 1}), (3, {"a": 3})]
    with opened(f"{path}@[-2:]") as ((source,), _):
        assert source.first_row == 2
    with pytest.raises(DataError, match=r"a.jsonl holds no rows from 2 to 2: leave it out, or correct the slice"):
        read(f"{path}@[2:2]")


def test_slices_and_members_are_of_one_source(folder: Path) -> None:
    for spec in f"{folder}@[1:]", f"{folder}/*/a.jsonl@[1:]":
        with pytest.raises(DataError, match=r"names 3 files, a slice and a #KEY are of one: write one spec for each"):
            read(spec)
    assert read(f"{folder / 'part0'}@[8:]") == MESSY[8:10]
    with pytest.raises(DataError, match=r"'?@\[1\]'? is no slice of rows: write @\[START:STOP\]"):
        read(f"{folder}/part0/a.jsonl@[1]")
    with pytest.raises(DataError, match=r"a.jsonl#x: jsonl has no members to choose from: leave out #x"):
        read(f"{folder}/part0/a.jsonl#x")


def test_a_mixture_of_formats_is_refused_unless_one_is_chosen(folder: Path) -> None:
    write_parquet(folder / "z.parquet", TABLE)
    write(folder / "x.csv.gz", gzip.compress(b"a\n1\n"))
    with pytest.raises(DataError, match=r"holds several formats: 1 csv, 3 jsonl, 1 parquet: name one by --format"):
        read(folder)
    assert read(folder, format="parquet") == MESSY
    assert read(folder, format="csv") == [{"a": "1"}]
    assert read(folder, format="jsonl") == MESSY[:30]
    with pytest.raises(DataError, match=r"no file in it has a name like arrow: 1 csv, 3 jsonl, 1 parquet: name each"):
        read(folder, format="arrow")


def test_the_format_is_found_by_content_where_no_extension_says_it(tmp_path: Path) -> None:
    def files() -> dict[str, bytes]:
        return {
            "jsonl": json_lines(MESSY),
            "one": json_lines(MESSY[:1]),
            "json": b"\xef\xbb\xbf \n" + orjson.dumps(MESSY, option=orjson.OPT_INDENT_2),
            "member": orjson.dumps({"rows": MESSY}, option=orjson.OPT_INDENT_2),
            "jsonl-gz": gzip.compress(json_lines(MESSY)),
            "parquet": write_parquet(tmp_path / "x", TABLE).read_bytes(),
            "arrow": write_file(tmp_path / "x", TABLE).read_bytes(),
        }

    for name, data in files().items():
        assert read(write(tmp_path / name, data)) == (MESSY[:1] if name == "one" else MESSY), name
    assert read(write_tar(tmp_path / "tar", [("a.txt", b"x")])) == [{"__key__": "a", "txt": "x"}]
    for data, what in (b"a,b\n1,2\n", "other text"), (b"\x00\x01", "binary data of an unknown kind"):
        with pytest.raises(DataError, match=rf"of unknown kind \({what}\): pass --format, one of json, jsonl, csv"):
            read(write(tmp_path / "unknown", data))
    assert read(write(tmp_path / "unknown", b"a,b\n1,2\n"), format="csv") == [{"a": "1", "b": "2"}]


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        ("a.json", b"PAR1 and so on", r"\.json says json, its content is parquet: rename it, or pass --format parquet"),
        ("a.jsonl", orjson.dumps(MESSY), r"\.jsonl says jsonl, its content is json: rename it, or pass --format json"),
        ("a.jsonl", b"PAR1 and so on", r"says jsonl, its content is parquet: .*--format parquet"),
        ("a.parquet", json_lines(MESSY), r"\.parquet says parquet, its content is jsonl"),
        ("a.csv", json_lines(MESSY), r"\.csv says csv, its content is jsonl"),
        (
            "a.json",
            b"<html></html>",
            r"\.json says json, its content is other text: .*--format csv, tsv, lines or text",
        ),
        ("a.arrow", b'{"a": 1}', r"says arrow, its content is a JSON object: .*--format json or jsonl"),
        ("a.jsonl.gz", json_lines(MESSY), r"\.jsonl\.gz says jsonl in gzip, its content is not compressed: rename it"),
        ("b.x.jsonl", gzip.compress(json_lines(MESSY)), r"\.jsonl says jsonl, its content is gzip: .*--format jsonl"),
    ],
)
def test_an_extension_that_contradicts_the_content_is_refused(
    tmp_path: Path, name: str, data: bytes, error: str
) -> None:
    with pytest.raises(DataError, match=error):
        read(write(tmp_path / name, data))


def test_json_lines_that_are_named_json_are_read(tmp_path: Path) -> None:
    assert read(write(tmp_path / "data" / "a.json", json_lines(MESSY))) == read(tmp_path / "data") == MESSY
    assert read(write(tmp_path / "a.json.gz", gzip.compress(json_lines(MESSY)))) == MESSY


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_the_format_that_is_insisted_on_is_read(tmp_path: Path, kind: str) -> None:
    data = {"json": orjson.dumps(MESSY), "jsonl": json_lines(MESSY)}[kind]
    other = {"json": "jsonl", "jsonl": "json"}[kind]
    assert read(write(tmp_path / "data" / f"a.{other}", data), format=kind) == MESSY
    assert read(tmp_path / "data", format=kind) == MESSY
    assert read(write(tmp_path / f"a.{other}.zst", pyarrow.compress(data, codec="zstd", asbytes=True)), format=kind)


@pytest.mark.parametrize(
    ("spec", "kind", "error"),
    [
        ("nowhere.jsonl", ObjectMissingError, "nowhere.jsonl: no such file or folder: check the path"),
        ("*.nothing", ObjectMissingError, r"\*.nothing: no file matches: check the pattern and the path"),
        ("empty.jsonl", DataError, r"empty.jsonl is empty \(0 bytes\): leave it out, or write it again"),
        ("blank.jsonl", DataError, "blank.jsonl holds no rows: leave it out, or write it again"),
        ("blank.jsonl.gz", DataError, "blank.jsonl.gz holds no rows"),
        ("utf16.jsonl", DataError, "utf16.jsonl is text in UTF-16: write it as UTF-8"),
        ("none", DataError, r"none: holds no data files \(1 others\): name a folder of data, or pass --format"),
        ("a.tar.gz", DataError, "webdataset is not read from gzip data: decompress it first"),
        ("", DataError, "'' names no file, folder or dataset: name one"),
        ("**x/*.jsonl", DataError, r"write \*\* between slashes, as in \*\*/\*.jsonl"),
    ],
)
def test_what_holds_nothing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, kind: type[LmmsStreamError], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "empty.jsonl", b"")
    write(tmp_path / "blank.jsonl", b" \n\r\n" * (1 << 19))
    write(tmp_path / "blank.jsonl.gz", gzip.compress(b"\n"))
    write(tmp_path / "utf16.jsonl", '{"a": 1}'.encode("utf-16"))
    write(tmp_path / "none" / "README.md", b"x")
    write(tmp_path / "a.tar.gz", gzip.compress(write_tar(tmp_path / "a.tar", [("a.txt", b"x")]).read_bytes()))
    with pytest.raises(kind, match=error):
        read(spec)


def test_an_unknown_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unknown format 'xml': expected one of json, jsonl, csv"):
        read(tmp_path, format="xml")


OPEN_AS_NOBODY = """
import os, sys
from pathlib import Path
from lmms_stream.converters.sources.sources import open_sources
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    open_sources([sys.argv[1]], scratch=Path("/nowhere"))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("locked", ["a.jsonl", "sub", "."])
def test_what_may_not_be_read_is_named(locked: str) -> None:
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)
        folder = Path(parent) / "data"
        write(folder / "a.jsonl", json_lines(MESSY))
        write(folder / "sub" / "b.jsonl", json_lines(MESSY))
        (folder / locked).chmod(0)
        try:
            spec = folder if locked == "sub" else folder / "a.jsonl"
            result = run_command(sys.executable, "-c", OPEN_AS_NOBODY, str(spec))
        finally:
            (folder / locked).chmod(0o755)
    assert result.stdout.startswith(f"StorageError {folder}"), result
    assert "Permission denied" in result.stdout
    assert "check the path and its rights" in result.stdout


def test_a_file_that_goes_away_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(json_lines(MESSY)))
    with opened(path) as ((source,), _):
        path.unlink()
        with pytest.raises(StorageError, match=r"a.jsonl.gz: No such file or directory"):
            list(source.units())


def test_a_list_of_lmms_engine_names_sources_with_their_media_folders(tmp_path: Path) -> None:
    write(tmp_path / "lists" / "a.json", json_lines(MESSY))
    write(tmp_path / "lists" / "b.json", orjson.dumps(MESSY[:2]))
    write_parquet(tmp_path / "c.parquet", TABLE)
    entries = (
        "datasets:\n- {path: a.json, data_folder: images, data_type: jsonl}\n"
        "- path: 'b.json@[1:]'\n  data_folder: ''\n"
        "- {path: ../*.parquet, data_folder: 's3://bucket/images'}\n"
        f"- {{path: {tmp_path}/c.parquet, data_type: parquet}}\n"
    )
    path = write(tmp_path / "lists" / "all.yaml", entries.encode())
    with opened(path) as (sources, _):
        units = [list(source.units()) for source in sources]
        folders = [unit.folder for (unit,) in units]
        lists = tmp_path / "lists"
        assert folders == [str(lists / "images"), f"{lists}", "s3://bucket/images", f"{tmp_path}"]
        assert [source.name for source in sources][:2] == [
            str(tmp_path / "lists" / name) for name in ("a.json", "b.json")
        ]
        rows = [[row.values for row in unit.rows()] for (unit,) in units]
    assert rows == [MESSY, MESSY[1:2], MESSY, MESSY]
    assert len(read(path, format="yaml")) == 301


def test_a_list_names_hub_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.Dataset.from_list(MESSY).save_to_disk(tmp_path / "saved")
    write(tmp_path / "set" / "train.jsonl", json_lines(MESSY[:5]))
    path = write(
        tmp_path / "all.yaml",
        b"datasets:\n- {path: saved, data_type: arrow}\n- {path: set, data_type: hf_dataset}\n"
        b"- {path: saved, data_type: hf_dataset}\n- {path: 'hf:set?split=train'}\n",
    )
    assert read(path) == MESSY + MESSY[:5] + MESSY + MESSY[:5]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("- a", "expected a list `datasets` of entries with a path each"),
        ("datasets: []", "expected a list `datasets`"),
        ("datasets: [{path: [}", "not valid YAML"),
        ("datasets: [{data_type: json}]", r"entry 1 of datasets: expected a mapping with a path, found \{'data_type'"),
        ("datasets: [{path: a, folder: b}]", "entry 1 of datasets: unknown key 'folder': did you mean 'data_folder'"),
        ("datasets: [{path: a, data_type: 3}]", "data_type is 3: expected text"),
        ("datasets: [{path: a, data_type: xml}]", "data_type 'xml' of .*/a: expected one of json"),
        ("datasets: [{path: b.yaml}]", "is a list itself: name the sources of it here"),
        ("datasets: [{path: b, data_type: yaml}]", "is a list itself"),
        ("datasets: [{path: nowhere.json}]", "nowhere.json: no such file or folder"),
    ],
)
def test_a_list_that_is_unclear_is_refused(tmp_path: Path, content: str, error: str) -> None:
    with pytest.raises(LmmsStreamError, match=error):
        read(write(tmp_path / "all.yaml", content.encode()))


def test_parts_of_a_spec_are_told_apart() -> None:
    spec = parse_spec("s3://bucket/a.json#rows@[5:-1]")
    assert (spec.path, spec.key, spec.rows) == ("s3://bucket/a.json", "rows", slice(5, -1))
    assert spec.is_remote
    assert parse_spec("hf:a/b?split=train[:5%]@[1:]").path == "hf:a/b?split=train[:5%]"
    assert parse_spec("a", format="hf_dataset").path == "hf:a"
    assert glob_base("*.jsonl") == ("", "*.jsonl")
    assert glob_base("/data/x*/y") == ("/data", "x*/y")
    for pattern, name, fits in [
        ("*.jsonl", "a.jsonl", True),
        ("*.jsonl", "a/b.jsonl", False),
        ("**/b.jsonl", "b.jsonl", True),
        ("**/b.jsonl", "a/c/b.jsonl", True),
        ("[!ab]?.c", "xy.c", True),
        ("[!ab]?.c", "ay.c", False),
        ("[a-c]+.(x)", "b+.(x)", True),
    ]:
        assert bool(glob_pattern(pattern).fullmatch(name)) == fits, (pattern, name)


@pytest.fixture
def bucket(s3_folder: str, folder: Path) -> str:
    """The folder's files below a prefix, and one of each other kind."""
    store = open_storage(s3_folder)
    for path in sorted(folder.rglob("*.jsonl")):
        store.upload(path, f"chats/{path.relative_to(folder)}")
    store.write("chats/README.md", b"x")
    store.write("a.json", orjson.dumps({"rows": MESSY}))
    store.upload(write_parquet(folder / "x", TABLE), "kinds/a.parquet")
    for name in "cat/1.png", "dog/2.png":
        store.write(f"images/{name}", b"x")
    for number in range(3):
        store.write(f"texts/{number}.txt", f"text {number}".encode())
    return s3_folder


def test_objects_are_read_as_files_are(bucket: str) -> None:
    assert read(f"{bucket}/chats") == read(f"{bucket}/chats/") == read(f"{bucket}/chats/*/*.jsonl") == MESSY[:30]
    assert read(f"{bucket}/chats/**/a.jsonl", unit_bytes=100) == MESSY[:30]
    assert names(f"{bucket}/chats") == [f"{bucket}/chats/part{number}/a.jsonl" for number in range(3)]
    assert read_numbered(f"{bucket}/a.json#rows@[-2:]") == [(99, MESSY[98]), (100, MESSY[99])]
    assert read_numbered(f"{bucket}/chats/part1/a.jsonl@[8:]") == [(9, MESSY[18]), (10, MESSY[19])]
    assert read(f"{bucket}/kinds/a.parquet") == MESSY
    assert read(f"{bucket}/texts") == [{"text": f"text {number}", "name": f"{number}.txt"} for number in range(3)]
    with opened(f"{bucket}/images") as ((source,), scratch):
        (unit,) = source.units()
        assert unit.folder == f"{bucket}/images"
        assert [row.values for row in unit.rows()] == [
            {"image": "cat/1.png", "label": "cat"},
            {"image": "dog/2.png", "label": "dog"},
        ]
        assert not list(scratch.iterdir())


def test_compressed_objects_and_such_in_other_encodings_are_read(bucket: str, tmp_path: Path) -> None:
    store, data = open_storage(bucket), json_lines(MESSY)
    store.write("packed/a.jsonl.bz2", bz2.compress(data))
    store.write("packed/b.jsonl.xz", lzma.compress(data))
    store.write("packed/cut.json.xz", lzma.compress(data)[:-40])
    store.write("packed/c.tsv", "text|b\nnäh|1\n".encode("latin-1"))
    assert read(f"{bucket}/packed/*.jsonl.*") == MESSY * 2
    with pytest.raises(
        DataError, match=r"packed/cut\.json\.xz: its xz data is damaged or breaks off .*: copy it again"
    ):
        read(f"{bucket}/packed/cut.json.xz")
    csv = "{delimiter: '|', encoding: latin-1}"
    listed = write(tmp_path / "list.yaml", f"datasets: [{{path: '{bucket}/packed/c.tsv', csv: {csv}}}]".encode())
    assert read(listed) == [{"text": "näh", "b": "1"}]


@pytest.mark.parametrize("is_fetched", [True, False])
def test_an_object_is_fetched_at_its_turn_if_at_all_and_gone_at_the_close(is_fetched: bool, bucket: str) -> None:
    """JSON arrays are fetched whole, JSON lines are read in ranges where they lie."""
    store, folder, suffix = open_storage(bucket), f"{bucket}/more", "json" if is_fetched else "jsonl"
    for number in range(3):
        rows = MESSY[number * 10 : number * 10 + 10]
        data = orjson.dumps(rows) if is_fetched else json_lines(rows) + b"\n" * (1 << 20)
        store.write(f"more/part{number}/a.{suffix}", data)
    with opened(folder) as (sources, scratch):
        identities = [dict(source.identity) for source in sources]
        assert len({identity["tag"] for identity in identities}) == 3
        for source, identity in zip(sources, identities, strict=True):
            assert not list(scratch.iterdir())
            assert (source.fetch is not None) == is_fetched
            units = list(source.units())
            paths = list(scratch.rglob("object"))
            assert [path.stat().st_size for path in paths] == ([identity["size"]] if is_fetched else [])
            assert identity["size"] == source.num_bytes == sum(unit.num_bytes for unit in units)
            source.close()
        store.write(f"more/part0/a.{suffix}", b'[{"a": 1}]' if is_fetched else b'{"a": 1}')
        with opened(folder) as (again, _):
            assert [dict(source.identity) == before for source, before in zip(again, identities, strict=True)] == [
                False, True, True,
            ]  # fmt: skip
        with pytest.raises(DataError, match=r"a.jsonl? was changed during reading: start again after all writes"):
            _ = [row for unit in sources[0].units() for row in unit.rows()]


def test_text_without_quotes_and_parquet_of_a_store_are_read_in_ranges(bucket: str, tmp_path: Path) -> None:
    store = open_storage(bucket)
    data = b"a\tb\n" + b"".join(f"{number}\t{'x' * number}\n".encode() for number in range(100))
    for name in "a.tsv", "b.csv":
        store.write(f"delimited/{name}", data.replace(b"\t", b"," if name == "b.csv" else b"\t"))
    rows = [{"a": str(number), "b": "x" * number} for number in range(100)]
    for name, quote, is_fetched in (
        ("a.tsv", None, False),
        ("a.tsv", '"', True),
        ("b.csv", None, True),
        ("b.csv", "", False),
    ):
        with opened(f"{bucket}/delimited/{name}", quote=quote, unit_bytes=500) as ((source,), scratch):
            assert (source.fetch is not None) == is_fetched
            assert [row.values for _, row in numbered_rows(source)] == rows
            assert bool(list(scratch.iterdir())) == is_fetched
    with opened(f"{bucket}/kinds/a.parquet", unit_bytes=500) as ((source,), scratch):
        assert source.fetch is None
        assert len(list(source.units())) > 2
        assert not list(scratch.iterdir())


def test_objects_that_are_not_there_or_not_what_they_say_are_named(bucket: str) -> None:
    with pytest.raises(ObjectMissingError, match=r"nothing.jsonl does not exist: check the URL"):
        read(f"{bucket}/nothing.jsonl")
    with pytest.raises(ObjectMissingError, match=r"nothing does not exist: check the URL"):
        read(f"{bucket}/nothing")
    with pytest.raises(ObjectMissingError, match=r"\*.csv: no file matches: check the pattern and the path"):
        read(f"{bucket}/*.csv")
    open_storage(bucket).write("all.yaml", b"datasets: [{path: a.json}]")
    open_storage(bucket).write("dataset_info.json", b'{"a": {"file_name": "a.json"}}')
    named = (f"{bucket}/all.yaml", None), (f"{bucket}/a.json", "yaml"), (f"{bucket}/dataset_info.json#a", None)
    for spec, format in named:
        with pytest.raises(DataError, match=r"a list of sources is read from a file of this machine: download it"):
            read(spec, format=format)
    with pytest.raises(StorageError, match=r"bucket 'no-such-bucket' does not exist: create it or correct the URL"):
        read("s3://no-such-bucket/*.jsonl")
    store = open_storage(bucket)
    store.write("wrong/a.json", b"PAR1 and so on")
    with pytest.raises(DataError, match=r"s3://.*a.json: its extension .json says json, its content is parquet"):
        read(f"{bucket}/wrong")
    store.write("wrong/b.jsonl", b"")
    with pytest.raises(DataError, match=r"b.jsonl is empty \(0 bytes\)"):
        read(f"{bucket}/wrong/b.jsonl")
    with pytest.raises(DataError, match=r"holds several formats: 1 json, 1 jsonl"):
        read(f"{bucket}/wrong")


def test_names_of_objects_do_not_lead_out_of_the_scratch_folder(s3_folder: str) -> None:
    open_storage(s3_folder).write("x/../../../y.txt", b"x")
    with pytest.raises(DataError, match=r"object 'x/../../../y.txt' would be outside of it: rename it"):
        read(f"{s3_folder}/")


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_stores_list_their_objects(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    store = open_storage(tmp_path / "store" if kind == "local" else request.getfixturevalue("s3_folder"))
    assert store.list_objects("") == []
    for key in "b/2", "b/1", "b2", "a":
        store.write(key, key.encode())
    assert [(entry.key, entry.num_bytes) for entry in store.list_objects("")] == [
        ("a", 1), ("b/1", 3), ("b/2", 3), ("b2", 2),
    ]  # fmt: skip
    assert [entry.key for entry in store.list_objects("b")] == ["b/1", "b/2", "b2"]
    assert [entry.key for entry in store.list_objects("b/")] == ["b/1", "b/2"]
    assert store.list_objects("c/d") == []
    assert store.stat("b/1") == store.list_objects("b/1")[0]
    before = store.stat("a")
    store.write("a", b"other")
    assert store.stat("a").tag != before.tag
    with pytest.raises(ObjectMissingError, match="absent does not exist"):
        store.stat("absent")


def test_a_store_that_cannot_be_listed_is_named() -> None:
    with pytest.raises(StorageError, match=r"alipan:///x/: .*: install what MosaicML Streaming needs for this kind"):
        read("alipan:///x/*.jsonl")
