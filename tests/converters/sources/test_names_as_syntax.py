"""Legal names of files and objects that also mean something in what is typed: `#`, `@[`, `*`, `?`, `[`, `%`, `//`, …"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.doors.relax.rows import RowsOfFile, parse_paths
from lmms_stream.errors import DataError, ObjectMissingError, StorageError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.storage.storage import open_storage

from ...conftest import prefix_of
from ...proxy import FaultProxy, Rule
from ...rounds import LONG
from .source_rows import json_lines, opened, read, read_numbered, write

# Names of files without their extension; those at the end have no extension at all.
NAMES = (
    "a#b", "c@[0:1]", "d*", "e?f", "g[h]", "i{j}", "k%20l", "m n", "o::p", "q!", "r,s", "t=u", "w&x", "y\\z", "ä日🦊",
    "a?split=train", "b#c?d*e[f]@[1:]g", "~h", "-i", "j'k\"l", "$m", "n;o|p", "q+r",
)  # fmt: skip
BARE = ("bare#b", "bare@[0:1]", "bare?split=train", "bare*", "bare[0]")
STORED_ONLY = ("/a", "b//c", "x" * 250)  # names of objects that no file of this machine has, or hardly


def rows_of(name: str) -> list[dict[str, str]]:
    return [{"name": name, "row": f"{number}"} for number in range(3)]


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder or a prefix, whose own name means something, too."""
    if request.param == "folder":
        return str(tmp_path / "data#1@[2:3]*?[4]")
    return f"{request.getfixturevalue('s3')}/{prefix_of(request)}/data#1@[2:3]*?[4]"


def filled(place: str, names: Sequence[str], *, extension: str = ".jsonl") -> None:
    store = open_storage(place)
    for name in names:
        store.write(f"{name}{extension}", json_lines(rows_of(name)))


def of_syntax(place: str, names: Sequence[str]) -> list[str]:
    """Names for which a source is opened again: all of files, and in short rounds of a store those of its syntax."""
    return [name for name in names if LONG or "://" not in place or re.search(r"[#@*?\[%/]", name)]


def names_of(place: str) -> Sequence[str]:
    return (*NAMES, *STORED_ONLY) if "://" in place else NAMES


def test_each_is_a_source_by_its_name_and_has_slices(place: str) -> None:
    names = names_of(place)
    filled(place, names)
    filled(place, BARE, extension="")
    for name in (*(f"{name}.jsonl" for name in names), *BARE):
        rows = rows_of(name.removesuffix(".jsonl"))
        assert read(f"{place}/{name}") == rows, name
        if of_syntax(place, [name]):
            assert read_numbered(f"{place}/{name}@[-1:]") == [(3, rows[2])], name
        if "://" not in place:
            assert read(Path(place, name).as_uri()) == rows, name


def test_a_folder_and_a_glob_give_all_of_them(place: str) -> None:
    names = names_of(place)
    filled(place, names)
    expected = [row for name in sorted(names, key=lambda name: f"{name}.jsonl") for row in rows_of(name)]
    assert read(place) == read(f"{place}/") == read(f"{place}/**/*.jsonl") == expected
    assert read(f"{place}/*[[]h]*") == rows_of("g[h]")
    assert read(f"{place}/d[*].jsonl", f"{place}/e[?]*") == rows_of("d*") + rows_of("e?f")
    assert read(f"{place}/a[#]*") == rows_of("a#b")
    assert read(f"{place}/?[@]*[[]*") == rows_of("c@[0:1]")
    with opened(place) as (sources, _):
        assert {source.name for source in sources} == {f"{place}/{name}.jsonl" for name in names}


def test_what_is_fetched_whole_and_members_of_objects_are_found(place: str) -> None:
    store = open_storage(place)
    for name in (*NAMES, *(STORED_ONLY if "://" in place else ())):
        store.write(f"{name}.json", orjson.dumps({"rows#1": rows_of(name)}))
    for name in of_syntax(place, NAMES):
        assert read(f"{place}/{name}.json") == rows_of(name), name
    assert len(read(place)) == 3 * len(names_of(place))
    assert read_numbered(f"{place}/a#b.json@[1:2]") == [(2, rows_of("a#b")[1])]
    store.write("c#d.json", orjson.dumps({"one": rows_of("one"), "two": rows_of("two")}))
    assert read(f"{place}/c#d.json#two") == rows_of("two")
    assert read_numbered(f"{place}/c#d.json#two@[1:2]") == [(2, rows_of("two")[1])]


