"""Rows that a program holds: iterables, and datasets of the library `datasets`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from lmms_stream import convert
from lmms_stream.converters.convert import Progress
from lmms_stream.converters.report import ConvertReport
from lmms_stream.errors import ConfigError, DataError, StorageError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.types import Sample

from ..test_convert_runs import written

NUM_ROWS = 900


def rows(count: int = NUM_ROWS) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield {"text": f"text {number}", "number": number}


def louder(row: dict[str, Any]) -> dict[str, Any]:
    return {"text": row["text"] + "!"}


def converted(source: Any, target: Path, **options: Any) -> ConvertReport:
    return convert(source, str(target), **({"num_workers": 1, "unit_bytes": 5000} | options))


def texts(target: Path) -> list[str]:
    samples: list[Sample] = PackedStreamingDataset(target)[:]
    return [sample["text"] for sample in samples]


EXPECTED = [f"text {number}" for number in range(NUM_ROWS)]


@pytest.mark.parametrize(
    "source",
    [rows, lambda: list(rows()), lambda: [rows(450), list(rows())[450:]], lambda: map(dict, rows())],
    ids=["generator", "list", "several", "map"],
)
def test_any_iterable_of_rows_is_a_source(source: Any, tmp_path: Path) -> None:
    said: list[str] = []
    converted(source(), tmp_path / "out", progress=Progress(say=said.append))
    assert texts(tmp_path / "out") == EXPECTED
    assert (
        "nothing tells whether these rows are the same the next time: if this conversion is ended, it is not" in said[0]
    )


def test_a_dict_that_is_given_again_with_other_values_is_another_row(tmp_path: Path) -> None:
    def changing() -> Iterator[dict[str, Any]]:
        row: dict[str, Any] = {}
        for each in rows(50):
            row.update(each)
            yield row

    converted(changing(), tmp_path / "out")
    assert texts(tmp_path / "out") == EXPECTED[:50]


def test_names_and_rows_may_stand_side_by_side_and_a_name_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(10)))
    dataset = datasets.Dataset.from_list(list(rows(3)))
    report = converted((each for each in (path, rows(2), dataset)), tmp_path / "out")
    assert texts(tmp_path / "out") == [*EXPECTED[:10], *EXPECTED[:2], *EXPECTED[:3]]
    assert converted(path, tmp_path / "alone").num_rows == 10
    assert converted(str(path), tmp_path / "alone").num_rows == 10
    assert report.num_rows == 15


def test_several_processes_share_the_rows_of_an_iterable(tmp_path: Path) -> None:
    converted(rows(), tmp_path / "out", num_workers=2)
    assert texts(tmp_path / "out") == EXPECTED


def test_a_dataset_is_a_source_in_its_own_order(tmp_path: Path) -> None:
    backwards = datasets.Dataset.from_list(list(rows())).select(range(NUM_ROWS - 1, -1, -1))
    report = converted(backwards.with_format("numpy", ["text"]), tmp_path / "out", map=louder)
    assert texts(tmp_path / "out") == [f"{text}!" for text in reversed(EXPECTED)]
    assert report.kind == "text; reads text"
    converted(backwards.to_iterable_dataset(), tmp_path / "streamed", map=louder)
    assert texts(tmp_path / "streamed") == texts(tmp_path / "out")


def test_a_dataset_is_known_again_by_its_fingerprint(tmp_path: Path) -> None:
    def refuse(num_bytes: int) -> None:
        raise KeyboardInterrupt

    def dataset() -> datasets.Dataset:
        return datasets.Dataset.from_list(list(rows()))

    target = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        converted(dataset(), target, progress=Progress(advance=refuse))
    with pytest.raises(StorageError, match="with other sources: run the original command, or pass"):
        converted(dataset().select(range(100)), target)
    converted(dataset(), target)
    converted(dataset(), tmp_path / "once")
    assert written(str(target)) == written(str(tmp_path / "once"))
    made = (target / "_lmms" / "dataset.json").stat().st_mtime_ns
    assert converted(dataset(), target).num_rows == NUM_ROWS
    assert (target / "_lmms" / "dataset.json").stat().st_mtime_ns == made


def test_a_conversion_of_an_iterable_is_not_gone_on_with(tmp_path: Path) -> None:
    converted(rows(), tmp_path / "out")
    with pytest.raises(StorageError, match="holds a dataset already: choose another target, or pass --overwrite"):
        converted(rows(), tmp_path / "out")


def test_an_iterable_that_fails_ends_the_conversion_and_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[dict[str, Any]]:
        yield from rows(3)
        raise RuntimeError("no more")

    with pytest.raises(
        DataError, match=r"generator:4: the row cannot be read \(RuntimeError\('no more'\)\): correct the"
    ):
        converted(failing(), tmp_path / "out")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def test_items_that_are_no_rows_are_rejected_by_their_number(tmp_path: Path) -> None:
    items = [*rows(2), 3, *rows(1)]
    with pytest.raises(DataError, match=r"list:3: expected a row \(a dict\), found int: correct what gives it"):
        converted(items, tmp_path / "out")
    report = converted(items, tmp_path / "out", on_error="skip", overwrite=True)
    assert (report.num_rows, report.num_rejected) == (3, 1)


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_list(list(rows(3)))
    cases: list[tuple[Any, str]] = [
        (3, "int is no source: give the name of a file, an iterable of rows"),
        ([None], "NoneType is no source: give the name of a file"),
        ({"text": "a"}, "dict is no source: give the name of a file"),
        ([], "no source is given: name a file, or give rows"),
        (iter([]), "no source is given: name a file, or give rows"),
        (datasets.DatasetDict({"train": dataset}), "DatasetDict holds train: pass one of them, for example"),
    ]
    for source, message in cases:
        with pytest.raises(DataError, match=message):
            converted(source, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"Dataset has a transform .*: apply it with the dataset's map"):
        converted(dataset.with_transform(lambda batch: batch), tmp_path / "out")
