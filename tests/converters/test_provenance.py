"""Which row of which source each sample was made of: after shuffling, splits, skipped rows, slices, limits, merges."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.stored.merge import merge_datasets
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.errors import ConfigError, DataError, ShardError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.mds.provenance import (
    MAX_SOURCES,
    PROVENANCE_NAME,
    SOURCES_NAME,
    Provenance,
    SourceRow,
    packed_rows,
    write_provenance,
)
from lmms_stream.storage.s3 import S3Storage
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.inspect.page import render_page
from lmms_stream.tools.inspect.summary import inspect_dataset

from ..conftest import run_cli

SMALL: dict[str, Any] = {"unit_bytes": 4_000, "shard_bytes": 1 << 13, "num_workers": 1}


def write_rows(path: Path, num_rows: int) -> Path:
    """Rows whose user says the file's name and their line; among them are blank lines, and rows that do not fit."""
    lines = []
    for line in range(1, num_rows + 1):
        user = {"role": "user", "content": f"{path.name}:{line}"}
        turns = [{"role": "assistant", "content": f"answer {turn}"} for turn in range(1 + line % 2)]
        said = [user, turns[0], *([{"role": "user", "content": "more?"}, turns[1]] if len(turns) > 1 else [])]
        lines.append("" if line % 50 == 9 else "{broken" if line % 50 == 30 else json.dumps({"messages": said}))
    path.write_text("\n".join(lines) + "\n")
    return path


def said_rows(folder: str | Path) -> list[str]:
    """What each sample itself says it was made of."""
    return [json.loads(sample["messages"])[0]["content"] for sample in PackedStreamingDataset(folder)[:]]


def told_rows(folder: str | Path, cache: Path | None = None) -> list[str]:
    provenance = Provenance.of(open_storage(folder), cache)
    assert provenance is not None
    found = [provenance.source_of(number) for number in range(provenance.num_samples)]
    assert found[-1] == provenance.source_of(-1)
    return [f"{Path(source).name}:{row}" for source, row in found]


def test_rows_are_told_through_shuffle_splits_skipped_rows_slices_and_several_samples_a_row(tmp_path: Path) -> None:
    first, second = write_rows(tmp_path / "a.jsonl", 200), write_rows(tmp_path / "b.jsonl", 400)
    sources: list[str | Path] = [first, f"{second}@[100:300]", f"{second}@[-40:]"]
    options: dict[str, Any] = {"splits": {"train": 0.8, "test": 0.2}, "shuffle_seed": 3, "on_error": "skip", **SMALL}
    report = convert(sources, str(tmp_path / "out"), schema=SchemaOptions(learn="each"), **options)
    assert report.num_rejected > 5
    for split in ("train", "test"):
        folder = tmp_path / "out" / split
        assert told_rows(folder) == said_rows(folder)
        assert verify_dataset(str(folder)).problems == ()
    both = [*told_rows(tmp_path / "out" / "train"), *told_rows(tmp_path / "out" / "test")]
    assert both.count("a.jsonl:1") == 2  # of its two answers
    assert both.count("b.jsonl:101") == 2
    assert both.count("b.jsonl:400") == 1
    assert both.count("b.jsonl:100") == 0
    assert len(both) == report.num_rows


def test_the_samples_of_a_limit_are_told_and_found_by_their_rows(tmp_path: Path) -> None:
    sources = [write_rows(tmp_path / "a.jsonl", 100), write_rows(tmp_path / "b.jsonl", 100)]
    convert(sources, str(tmp_path / "out"), on_error="skip", limit=120, **SMALL)
    assert told_rows(tmp_path / "out") == said_rows(tmp_path / "out")
    provenance = Provenance.of(open_storage(tmp_path / "out"))
    assert provenance is not None
    assert len(provenance.rows) == 120
    for number in (0, 17, 119):
        assert provenance.sample_of(*provenance.source_of(number)).tolist() == [number]
    assert provenance.sample_of("a.jsonl", 9).tolist() == []
    with pytest.raises(IndexError, match="sample 120 of a dataset of 120"):
        provenance.source_of(120)
    with pytest.raises(ConfigError, match=r"made of no source 'c\.jsonl': name one of .*a\.jsonl, .*b\.jsonl"):
        provenance.named("c.jsonl")
    assert str(SourceRow("a.jsonl", 3)) == "a.jsonl:3"


