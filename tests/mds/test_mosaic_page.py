"""The page of docs/ about MosaicML's class names every keyword of the installed one, with its default."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import streaming
from lmms_stream import StreamingDataset

PAGE = Path(__file__).parents[2] / "docs" / "mosaicml.md"


def test_every_keyword_of_the_installed_class_is_ours_with_its_default_and_is_on_the_page() -> None:
    theirs, ours = (
        {name: each.default for name, each in inspect.signature(cls).parameters.items()}
        for cls in (streaming.StreamingDataset, StreamingDataset)
    )
    assert ours == theirs
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", PAGE.read_text(), re.MULTILINE))
    assert {name: repr(default).replace("'", '"') for name, default in theirs.items()} == rows


def test_every_public_name_of_the_installed_package_is_on_the_page() -> None:
    parts = [vars(streaming)[name] for name in ("text", "vision", "multimodal")]
    names = {name for part in (streaming, *parts) for name in vars(part) if inspect.isclass(vars(part)[name])}
    assert len(names) >= 19
    assert {name for name in names if f"`{name}`" not in PAGE.read_text()} == set()


def test_the_tests_that_the_page_names_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE.read_text())
    assert len(named) > 10
    for path, name in named:
        text = (PAGE.parents[1] / path).read_text()
        assert not name or f"def {name}(" in text, f"{path}::{name}"
