"""One reader of YAML: numbers as JSON and people write them, through every door."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.config import load_config, load_mapping
from lmms_stream.converters.sources.lists import list_entries
from lmms_stream.errors import ConfigError, LmmsStreamError
from lmms_stream.yaml_text import read_yaml, write_yaml

from .rounds import rounds
from .strategies import examples

NUMBERS = {
    "1e-5": 1e-5, "1E3": 1000.0, "5e-6": 5e-6, "-1.5e+3": -1500.0, "2.5e4": 25000.0, "1.": 1.0, ".5": 0.5, "+1": 1,
    "010": 10, "-007": -7, "0o17": 15, "0x1F": 31, "0b11": 3, "1_000": 1000, "1_000.5": 1000.5, "-.inf": -math.inf,
}  # fmt: skip
TEXTS = ["2026-11-25", "2001-12-14t21:59:43.10-05:00", "12:30", "1:30:45.5", "1.2.3", "1e", "e5", "0x", ".", "="]
WORDS = {"yes": True, "No": False, "on": True, "OFF": False, "true": True, "null": None, "~": None, "": None}


@dataclass(frozen=True)
class Free:
    section: dict[str, Any] = field(default_factory=dict)


def from_file(text: str, folder: Path) -> Any:
    (folder / "run.yaml").write_text(f"section: {{value: {text}}}")
    return load_config(Free, folder / "run.yaml").section["value"]


def from_override(text: str, folder: Path) -> Any:
    (folder / "run.yaml").write_text("{}")
    return load_config(Free, folder / "run.yaml", [f"section.value={text}"]).section["value"]


def from_list(text: str, folder: Path) -> Any:
    (folder / "list.yaml").write_text(f"datasets: [{{path: a.jsonl, weight: {text}}}]")
    return list_entries(folder / "list.yaml")[0]["weight"]


@pytest.mark.parametrize("door", [from_file, from_override])
def test_numbers_texts_and_words_are_the_same_through_every_door(
    door: Callable[[str, Path], Any], tmp_path: Path
) -> None:
    for text, value in {**NUMBERS, **{text: text for text in TEXTS}, **WORDS}.items():
        read = door(text, tmp_path)
        assert (type(read), read) == (type(value), value), text
    assert math.isnan(door(".nan", tmp_path))
    assert door("'1e5'", tmp_path) == "1e5"


def test_weights_of_a_list_are_written_as_people_write_them(tmp_path: Path) -> None:
    assert [from_list(text, tmp_path) for text in ("1e-2", "5E1", "0.5", "3")] == [0.01, 50, 0.5, 3]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("0189eE_.:-+xob~=", max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc1e5", min_size=1), inner, max_size=4),
    max_leaves=12,
)


@examples(rounds(100, 3000))
@given(value=values)
def test_json_is_read_as_json_and_what_is_written_is_read_by_old_readers_too(value: Any) -> None:
    assert read_yaml(json.dumps(value).replace("Infinity", ".inf")) == value
    assert read_yaml(write_yaml(value)) == value
    assert yaml.safe_load(write_yaml(value)) == value


def bomb(first: str, then: str) -> str:
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{level}: &a{level} {then % ', '.join([f'*a{level - 1}'] * 10)}" for level in range(1, 40)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (bomb("[x]", "[%s]"), r"its aliases \(\*\) expand \d+ values to more than 100000: write out what is meant"),
        (bomb("{k: 1}", "{<<: [%s]}"), r"its aliases \(\*\) expand \d+ values to more than 100000"),
        ("a: &a {b: [*a]}", r"an anchor \(&\) holds its own alias \(\*\): write the values out"),
        ("a: " + "[" * 2000, "its values are nested too deeply: write fewer levels"),
        ("a: !!bool perhaps", r"a tag \(!!\) does not fit its value: leave the tag out"),
        ("a: !!int perhaps", "invalid literal"),
    ],
    ids=["lists", "merged", "circle", "deep", "tag", "number"],
)
def test_a_text_that_would_expand_without_end_is_refused_early_in_one_short_line(
    text: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    for read in (load_mapping, list_entries):
        with pytest.raises(LmmsStreamError, match=rf"run\.yaml: .*{why}") as caught:
            read(path)
        assert len(str(caught.value)) < len(str(path)) + 150
        assert "\n" not in str(caught.value)


def test_aliases_that_people_write_are_read() -> None:
    text = "a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]"
    assert read_yaml(text) == {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": [{"x": 1}, {"x": 1}]}
    assert len(read_yaml(f"a: &a [{'1, ' * 300}]\nb: [{'*a, ' * 300}]")["b"]) == 300


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("datasets:\n- {path: a.jsonl}\n- {path: b.jsonl, path: c.jsonl}\n")
    for read in (load_mapping, list_entries):
        with pytest.raises(LmmsStreamError, match=r"run\.yaml: .*a mapping at line 3 has 'path' twice: remove one of"):
            read(tmp_path / "run.yaml")


def test_an_override_that_expands_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=r"^override .*: the value is not YAML: an anchor \(&\) holds its own alias"):
        load_mapping(tmp_path / "run.yaml", ["section=&a [*a]"])
