"""docs/datasets.md is what the code says, of every field."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from lmms_stream.datasets import DatasetConfig
from lmms_stream.doors.lmms_engine.datasets.table import OURS, THEIRS, markdown


def test_every_field_of_a_config_is_documented_once() -> None:
    names = {field.name for field in dataclasses.fields(DatasetConfig)}
    assert {*THEIRS, *OURS} == names
    assert not {*THEIRS} & {*OURS}


def test_the_page_of_datasets_is_written_by_the_code() -> None:
    page = Path(__file__).parents[2] / "docs" / "datasets.md"
    assert page.read_text() == markdown(), "python -m lmms_stream.doors.lmms_engine.datasets.table > docs/datasets.md"
