"""Drop lists of a conversion: rows of files, and samples that runs of an earlier dataset left out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.converters.append import append
from lmms_stream.converters.convert import convert
from lmms_stream.converters.dry_run import dry_run
from lmms_stream.converters.part import convert_part
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.stored.merge import merge_datasets
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.errors import ConfigError, DataError, LmmsStreamError, StorageError
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.index import DATASET_NAME
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plan.left_out import LeftOut, LeftOutSample
from lmms_stream.processors import ProcessorConfig

from ..conftest import run_cli
from ..rounds import LONG
from .held import chat
from .test_convert_runs import written
from .test_provenance import SMALL, said_rows, told_rows, write_rows


def write_list(path: Path, lines: Iterable[object]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def left_out(path: Path, source: str, ids: Sequence[int]) -> str:
    """The list that a run keeps of samples that it left out."""
    samples = LeftOut(LeftOutSample(source, each, "broken", 7, "quarantined") for each in ids)
    return write_list(path, map(json.dumps, samples.state_dict()))


def without(rows: Sequence[str], dropped: Iterable[str]) -> list[str]:
    return [row for row in rows if row not in set(dropped)]


@pytest.mark.parametrize("num_workers", [1, *([2] if LONG else [])])
def test_rows_that_are_named_are_left_out_and_counted_and_others_keep_their_numbers(
    tmp_path: Path, num_workers: int
) -> None:
    first, second = write_rows(tmp_path / "a.jsonl", 120), write_rows(tmp_path / "b.jsonl", 400)
    sources: list[str | Path] = [first, f"{second}@[100:300]", f"{second}@[300:]"]
    options: dict[str, Any] = {**SMALL, "num_workers": num_workers, "on_error": "skip"}
    convert(sources, str(tmp_path / "all"), **options)
    drop = write_list(tmp_path / "bad.txt", ["# seen", "", "a.jsonl:1", "a.jsonl:30", f"{second}:111", "b.jsonl:400"])
    report = convert(sources, str(tmp_path / "some"), drop=drop, **options)
    rows = without(told_rows(tmp_path / "all"), ["a.jsonl:1", "b.jsonl:111", "b.jsonl:400"])
    assert told_rows(tmp_path / "some") == said_rows(tmp_path / "some") == rows
    described = json.loads((tmp_path / "some" / DATASET_NAME).read_text())
    assert (report.num_dropped, described["num_dropped"], report.num_rows) == (4, 4, len(rows))  # one did not fit
    assert report.left_out["that --drop names"] == 4
    assert report.num_rejected == 7  # of 8, without the one that is dropped
    assert verify_dataset(str(tmp_path / "some")).problems == ()
    tried = dry_run(sources, drop=drop, on_error="skip")
    assert (tried.num_dropped, tried.num_rejected, tried.num_samples) == (4, 7, len(rows))


def test_a_row_that_does_not_fit_is_no_error_where_it_is_dropped(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", 100)
    drop = write_list(tmp_path / "bad.txt", ["a.jsonl:30", "a.jsonl:80"])
    report = convert([path], str(tmp_path / "out"), drop=drop, **SMALL)
    assert (report.num_dropped, report.num_rejected) == (2, 0)
    Path(drop).write_text("a.jsonl:30\n")
    with pytest.raises(DataError, match=r"a\.jsonl:80: .*--on-error skip"):
        convert([path], str(tmp_path / "other"), drop=drop, **SMALL)


def test_limits_splits_shuffles_and_doublets_are_those_of_the_rows_that_are_left(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"text {number // 2}"}) + "\n" for number in range(300)]  # each twice
    path, fewer = tmp_path / "a.jsonl", tmp_path / "fewer" / "a.jsonl"
    path.write_text("".join(rows))
    dropped = [1, 3, 4, 17, 150, 299]
    fewer.parent.mkdir()
    fewer.write_text("".join(row for number, row in enumerate(rows, 1) if number not in dropped))
    drop = write_list(tmp_path / "bad.txt", [f"a.jsonl:{number}" for number in dropped])
    asked: list[dict[str, Any]] = [
        {"dedup": "exact"},
        {"limit": 40},
        {"limit": 40, "dedup": "exact"},
        {"shuffle_seed": 3},
        {"splits": {"x": 0.7, "y": 0.3}},
    ]
    for number, options in enumerate(asked):
        ours, theirs = tmp_path / f"ours-{number}", tmp_path / f"theirs-{number}"
        report = convert([path], str(ours), drop=drop, **options, **SMALL)
        other = convert([fewer], str(theirs), **options, **SMALL)
        assert (report.num_rows, report.num_duplicates) == (other.num_rows, other.num_duplicates)
        assert report.num_dropped == (4 if "limit" in options else 6)
        for split in options.get("splits", {"": 1}):
            shards = [
                {name: data for name, data in written(str(each / split)).items() if name.endswith(".mds")}
                for each in (ours, theirs)
            ]
            assert shards[0] == shards[1]


def test_samples_that_a_run_left_out_are_dropped_by_their_rows(tmp_path: Path) -> None:
    first, second = write_rows(tmp_path / "a.jsonl", 200), write_rows(tmp_path / "b.jsonl", 200)
    old, options = tmp_path / "old", {**SMALL, "on_error": "skip", "schema": SchemaOptions(learn="each")}
    convert([first, second], str(old), shuffle_seed=5, **options)
    rows, ids = told_rows(old), [3, 77, *range(200, 290)]
    drop = left_out(tmp_path / "left_out.jsonl", "chats", ids)
    named = {rows[number] for number in ids}
    target = tmp_path / "new"
    report = convert([second, first], str(target), drop=drop, drop_sources={"chats": str(old)}, **options)
    assert report.num_dropped == len(named)
    assert sorted(told_rows(target)) == sorted(without(rows, named))  # a row of two answers is gone whole
    again = convert([second, first], str(target), drop=drop, drop_sources={"chats": str(old)}, **options)
    assert again.was_there
    assert again.num_dropped == report.num_dropped


def test_a_list_of_another_dataset_is_refused_and_one_of_before_it_grew_is_not(tmp_path: Path) -> None:
    first, second, third = (write_rows(tmp_path / f"{name}.jsonl", 60) for name in "abc")
    old, other, options = str(tmp_path / "old"), str(tmp_path / "other"), {**SMALL, "on_error": "skip"}
    convert([first, second], old, **options)
    convert([second, first], other, **options)
    identity = PackedDataset([StreamConfig(remote=old)]).one.identity
    drop = write_list(tmp_path / "x.jsonl", [json.dumps({"source": "data", "sample_id": 2, "dataset": identity})])
    message = rf"x\.jsonl, line 1: the sample is of a dataset {identity}, and .*other is .*: name the place of the"
    for sources in ([first, second], [other]):  # rows of its files, and its own samples
        with pytest.raises(ConfigError, match=message):
            convert(sources, str(tmp_path / "new"), drop=drop, drop_sources={"data": other}, **options)
    append([third], old, **options)
    assert PackedDataset([StreamConfig(remote=old)]).one.identity != identity
    report = convert([first, second], str(tmp_path / "new"), drop=drop, drop_sources={"data": old}, **options)
    assert report.num_dropped == 1


def test_a_dataset_is_stored_again_without_some_samples(tmp_path: Path) -> None:
    first, second = write_rows(tmp_path / "a.jsonl", 150), write_rows(tmp_path / "b.jsonl", 100)
    for path, name in ((first, "one"), (second, "two")):
        convert([path], str(tmp_path / "parts" / name), on_error="skip", shuffle_seed=1, **SMALL)
    old = tmp_path / "parts"
    merge_datasets(str(old), [str(old / "one"), str(old / "two")])
    rows = told_rows(old)
    ids = left_out(tmp_path / "left_out.jsonl", "data", [0, 5, len(rows) - 1])
    report = convert([old], str(tmp_path / "by-id"), drop=ids, drop_sources={"data": str(old)}, **SMALL)
    assert report.num_dropped == 3
    assert told_rows(tmp_path / "by-id") == [row for n, row in enumerate(rows) if n not in (0, 5, len(rows) - 1)]
    by_row = write_list(tmp_path / "rows.txt", [rows[7], f"{old}:9"])  # of the files behind it, and of itself
    report = convert([old], str(tmp_path / "by-row"), drop=by_row, **SMALL)
    assert told_rows(tmp_path / "by-row") == [row for n, row in enumerate(rows) if n not in (7, 8)]
    # What was left out of one dataset is dropped from another that was made of the same rows.
    listed = left_out(tmp_path / "x.jsonl", "old", [8, 9])
    by_rows = {"old": str(tmp_path / "by-row")}
    convert([tmp_path / "by-id"], str(tmp_path / "both"), drop=listed, drop_sources=by_rows, **SMALL)
    gone = [told_rows(tmp_path / "by-row")[number] for number in (8, 9)]
    assert told_rows(tmp_path / "both") == without(told_rows(tmp_path / "by-id"), gone)


def test_new_files_of_a_dataset_have_drop_lists_of_their_own(tmp_path: Path) -> None:
    first, second = write_rows(tmp_path / "a.jsonl", 25), write_rows(tmp_path / "b.jsonl", 25)
    convert([first], str(tmp_path / "out"), **SMALL)
    drop = write_list(tmp_path / "bad.txt", ["b.jsonl:3"])
    report = append([str(first), str(second)], str(tmp_path / "out"), drop=drop, **SMALL)
    assert report.converted is not None
    assert report.converted.num_dropped == 1
    assert told_rows(tmp_path / "out") == said_rows(tmp_path / "out")
    assert "b.jsonl:3" not in told_rows(tmp_path / "out")
    third = write_rows(tmp_path / "c.jsonl", 25)
    with pytest.raises(ConfigError, match=r"this conversion was made of no source 'a\.jsonl': name one of .*c\.jsonl"):
        append([str(third)], str(tmp_path / "out"), drop=write_list(tmp_path / "x", ["a.jsonl:1"]), **SMALL)


@pytest.mark.parametrize(
    ("lines", "error", "message"),
    [
        (["c.jsonl:3"], ConfigError, r"bad\.txt, line 1: this conversion was made of no source 'c\.jsonl'"),
        (["a.jsonl:0"], ConfigError, "line 1: a.jsonl:0: rows are counted from 1"),
        (["a.jsonl:25", "a.jsonl:26"], DataError, r"bad\.txt names row 26 of .*a\.jsonl, but only rows 1 to 25 are"),
        (["b.jsonl:9", "b.jsonl:99"], DataError, r"names row 9, 99 of .*b\.jsonl, but only rows 11 to 20 are read"),
        (["a.jsonl"], ConfigError, r"line 1: 'a\.jsonl' names no sample: write SOURCE:ID, or FILE:ROW"),
        (["{}"], ConfigError, "line 1: {} is no JSON with source and sample_id"),
        (["# x", "7"], ConfigError, "line 2: sample 7 of 'which source'|line 2: sample 7 of which source"),
        (['{"source": "run", "sample_id": 1}'], ConfigError, "sample 1 of 'run': .* with --drop-source run=URL"),
        (["old:24"], ConfigError, "line 1: .*old has no sample 24: it has 24, counted from 0"),
        (["old:3"], ConfigError, r"it was made of .*z\.jsonl:4, which is none of the sources, and no dataset among"),
        (["changed:3"], ConfigError, r"made of .*a\.jsonl:4, and .*a\.jsonl was changed since it was converted to"),
        (["plain:3"], ConfigError, r"/plain does not say what its samples were made of, so ids do not map"),
        (["long:3"], ConfigError, "/long lays rows end to end in its samples, so ids do not map to rows: list"),
    ],
)  # fmt: skip
def test_names_that_match_nothing_are_errors(
    tmp_path: Path, tokenizer: Path, lines: list[str], error: type[LmmsStreamError], message: str
) -> None:
    first, second = write_rows(tmp_path / "a.jsonl", 24), write_rows(tmp_path / "b.jsonl", 25)
    options = {name: str(tmp_path / name) for name in ("old", "changed", "plain", "long")}
    convert([write_rows(tmp_path / "z.jsonl", 25)], options["old"], **SMALL)
    convert([first], options["changed"], **SMALL)
    convert([first], options["plain"], **SMALL)
    for name in ("npy", "json"):
        Path(options["plain"], "_lmms", f"provenance.{name}").unlink()
    if lines == ["long:3"]:
        texts = tmp_path / "texts.jsonl"
        texts.write_text("".join(json.dumps({"text": f"{number} words of a text"}) + "\n" for number in range(50)))
        convert(
            [texts],
            options["long"],
            processor=ProcessorConfig(type="text", tokenizer=str(tokenizer)).build(),
            concat=8,
            **SMALL,
        )
    write_rows(tmp_path / "a.jsonl", 25)
    drop = write_list(tmp_path / "bad.txt", lines)
    with pytest.raises(error, match=message):
        convert([first, f"{second}@[10:20]"], str(tmp_path / "out"), drop=drop, drop_sources=options, **SMALL)
    assert not list((tmp_path / "out").glob("*.mds"))


def test_a_list_goes_with_sources_of_which_it_can_say_something(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", 25)
    with pytest.raises(ConfigError, match="--drop-source names a dataset of a drop list: pass --drop FILE"):
        convert([path], str(tmp_path / "out"), drop_sources={"a": "b"})
    with pytest.raises(ConfigError, match=r"the drop list no\.txt cannot be read"):
        convert([path], str(tmp_path / "out"), drop="no.txt")
    drop = write_list(tmp_path / "bad.txt", ["a:1"])
    convert([path], str(tmp_path / "out"), **SMALL)
    with pytest.raises(ConfigError, match=r"--drop-source a=.*out is the target, and replacing"):
        convert([path], str(tmp_path / "out"), drop=drop, drop_sources={"a": str(tmp_path / "out")}, overwrite=True)
    with pytest.raises(ConfigError, match="is the target, and replacing"):
        convert_part(
            [path], str(tmp_path / "out"), "0/1", drop=drop, drop_sources={"a": str(tmp_path / "out")}, overwrite=True
        )
    everything = write_list(tmp_path / "all.txt", [f"a.jsonl:{row}" for row in range(1, 26)])
    with pytest.raises(DataError, match=r"no sample is left to write \(--drop left out 24\)"):  # one line is blank
        convert([path], str(tmp_path / "none"), drop=everything, **SMALL)


def test_a_conversion_that_was_ended_goes_on_with_the_same_list_alone(tmp_path: Path) -> None:
    path, target, work = tmp_path / "chats.jsonl", tmp_path / "out", tmp_path / "work"
    path.write_text("".join(json.dumps(chat(number)) + "\n" for number in range(400)) + "{broken\n")
    drop, other = (write_list(tmp_path / f"{row}.txt", [f"chats.jsonl:{row}"]) for row in (300, 1))
    options: dict[str, Any] = {**SMALL, "work": work}
    with pytest.raises(DataError, match=r"chats\.jsonl:401: not valid JSON"):
        convert([path], str(target), drop=drop, **options)
    assert list(target.glob("shard.*"))
    for dropped in (None, other):
        with pytest.raises(StorageError, match="an unfinished conversion with other drop: run the original"):
            convert([path], str(target), drop=dropped, **options)
    assert convert([path], str(target), drop=drop, on_error="skip", **options).num_dropped == 1


def test_the_list_of_a_run_is_given_on_the_command_line(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", 25)
    convert([path], str(tmp_path / "old"), **SMALL)
    drop = left_out(tmp_path / "left_out.jsonl", "data", [4])
    result = run_cli(
        "convert", str(path), str(tmp_path / "new"), "--drop", drop, "--drop-source", f"data={tmp_path / 'old'}",
        "--shard-size", "8kb", "--workers", "1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "1 row that --drop names" in result.stdout
    assert told_rows(tmp_path / "new") == without(told_rows(tmp_path / "old"), ["a.jsonl:5"])
    result = run_cli("convert", str(path), str(tmp_path / "new"), "--drop", drop, "--drop-source", "data")
    assert result.returncode == 1
    assert "--drop-source data: expected NAME=VALUE" in result.stderr
