"""Counts of the house only fall: prose that is hard to read, small files, names that are used twice."""

from __future__ import annotations

import json
import re

import hypothesis
import pytest

from . import house
from .arrows import ROOT, files
from .processes import run_module
from .rounds import in_long_rounds

EXAMPLES = {"file.py", "image_datasets.py"}  # a file of a user's, and one of another project
FOLDERS = ("lmms_stream", "converters", "tests", "benchmarks", "examples", "docs")
BASELINES = json.loads(house.BASELINES.read_text())


@pytest.fixture(scope="module")
def counts() -> dict[str, float]:
    return house.counts()


def test_no_count_is_above_what_it_was(counts: dict[str, float]) -> None:
    above = {name: count for name, count in counts.items() if count > BASELINES[name]}
    assert above == {}, "python -m tests.house --list prints what is counted"


def test_what_was_won_is_kept(counts: dict[str, float]) -> None:
    slack = {name: max(5, BASELINES[name] // 20) if isinstance(BASELINES[name], int) else 0.5 for name in counts}
    below = {name: count for name, count in counts.items() if count < BASELINES[name] - slack[name]}
    assert below == {}, "python -m tests.house --write"


def test_a_hard_sentence_is_found() -> None:
    hard = "Whether what was downloaded is what is wanted, once it is decoded, which it is then."
    assert house.hard_sentences(f"Decode the download. {hard}") == [hard]
    assert (
        house.hard_sentences("Decode the download and return whether its content matches the checksum of the index.")
        == []
    )


def test_prose_of_python_and_of_pages_is_found() -> None:
    python = '"""One."""\n\ndef f():\n    """Two."""\n    return 1  # three\n'
    assert [*house.prose_of_python(python)] == [(1, "One.", True), (4, "Two.", True), (5, " three", False)]
    page = "# A\n\n| a | table |\n\n```python\nx = 1\n\ny = 2\n```\n\nText with `code` and [a link](to.md).\n"
    found = [(line, text) for line, text, _ in house.prose_of_page(page)]
    assert [line for line, _ in found] == [1, 5, 11]
    assert "x = 1" not in found[1][1]
    assert "code" not in found[2][1]
    assert "to.md" not in found[2][1]


def test_files_that_comments_name_exist() -> None:
    known = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    named = [
        (str(path.relative_to(ROOT)), line, name)
        for module, path in files().items()
        for line, text, _ in house.prose_of_module(module)
        for name in re.findall(r"\b(\w+\.py)\b", text)
    ]
    assert len(named) > 40
    assert [each for each in named if each[2] not in known | EXAMPLES] == []


@in_long_rounds
def test_a_request_enters_no_more_files_than_it_did() -> None:
    done = run_module("tests.walk", timeout_s=300)
    assert done.returncode == 0, done.stderr
    walked = json.loads(done.stdout)
    assert len(walked) == 3
    for name, figures in walked.items():
        for figure, value in figures.items():
            assert value <= BASELINES[f"{name}: {figure}"], "python -m tests.walk --list names the functions"


def test_properties_have_no_limit_of_time() -> None:
    """Hypothesis fails tests that are slow on a busy machine, by default."""
    assert hypothesis.settings().deadline is None
    assert hypothesis.HealthCheck.too_slow in hypothesis.settings().suppress_health_check
