"""Rows are stored more than once only if the user says so: links, copies, overlapping globs and slices are told."""

from __future__ import annotations

import base64
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.converters import repeats
from lmms_stream.converters.append import append
from lmms_stream.converters.convert import Progress, convert
from lmms_stream.converters.dry_run import dry_run
from lmms_stream.converters.part import convert_part
from lmms_stream.converters.repeats import overlap, without
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.sources.files import SAMPLED_BYTES, joint_digest
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.storage.storage import open_storage
from PIL import Image

from ..conftest import run_cli
from .media_files import image_bytes

OPTIONS: dict[str, Any] = {"num_workers": 1}


def lines(first: int, stop: int) -> bytes:
    return b"".join(json.dumps({"text": f"text {number}"}).encode() + b"\n" for number in range(first, stop))


def numbers(folder: Path) -> list[int]:
    return [int(sample["text"].split()[1]) for sample in PackedStreamingDataset(str(folder))[:]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """a.jsonl of 4 rows, its link and its hard link, a copy with another time, b.jsonl of as many bytes."""
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(lines(0, 4))
    Path("links").mkdir()
    Path("links/soft.jsonl").symlink_to("../a.jsonl")
    os.link("a.jsonl", "links/hard.jsonl")
    Path("copies").mkdir()
    Path("copies/copy.jsonl").write_bytes(lines(0, 4))
    Path("b.jsonl").write_bytes(lines(4, 8))
    Path("texts").mkdir()
    for number in range(4):
        Path(f"texts/{number}.txt").write_text(f"text {number}")
    return tmp_path


@pytest.mark.parametrize(
    ("sources", "how"),
    [
        (["a.jsonl", "a.jsonl"], "a.jsonl and a.jsonl hold the same rows (all rows of it)"),
        (["a.jsonl", "./a.jsonl"], "a.jsonl and ./a.jsonl hold the same rows (all rows of it)"),
        (["*.jsonl", "a*"], "a.jsonl and a.jsonl hold the same rows (all rows of it)"),
        (["a.jsonl@[0:3]", "a.jsonl@[2:]"], "a.jsonl@[0:3] and a.jsonl@[2:] hold the same rows (rows @[2:3])"),
        (["a.jsonl@[-2:]", "a.jsonl@[:3]"], "a.jsonl@[-2:] and a.jsonl@[:3] hold the same rows (rows @[2:3])"),
        (["a.jsonl", "links/soft.jsonl"], "a.jsonl and links/soft.jsonl hold the same rows (they lead to one file)"),
        (["a.jsonl", "links/hard.jsonl"], "a.jsonl and links/hard.jsonl hold the same rows (they are copies)"),
        (["b.jsonl", "a.jsonl", "copies"], "a.jsonl and copies/copy.jsonl hold the same rows (they are copies)"),
        (["copies/copy.jsonl@[1:3]", "a.jsonl@[2:]"], "copies/copy.jsonl@[1:3] and a.jsonl@[2:] hold the same rows"),
        (["texts/[12].txt", "texts/*.txt@[:2]"], "texts/[12].txt and texts/*.txt@[:2] hold the same rows"),
        (["texts", "texts/1.txt"], "texts and texts/1.txt hold the same rows"),
    ],
)
def test_rows_that_are_named_twice_are_told_and_stored_twice_only_when_asked(
    here: Path, sources: list[str], how: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        convert(sources, "out", **OPTIONS)
    assert str(refused.value).startswith(how)
    assert "leave one of them out, or pass --allow-repeats" in str(refused.value)
    for call in (lambda: dry_run(sources), lambda: convert_part(sources, "out", "0/2", **OPTIONS)):
        with pytest.raises(ConfigError, match="hold the same rows"):
            call()
    assert not Path("out").exists()
    said: list[str] = []
    convert(sources, "out", allow_repeats=True, progress=Progress(say=said.append), **OPTIONS)
    assert len(set(numbers(here / "out"))) < len(numbers(here / "out"))
    assert next(text for text in said if text.startswith(how)).endswith("which are stored more than once")


@pytest.mark.parametrize(
    "sources",
    [
        ["a.jsonl@[0:2]", "a.jsonl@[2:]"],
        ["a.jsonl@[:-1]", "a.jsonl@[-1:]"],
        ["a.jsonl@[:2]", "copies/copy.jsonl@[2:]"],
        ["a.jsonl", "b.jsonl"],
        ["texts/[01].txt", "texts/[23].txt"],
        ["texts@[:2]", "texts@[2:]"],
    ],
)
def test_rows_that_are_named_once_are_stored_once(here: Path, sources: list[str]) -> None:
    convert(sources, "out", **OPTIONS)
    assert sorted(numbers(here / "out")) == list(range(len(numbers(here / "out"))))


def test_local_files_of_a_dataset_that_the_hub_s_library_reads_are_the_same_rows(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", here / "cache")
    both = [["hf:copies?split=train", "copies"], ["copies/copy.jsonl", "hf:json?data_files=copies/copy.jsonl"]]
    for sources in both:
        with pytest.raises(ConfigError, match=r"hold the same rows \(they lead to one file\)"):
            convert(sources, "out", **OPTIONS)
    assert convert(["hf:copies?split=train", "b.jsonl"], "out", **OPTIONS).num_rows == 8


def test_one_file_with_other_settings_or_another_member_is_another_source(here: Path) -> None:
    Path("c.json").write_text(json.dumps({"x": [{"text": "text 0"}], "y": [{"text": "text 1"}]}))
    convert(["c.json#x", "c.json#y"], "members", **OPTIONS)
    assert numbers(here / "members") == [0, 1]
    Path("rows.jsonl").write_text(json.dumps({"one": "text 0", "two": "text 1"}) + "\n")
    entries = [{"path": "rows.jsonl", "columns": {"text": name}} for name in ("one", "two")]
    Path("list.yaml").write_text(json.dumps({"datasets": entries}))
    convert(["list.yaml"], "settings", **OPTIONS)
    assert numbers(here / "settings") == [0, 1]
    assert append(["list.yaml"], "settings", **OPTIONS).num_new_sources == 0
    Path("one.yaml").write_text(json.dumps({"datasets": entries[:1]}))
    convert(["one.yaml"], "grown", **OPTIONS)
    assert added_to("grown", "list.yaml") == (1, 1)
    assert numbers(here / "grown") == [0, 1]
    Path("rows.jsonl").write_text(json.dumps({"one": "text 2", "two": "text 3"}) + "\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl was changed since it was converted"):
        added_to("grown", "list.yaml")


def test_the_only_array_of_an_object_is_the_same_rows_with_and_without_its_name(here: Path) -> None:
    Path("c.json").write_text(json.dumps({"x": [{"text": "text 0"}], "y": "z"}))
    with pytest.raises(ConfigError, match=r"c\.json and c\.json#x hold the same rows \(they lead to one file\)"):
        convert(["c.json", "c.json#x"], "out", **OPTIONS)
    for first, then in (("c.json", "c.json#x"), ("c.json#x", "c.json")):
        convert([first], "out", overwrite=True, **OPTIONS)
        assert added_to("out", then) == (0, 1)
        shutil.copy("c.json", "copies/c.json")
        assert added_to("out", f"copies/{then}") == (0, 1)


def test_files_without_rows_are_no_copies(here: Path) -> None:
    for name in "xyz":
        (here / "parts").mkdir(exist_ok=True)
        (here / f"parts/{name}.jsonl").write_bytes(lines(0, 1) if name == "z" else b"\n\n")
    assert convert(["parts"], "out", **OPTIONS).num_rows == 1


def test_equal_rows_that_name_media_in_two_folders_are_different_rows(here: Path) -> None:
    for number in range(2):
        Path(f"media{number}").mkdir()
        Image.new("RGB", (8, 8 + number)).save(f"media{number}/a.png")
        Path(f"media{number}/rows.jsonl").write_text('{"image": "a.png", "caption": "a"}\n')
    assert convert(["media0", "media1"], "out", format="jsonl", **OPTIONS).num_rows == 2
    with pytest.raises(ConfigError, match=r"hold the same rows \(they are copies\)"):
        convert(["media0", "media1"], "rooted", format="jsonl", schema=SchemaOptions(media_root="media0"), **OPTIONS)
    convert(["media0/rows.jsonl"], "grown", **OPTIONS)
    assert added_to("grown", "media1/rows.jsonl") == (1, 0)
    shutil.copy("media0/rows.jsonl", "media0/copy.jsonl")
    assert added_to("grown", "media0/copy.jsonl") == (0, 1)


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"image": "a", "caption": "x"}, {}),
        ({"picture": "a", "caption": "x"}, {"images": "picture"}),
        ({"messages": [{"role": "user", "content": [{"type": "image", "path": "a"}]}]}, {}),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, {}),
    ],
)
@pytest.mark.parametrize("num_before", [0, 30])
def test_copies_and_links_in_another_folder_are_other_rows_if_any_row_names_media(
    row: dict[str, Any], columns: dict[str, str], num_before: int, here: Path
) -> None:
    before: dict[str, Any]
    if "messages" in row:
        row["messages"].append({"role": "assistant", "content": "x"})
        before = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}]}
    else:
        before = {**row, next(iter(row)): "data:image/png;base64," + base64.b64encode(image_bytes()).decode()}
    for number in range(3):
        Path(f"m{number}").mkdir()
        Path(f"m{number}/a").write_bytes(image_bytes())
    Path("m0/rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*[before] * num_before, row]))
    shutil.copy("m0/rows.jsonl", "m1/rows.jsonl")
    Path("m2/rows.jsonl").symlink_to("../m0/rows.jsonl")
    sources = [f"m{number}/rows.jsonl" for number in range(3)]
    schema = SchemaOptions(columns=columns)
    assert convert(sources, "out", schema=schema, **OPTIONS).num_rows == 3 * (num_before + 1)
    convert(sources[:1], "grown", schema=schema, **OPTIONS)
    assert added_to("grown", *sources, schema=schema) == (2, 1)
    assert added_to("grown", *sources, schema=schema) == (0, 3)


BASE64 = base64.b64encode(image_bytes()).decode()


@pytest.mark.parametrize(
    "media",
    [
        {"images": [BASE64]},
        {"images": [{"bytes": image_bytes(), "path": "0001"}, {"bytes": image_bytes(), "path": "a.png"}]},
        {"images": [f"data:image/png;base64,{BASE64}"], "homepage": "https://example.org/a.png"},
    ],
)
def test_copies_in_another_folder_are_the_same_rows_if_they_hold_their_media(media: dict[str, Any], here: Path) -> None:
    text = "<image>" * len(media["images"])
    row = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}], **media}
    for folder in ("m0", "m1"):
        Path(folder).mkdir()
        pq.write_table(pa.Table.from_pylist([row]), f"{folder}/rows.parquet")
    with pytest.raises(ConfigError, match=r"hold the same rows \(they are copies\)"):
        convert(["m0/rows.parquet", "m1/rows.parquet"], "out", **OPTIONS)
    convert(["m0/rows.parquet"], "grown", **OPTIONS)
    assert added_to("grown", "m1/rows.parquet") == (0, 1)