def test_a_source_is_named_by_the_end_of_its_path_where_no_other_ends_so(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    sources = [write_rows(tmp_path / name / "a.jsonl", 20) for name in ("one", "two")]
    convert(sources, str(tmp_path / "out"), allow_repeats=True, **SMALL)
    provenance = Provenance.of(open_storage(tmp_path / "out"))
    assert provenance is not None
    assert provenance.sample_of("two/a.jsonl", 1).tolist() == [19]
    with pytest.raises(ConfigError, match=r"2 sources end in 'a\.jsonl': name one of"):
        provenance.named("a.jsonl")


def test_a_merge_joins_the_sources_and_in_a_store_a_few_bytes_tell_a_row(
    s3_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = write_rows(tmp_path / "a.jsonl", 100), write_rows(tmp_path / "b.jsonl", 100)
    splits = {"splits": {"x": 0.5, "y": 0.5}, "on_error": "skip", **SMALL}
    convert([first, second], f"{s3_folder}/one", **splits)
    convert([second], f"{s3_folder}/two", on_error="skip", **SMALL)
    merge_datasets(s3_folder, [f"{s3_folder}/one/x", f"{s3_folder}/one/y", f"{s3_folder}/two"])
    said = said_rows(s3_folder)
    monkeypatch.setattr(S3Storage, "download", None)  # a row is told without the array
    assert told_rows(s3_folder, tmp_path / "cache") == said
    monkeypatch.undo()
    provenance = Provenance.of(open_storage(s3_folder), tmp_path / "cache")
    assert provenance is not None
    assert provenance.sources == (str(first), str(second))
    assert len(provenance.sample_of("b.jsonl", 5)) == 2
    assert provenance.source_of(3) == SourceRow(str(first), provenance.source_of(3).row)
    shown = inspect_dataset(s3_folder, source="b.jsonl:5")
    assert [sample.source for sample in shown.samples] == [f"{second}:5"] * 2
    assert verify_dataset(s3_folder).problems == ()


def test_a_merge_of_datasets_of_which_one_tells_no_rows_says_so(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", 20)
    for name in ("a", "b"):
        convert([rows], str(tmp_path / "all" / name), **SMALL)
    shutil.copytree(tmp_path / "all", tmp_path / "old")
    (tmp_path / "old" / "b" / SOURCES_NAME).unlink()
    report = merge_datasets(str(tmp_path / "old"), [str(tmp_path / "old" / name) for name in ("a", "b")])
    assert report.dropped == (
        "provenance is left out, because b has none: convert it again, merge again with --overwrite, and samples will "
        "name their rows",
    )
    assert Provenance.of(open_storage(tmp_path / "old")) is None


def test_inspect_shows_the_samples_of_a_row_and_the_row_of_each_sample(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", 80)
    convert([rows], str(tmp_path / "out"), on_error="skip", shuffle_seed=1, **SMALL)
    result = run_cli("inspect", str(tmp_path / "out"), "--source", "a.jsonl:7")
    assert result.returncode == 0, result.stderr
    assert f"made of {rows}:7" in result.stdout
    assert "answer 1" in result.stdout
    shown = inspect_dataset(str(tmp_path / "out"), first=3, num_samples=2)
    assert [Path(sample.source).name for sample in shown.samples] == said_rows(tmp_path / "out")[3:5]
    assert f"made of {shown.samples[0].source}" in render_page(shown)
    for asked, message in (
        ("a.jsonl", r"--source a\.jsonl: expected FILE:ROW, the row counted from 1"),
        ("a.jsonl:0", r"--source a\.jsonl:0: expected FILE:ROW"),
        ("a.jsonl:9", r"was made of row 9 of .*a\.jsonl: the source does not have this row, or the row was left out"),
    ):
        with pytest.raises(ConfigError, match=message):
            inspect_dataset(str(tmp_path / "out"), source=asked)
    (tmp_path / "out" / SOURCES_NAME).unlink()
    with pytest.raises(ConfigError, match="has no record of the sources of its samples: convert it again"):
        inspect_dataset(str(tmp_path / "out"), source="a.jsonl:7")
    assert inspect_dataset(str(tmp_path / "out")).samples[0].source == ""


def test_verify_finds_what_is_wrong_with_the_rows_of_samples(tmp_path: Path) -> None:
    convert([write_rows(tmp_path / "a.jsonl", 20)], str(tmp_path / "out"), **SMALL)
    folder = tmp_path / "out"

    def problems() -> list[str]:
        return [f"{problem.where} {problem.what}" for problem in verify_dataset(str(folder)).problems]

    assert problems() == []
    rows = np.load(folder / PROVENANCE_NAME)
    np.save(folder / PROVENANCE_NAME, rows[:-1])
    (problem,) = problems()
    assert problem.startswith(
        f"{PROVENANCE_NAME} should be uint64[19], found uint64[18]: convert the dataset again, or"
    )
    np.save(folder / PROVENANCE_NAME, rows[::-1].copy())
    assert f"{PROVENANCE_NAME} differs from its checksum in {SOURCES_NAME}" in problems()[0]
    write_provenance(folder, [rows], [], num_samples=19)
    assert f"{PROVENANCE_NAME} names source 0 of 0" in problems()[0]
    write_provenance(folder, [rows[:5]], ["a"], num_samples=5)
    assert f"{PROVENANCE_NAME} names the rows of 5 samples, the dataset has 19" in problems()[0]
    (folder / PROVENANCE_NAME).write_bytes(b"")
    assert "cannot be read" in problems()[0] or "names the rows" in problems()[0]
    (folder / SOURCES_NAME).write_text('{"content_hash": "../../a", "num_samples": 19, "sources": []}')
    with pytest.raises(ShardError, match=r"provenance\.json is damaged"):
        Provenance.of(open_storage(folder))
    shown = inspect_dataset(str(folder))
    assert shown.samples[0].source == ""
    assert shown.notes[0].startswith("the rows that samples were made of are not shown: ")


def test_more_sources_than_the_numbers_hold_are_refused() -> None:
    assert packed_rows(MAX_SOURCES - 1, np.array([5]))[0] > 0
    with pytest.raises(DataError, match=r"at most 8388608 sources: convert to several targets and merge them"):
        packed_rows(MAX_SOURCES, np.array([5]))