def test_texts_and_datasets_below_such_names_are_read(place: str, tmp_path: Path) -> None:
    texts, store = f"{place}/texts #1", open_storage(f"{place}/texts #1")
    for name in NAMES:
        store.write(f"{name}.txt", name.encode())
    assert [row["text"] for row in read(texts)] == sorted(NAMES, key=lambda name: f"{name}.txt")
    assert [row["text"] for row in read(f"{place}/texts #1/*.txt@[:2]")] == [row["text"] for row in read(texts)][:2]
    dataset = f"{place}/chats?split=train"
    convert([texts], dataset, kind="text", num_workers=1)
    convert([f"{dataset}@[1:]"], str(tmp_path / "out"), num_workers=1)
    expected = [sample["text"] for sample in PackedStreamingDataset(str(tmp_path / "out"))[:]]
    assert expected == sorted(NAMES, key=lambda name: f"{name}.txt")[1:]


def test_rows_of_such_sources_are_named_rejected_dropped_and_appended(place: str, tmp_path: Path) -> None:
    store = open_storage(place)
    for name in NAMES:
        store.write(
            f"{name}.jsonl", json_lines([{"text": f"1 of {name}"}, {"text": ["bad"]}, {"text": f"3 of {name}"}])
        )
    drop = tmp_path / "drop.txt"
    drop.write_text("".join(f"{place}/{name}.jsonl:3\n" for name in NAMES[:5]))
    out = tmp_path / "out"
    report = convert([place], str(out), on_error="skip", num_workers=1, drop=str(drop))
    assert (report.num_rows, report.num_rejected, report.num_dropped) == (2 * len(NAMES) - 5, len(NAMES), 5)
    rejects = [json.loads(line) for line in (out / "_lmms" / "rejects.jsonl").read_text().splitlines()]
    assert {(each["source"], each["row"]) for each in rejects} == {(f"{place}/{name}.jsonl", 2) for name in NAMES}


def test_names_without_such_an_object_mean_what_they_did(place: str) -> None:
    filled(place, ["a", "b"])
    assert read_numbered(f"{place}/a.jsonl@[1:2]") == [(2, rows_of("a")[1])]
    assert read(f"{place}/[a-b].jsonl") == read(f"{place}/?.jsonl") == rows_of("a") + rows_of("b")
    with pytest.raises(DataError, match=r"a\.jsonl#x: jsonl has no members to choose from: leave out #x"):
        read(f"{place}/a.jsonl#x")
    with pytest.raises(ObjectMissingError, match=r"c\.jsonl.*, nor anything called '.*/c\.jsonl@\[0:2\]': .*check the"):
        read(f"{place}/c.jsonl@[0:2]")
    with pytest.raises(ObjectMissingError, match=r"/x\*: no file matches: check the pattern and the path \(\[\*\], \["):
        read(f"{place}/x*")


def test_a_store_that_refuses_to_list_has_slices_of_its_objects_and_members(
    s3_folder: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(s3_folder, ["a"])
    open_storage(s3_folder).write("b.json", orjson.dumps({"one": rows_of("one"), "two": rows_of("two")}))
    proxy.set_rules(Rule(path="^/lmms-stream-demo/?$", status=403))
    monkeypatch.setenv("S3_ENDPOINT_URL", proxy.url)
    assert read_numbered(f"{s3_folder}/a.jsonl@[1:2]") == [(2, rows_of("a")[1])]
    assert read(f"{s3_folder}/b.json#two") == rows_of("two")
    with pytest.raises(StorageError, match="the credentials are refused"):
        read(f"{s3_folder}/*.jsonl")


def test_a_list_of_prompts_is_no_file_that_is_called_like_a_list(tmp_path: Path) -> None:
    path = write(tmp_path / "data" / "x", b"").parent.rename(tmp_path / "y]")
    assert parse_paths(f"[{path}, b]")[0] == [RowsOfFile(str(path), slice(None)), RowsOfFile("b", slice(None))]


def test_a_name_that_mosaicml_streaming_would_cut_is_refused_before_another_object_is_read(tmp_path: Path) -> None:
    for name in ("a#b.jsonl", "a?b.jsonl"):
        with pytest.raises(
            StorageError, match=r"a[#?]b\.jsonl: the name has '[#?]', where MosaicML Streaming, which re"
        ):
            open_storage("oci://bucket").download(name, tmp_path / "a")