def test_duplicates_that_are_left_out_may_be_named(here: Path) -> None:
    report = convert(["a.jsonl", "a.jsonl@[:2]"], "out", dedup="exact", **OPTIONS)
    assert (report.num_rows, report.num_duplicates) == (4, 2)


def test_a_new_file_without_rows_adds_nothing(here: Path) -> None:
    convert(["*.jsonl"], "out", **OPTIONS)
    Path("c.jsonl").write_bytes(b"\n")
    assert added_to("out", "*.jsonl") == (0, 3)
    Path("d.jsonl").write_bytes(b"{")
    with pytest.raises(DataError, match=r"d\.jsonl: none of its first 1 rows can be read"):
        added_to("out", "*.jsonl")


def test_shards_of_a_dataset_and_of_its_parts_are_the_same_rows(here: Path) -> None:
    convert(["a.jsonl"], "data", samples_per_shard=2, **OPTIONS)
    append(["b.jsonl"], "data", samples_per_shard=2, **OPTIONS)
    with pytest.raises(ConfigError, match="data and data/parts/00001 hold the same rows"):
        convert(["data", "data/parts/00001"], "out", **OPTIONS)
    convert(["data@[:4]", "data/parts/00001"], "out", **OPTIONS)
    assert numbers(here / "out") == list(range(8))


