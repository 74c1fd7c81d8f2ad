"""Rows with images that are to be made: converted, verified, inspected and indexed."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from datasets import Image as ImageFeature
from lmms_stream.converters.convert import convert
from lmms_stream.converters.options import ConvertOptions
from lmms_stream.converters.rows.mapper import find_mapper
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.errors import DataError
from lmms_stream.processors.image import ImageProcessor
from lmms_stream.tools.inspect.summary import inspect_dataset
from PIL import Image
from streaming import MDSWriter, StreamingDataset

from ...conftest import run_cli

OPTIONS = SchemaOptions(kind="image")


def picture(width: int, height: int, format: str = "PNG") -> bytes:
    buffer = BytesIO()
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(values).save(buffer, format)
    return buffer.getvalue()


def rows_of(folder: Path, labels: list[Any]) -> Path:
    """Rows of JSON with images of different sizes, and these labels."""
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for number, label in enumerate(labels):
            (folder / f"{number}.jpg").write_bytes(picture(9 + number, 7, "JPEG"))
            file.write(json.dumps({"image": f"{number}.jpg", "label": label}) + "\n")
    return path


def test_an_image_is_stored_as_it_was_with_its_facts_and_its_label(tmp_path: Path) -> None:
    data = picture(9, 7)
    (tmp_path / "one.png").write_bytes(data)
    references = [
        "one.png", {"bytes": data, "path": None}, {"bytes": None, "path": "one.png"}, data,
        (tmp_path / "one.png").as_uri(),
    ]  # fmt: skip
    for reference in references:
        row = {"image": reference, "label": 2}
        mapper = find_mapper([row], OPTIONS)
        assert mapper(row, str(tmp_path)) == {
            "image": data, "facts": '{"width": 9, "height": 7, "mime": "image/png"}', "label": 2,
        }  # fmt: skip


@pytest.mark.parametrize(("label", "stored"), [(3, 3), ("3", 3), (3.0, 3), (None, -1), (-1, -1), (0, 0)])
def test_labels_are_numbers(label: Any, stored: int) -> None:
    row = {"image": picture(9, 7), "label": label}
    assert find_mapper([row], OPTIONS)(row, None)["label"] == stored
    assert find_mapper([{"image": picture(9, 7)}], OPTIONS)({"image": picture(9, 7)}, None)["label"] == -1


@pytest.mark.parametrize("label", ["cat", True, 2.5, -2, 1 << 40])
def test_a_label_that_is_no_number_of_a_class_is_named(label: Any) -> None:
    row = {"image": picture(9, 7), "label": label}
    with pytest.raises(
        DataError, match=r"label .* in column 'label' is no number of a class, from 0 on .*: number the"
    ):
        find_mapper([row], OPTIONS)(row, None)


def test_a_row_without_a_column_of_an_image_names_its_columns() -> None:
    row = {"img": picture(9, 7), "label": 3}
    with pytest.raises(DataError, match="no column of an image among img, label: name the column image, or pass --col"):
        find_mapper([row], OPTIONS)(row, None)


def test_rows_with_labels_are_still_found_as_those_of_a_classifier() -> None:
    assert find_mapper([{"image": picture(9, 7), "label": "cat"}], SchemaOptions()).kind.name == "image-label"


def test_the_names_of_classes_of_a_hub_dataset_become_their_numbers(tmp_path: Path) -> None:
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["cat", "dog"]), "other": Value("int64")})
    rows = [{"image": {"bytes": picture(9, 7), "path": None}, "label": label, "other": 1} for label in (1, 0, None)]
    Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "saved")
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    for source in ("saved", "rows.parquet"):
        target = tmp_path / f"shards-{source}"
        convert([tmp_path / source], str(target), options=ConvertOptions(schema=OPTIONS), num_workers=1)
        read = StreamingDataset(local=str(target), batch_size=1)
        assert [int(each["label"]) for each in read] == [1, 0, -1]


def test_images_are_converted_indexed_verified_inspected_and_read_by_others(tmp_path: Path) -> None:
    target = str(tmp_path / "shards")
    rows_of(tmp_path, [1, 0, None])
    done = run_cli("convert", str(tmp_path / "rows.jsonl"), target, "--kind", "image", "--processor", "image")
    assert done.returncode == 0, done.stderr
    processor = ImageProcessor(image_size=16)
    verified = verify_dataset(target, deep=True, processor=processor, num_workers=1)
    assert (verified.num_problems, verified.num_samples, verified.num_lengths_indexes) == (0, 3, 1)
    (seen, *_) = inspect_dataset(target, processor=processor).samples
    assert seen.values["label"] == "1"
    assert next(medium.label for medium in seen.media).startswith("image/jpeg")
    assert [each.label for each in seen.seen] == ["image of 16 x 16, 1 tokens"]
    again = run_cli("index", target, "--processor", "image")
    assert again.returncode == 0, again.stderr
    refused = run_cli("index", target, "--processor", "image", "--tokenizer", "x")
    assert "--processor image reads images, not texts: leave --tokenizer out" in refused.stderr


def test_verify_names_an_image_that_is_broken_and_facts_that_are_wrong(tmp_path: Path) -> None:
    columns = {"image": "bytes", "facts": "str", "label": "int"}
    facts = json.dumps({"width": 9, "height": 7, "mime": "image/png"})
    with MDSWriter(columns=columns, out=str(tmp_path / "data")) as writer:
        writer.write({"image": picture(9, 7)[:60], "facts": facts, "label": 0})
        writer.write({"image": picture(9, 8), "facts": facts, "label": 0})
        writer.write({"image": picture(9, 7), "facts": facts, "label": 0})
    report = verify_dataset(str(tmp_path / "data"), deep=True, processor=ImageProcessor(image_size=8))
    broken, wrong = (each.what for each in report.problems if each.where.startswith("sample"))
    assert "decode" in broken or "header" in broken
    assert "its facts say {'width': 9, 'height': 7, 'mime': 'image/png'}, its image has ImageFacts(width=9" in wrong


def test_broken_images_end_a_conversion_or_are_counted(tmp_path: Path) -> None:
    rows_of(tmp_path, [0, 1, 2])
    (tmp_path / "1.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"rows.jsonl.*1.jpg"):
        convert([tmp_path / "rows.jsonl"], str(tmp_path / "a"), options=ConvertOptions(schema=OPTIONS), num_workers=1)
    options = ConvertOptions(schema=OPTIONS, on_error="skip")
    report = convert([tmp_path / "rows.jsonl"], str(tmp_path / "b"), options=options, num_workers=1)
    assert (report.num_rows, report.num_rejected) == (2, 1)