def test_objects_are_told_by_their_tags(s3_folder: str, tmp_path: Path) -> None:
    store = open_storage(s3_folder)
    for name, data in {"a.jsonl": lines(0, 4), "b.jsonl": lines(4, 8), "c.jsonl": lines(0, 4)}.items():
        store.write(f"rows/{name}", data)
    with pytest.raises(ConfigError, match=r"rows/a\.jsonl and .*rows/c\.jsonl hold the same rows \(they are copies\)"):
        convert([f"{s3_folder}/rows"], str(tmp_path / "out"), **OPTIONS)
    convert([f"{s3_folder}/rows/a.jsonl"], str(tmp_path / "out"), **OPTIONS)
    said: list[str] = []
    added = append([f"{s3_folder}/rows"], str(tmp_path / "out"), progress=Progress(say=said.append), **OPTIONS)
    assert (added.num_new_sources, added.num_known_sources) == (1, 2)
    assert f"{s3_folder}/rows/c.jsonl (as {s3_folder}/rows/a.jsonl)" in said[0]
    assert numbers(tmp_path / "out") == list(range(8))


# Datasets that grow


def added_to(target: str, *sources: str, **options: Any) -> tuple[int, int]:
    report = append(list(sources), target, **options, **OPTIONS)
    return report.num_new_sources, report.num_known_sources


def test_slices_that_overlap_are_refused_with_the_rest_that_may_be_added(here: Path) -> None:
    Path("t.jsonl").write_bytes(lines(0, 9))
    convert(["t.jsonl@[0:2]"], "out", **OPTIONS)
    assert added_to("out", "t.jsonl@[2:4]") == (1, 0)
    assert added_to("out", "t.jsonl@[1:4]", "t.jsonl@[1:2]") == (0, 2)
    with pytest.raises(ConfigError) as refused:
        added_to("out", "t.jsonl@[1:6]")
    assert str(refused.value) == (
        "t.jsonl@[1:6] has rows that are already in out (@[0:2], @[2:4]): name only the other rows, t.jsonl@[4:6], or "
        "pass --allow-repeats to store rows more than once"
    )
    assert added_to("out", "t.jsonl@[7:]") == (1, 0)
    assert added_to("out", "t.jsonl@[-2:]", "t.jsonl@[-1:9]") == (0, 2)
    with pytest.raises(ConfigError, match=r"t\.jsonl is in .*: name the remaining rows as a slice, t\.jsonl@\[4:7\]$"):
        added_to("out", "t.jsonl")
    assert added_to("out", "t.jsonl@[4:7]") == (1, 0)
    assert added_to("out", "t.jsonl") == added_to("out", "t.jsonl@[:9]") == (0, 1)
    convert(["t.jsonl@[0:4]"], "slices", **OPTIONS)
    assert added_to("slices", "t.jsonl@[4:9]") == (1, 0)
    assert (
        added_to("slices", "t.jsonl") == added_to("slices", "t*.jsonl") == added_to("slices", "t.jsonl@[1:]") == (0, 1)
    )
    assert sorted(numbers(here / "out")) == list(range(9))
    assert added_to("out", "t.jsonl@[1:4]", allow_repeats=True) == (1, 0)
    assert added_to("out", "t.jsonl@[1:4]", allow_repeats=True) == (0, 1)
    assert sorted(numbers(here / "out")) == sorted([*range(9), 1, 2, 3])


@pytest.mark.parametrize("num_per_shard", [None, 1])
def test_what_a_limit_left_may_be_added_and_the_same_command_adds_nothing(
    here: Path, num_per_shard: int | None
) -> None:
    options: dict[str, Any] = {"samples_per_shard": num_per_shard}
    convert(["a.jsonl"], "out", **OPTIONS, **options)
    for name in "cd":
        Path(f"{name}.jsonl").write_bytes(lines(*((10, 16) if name == "c" else (20, 26))))
    for expected in ((3, 0), (0, 3)):
        assert added_to("out", "b.jsonl", "c.jsonl", "d.jsonl", limit=6) == expected
    with pytest.raises(ConfigError, match=r"c\.jsonl is in out in part \(@\[0:2\]\): .* as a slice, c\.jsonl@\[2:\]$"):
        added_to("out", "c.jsonl")
    assert added_to("out", "b.jsonl", "c.jsonl@[2:]", "d.jsonl") == (2, 1)
    assert added_to("out", "b.jsonl", "c.jsonl", "d.jsonl") == (0, 3)
    assert sorted(numbers(here / "out")) == [*range(8), *range(10, 16), *range(20, 26)]
    convert(["b.jsonl@[1:]"], "slice", limit=2, **OPTIONS)
    assert added_to("slice", "b.jsonl@[:1]", "b.jsonl@[3:]") == (2, 0)


def test_a_source_before_which_a_limit_ended_is_new_and_may_have_changed(here: Path) -> None:
    for target in ("out", "limited"):
        convert(["a.jsonl", "b.jsonl"], target, limit=4, **OPTIONS)
        assert added_to(target, "a.jsonl", "b.jsonl", limit=4) == (0, 2)
    assert added_to("limited", "b.jsonl", limit=4) == (1, 0)
    assert added_to("limited", "a.jsonl", "b.jsonl", limit=4) == (0, 2)
    assert added_to("limited", "b.jsonl") == (0, 1)
    assert numbers(here / "limited") == list(range(8))
    Path("b.jsonl").write_bytes(lines(4, 9))
    assert added_to("out", "a.jsonl", "b.jsonl") == (1, 1)
    assert added_to("out", "a.jsonl", "b.jsonl") == (0, 2)
    assert numbers(here / "out") == list(range(9))
    Path("b.jsonl").write_bytes(lines(4, 10))
    with pytest.raises(ConfigError, match=r"^b\.jsonl was changed since it was converted to out"):
        added_to("out", "b.jsonl")


def test_a_file_without_rows_is_new_once_it_has_some(here: Path) -> None:
    for name in "xyz":
        (here / "parts").mkdir(exist_ok=True)
        (here / f"parts/{name}.jsonl").write_bytes({"x": b"", "y": lines(0, 1), "z": b"\n\n"}[name])
    convert(["parts"], "out", **OPTIONS)
    assert added_to("out", "parts") == (0, 3)
    (here / "parts/x.jsonl").write_bytes(lines(1, 2))
    (here / "parts/new.jsonl").write_bytes(b"")
    assert added_to("out", "parts")[0] == 3
    for name, number in (("z", 2), ("new", 3)):
        (here / f"parts/{name}.jsonl").write_bytes(lines(number, number + 1))
        added_to("out", "parts")
    assert numbers(here / "out") == list(range(4))


def test_a_dry_run_of_what_is_there_says_so(here: Path) -> None:
    convert(["a.jsonl"], "out", **OPTIONS)
    with pytest.raises(ConfigError, match=r"^a\.jsonl, links/soft\.jsonl: all rows are in out already"):
        dry_run(["a.jsonl", "links/soft.jsonl"], append_to="out")


def test_links_and_copies_of_what_is_there_are_passed_over(here: Path) -> None:
    convert(["a.jsonl"], "out", **OPTIONS)
    said: list[str] = []
    append(["links", "copies"], "out", progress=Progress(say=said.append), **OPTIONS)
    assert said[0].startswith("copies/copy.jsonl (as a.jsonl)") or "copies/copy.jsonl (as a.jsonl)" in said[0]
    assert "links/hard.jsonl (as a.jsonl)" in said[0]
    assert "links/soft.jsonl (as a.jsonl)" in said[0]
    convert(["b.jsonl@[:2]"], "other", **OPTIONS)
    shutil.copy("b.jsonl", "copies/other.jsonl")
    with pytest.raises(ConfigError, match=r"copies/other\.jsonl is in .* in part .*, copies/other\.jsonl@\[2:\]$"):
        append(["copies/other.jsonl"], "other", **OPTIONS)
    assert added_to("out", "copies/copy.jsonl", allow_repeats=True) == (1, 0)
    assert numbers(here / "out") == [0, 1, 2, 3] * 2


def test_a_file_that_was_moved_is_known_and_one_that_may_be_another_is_asked_about(here: Path) -> None:
    convert(["a.jsonl"], "out", **OPTIONS)
    shutil.rmtree("links")
    Path("a.jsonl").rename("moved.jsonl")
    assert added_to("out", "moved.jsonl") == (0, 1)
    Path("moved.jsonl").unlink()
    problem = r"copies/copy\.jsonl has the size of a\.jsonl, .* which is gone or changed now, .*: leave it out, or pass"
    with pytest.raises(ConfigError, match=problem):
        added_to("out", "copies/copy.jsonl")
    assert added_to("out", "copies/copy.jsonl", allow_repeats=True) == (1, 0)


def test_files_of_equal_size_that_differ_between_what_is_sampled_are_different(here: Path) -> None:
    data = bytearray(lines(0, 60_000))
    assert len(data) > 10 * SAMPLED_BYTES
    Path("large.jsonl").write_bytes(data)
    at = data.index(b"text 9000")
    data[at : at + 9] = b"text 0009"
    Path("other.jsonl").write_bytes(data)
    report = convert(["large.jsonl", "other.jsonl"], "out", **OPTIONS)
    assert report.num_rows == 120_000


def rewritten(path: str, old: bytes, new: bytes, *, in_place: bool) -> None:
    """Write other bytes of the same size with the same modification time, in place or as a new file."""
    file = Path(path)
    before = file.stat()
    data = file.read_bytes()
    assert old in data
    if not in_place:
        file.rename(f"{path}.old")
    time.sleep(0.01)  # the clock of status changes has ticks
    with file.open("r+b" if in_place else "wb") as opened:
        opened.write(data.replace(old, new))
    if not in_place:
        Path(f"{path}.old").unlink()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("source", "file"), [("a.jsonl", "a.jsonl"), ("texts", "texts/3.txt")])
def test_a_source_with_other_bytes_of_the_same_size_and_time_is_not_taken_for_the_converted_one(
    here: Path, source: str, file: str, in_place: bool
) -> None:
    convert([source], "out", **OPTIONS)
    rewritten(file, b"text 3", b"text 7", in_place=in_place)
    for again in (convert, append):
        with pytest.raises(ConfigError, match=rf"{source} was changed since it was converted to .*out, with the same"):
            again([source], "out", **OPTIONS)
    convert([source], "out", overwrite=True, **OPTIONS)
    assert numbers(Path("out")) == [0, 1, 2, 7]


@pytest.mark.parametrize(("source", "file"), [("a.jsonl", "a.jsonl"), ("texts", "texts/3.txt")])
def test_a_source_whose_status_changed_is_compared_once(
    here: Path, source: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Sequence[Path]] = []

    def counted(files: Sequence[Path]) -> str:
        compared.append(files)
        return joint_digest(files)

    monkeypatch.setattr(repeats, "joint_digest", counted)
    convert([source], "out", **OPTIONS)
    Path(file).chmod(0o600)
    for _ in range(2):
        assert convert([source], "out", **OPTIONS).was_there
        assert added_to("out", source) == (0, 1)
    assert len(compared) == 1
    os.link(file, "another")
    rewritten(file, b"text 3", b"text 3", in_place=False)
    for _ in range(2):
        assert convert([source], "out", **OPTIONS).was_there
    assert len(compared) == 2


def test_a_dataset_of_an_earlier_release_is_compared_by_its_sample(here: Path) -> None:
    convert(["a.jsonl"], "out", **OPTIONS)
    about = Path("out/_lmms/dataset.json")
    described = json.loads(about.read_bytes())
    for name in ("status", "bytes"):
        del described["source"][0][name]
    about.write_text(json.dumps(described))
    assert convert(["a.jsonl"], "out", **OPTIONS).was_there
    rewritten("a.jsonl", b"text 3", b"text 7", in_place=True)
    with pytest.raises(ConfigError, match=r"a\.jsonl was changed since"):
        convert(["a.jsonl"], "out", **OPTIONS)


def test_the_command_line_says_it_in_one_line(here: Path) -> None:
    refused = run_cli("convert", "a.jsonl", "a.jsonl", "out", "--workers", "1", cwd=here)
    assert refused.returncode == 1
    assert "a.jsonl and a.jsonl hold the same rows (all rows of it): leave one of them out" in refused.stderr
    stored = run_cli("convert", "a.jsonl", "a.jsonl", "out", "--workers", "1", "--allow-repeats", cwd=here)
    assert stored.returncode == 0, stored.stderr
    assert numbers(here / "out") == [0, 1, 2, 3] * 2


intervals = st.tuples(st.integers(0, 12), st.none() | st.integers(0, 12))


def rows_of(interval: tuple[int, int | None]) -> set[int]:
    return set(range(interval[0], 20 if interval[1] is None else interval[1]))


@given(rows=intervals, taken=st.lists(intervals, max_size=4))
def test_what_is_left_of_rows_is_what_no_other_has(
    rows: tuple[int, int | None], taken: Sequence[tuple[int, int | None]]
) -> None:
    left = without(rows, taken)
    expected = rows_of(rows).difference(*map(rows_of, taken))
    assert {row for each in left for row in rows_of(each)} == expected
    for each in taken:
        shared = overlap(rows, each)
        assert (set() if shared is None else rows_of(shared)) == rows_of(rows) & rows_of(each)
