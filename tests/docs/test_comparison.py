"""The comparison with other libraries: each cell says where it is from, and nothing of it is lost when files move."""

from __future__ import annotations

import re

import pytest

from .pages import DOCS, ROOT, Page
from .test_tables import made

TEXT = (DOCS / "comparison.md").read_text(encoding="utf-8")
REFERENCES = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", TEXT, re.MULTILINE))
NONE = "not found"
OURS = "lmms_stream"
PINNED = r"https://github\.com/[\w-]+/[\w-]+/(?:(?:blob|tree)/(?:v\d+(?:\.\d+)+|[0-9a-f]{40})/\S+|pull/\d+)"


def rows() -> list[list[str]]:
    """Rows of all tables, without heads."""
    lines = [line[2:-2].split(" | ") for line in TEXT.splitlines() if line.startswith("| ") and line[2] != "|"]
    assert len(lines) > 50
    return lines


def names(text: str) -> list[str]:
    return re.findall(r"\]\[([\w-]+)\]", text)


def test_each_cell_links_to_its_source_or_says_that_there_was_none() -> None:
    others = TEXT.index("## What others do")
    for system, *cells in rows():
        said = cells if TEXT.index(f"| {' | '.join([system, *cells])} |") < others else cells[-1:]
        for cell in said:
            assert cell == NONE or names(cell) or re.search(r"\]\([\w/]+\.md\)", cell), f"{system}: {cell}"


def test_sources_are_of_a_version_a_commit_or_a_thread() -> None:
    assert set(names(TEXT)) == set(REFERENCES)
    for name, url in REFERENCES.items():
        assert re.fullmatch(PINNED, url), f"{name}: {url} moves: name a tag, a commit or a pull request"


def test_what_is_said_of_us_names_a_page_and_a_test_that_are_there() -> None:
    ours = [cell for system, *cells in rows() if system == OURS for cell in cells]
    assert len(ours) > 15
    for cell in ours:
        tests = re.findall(r"`(tests/[^`]+)`", cell)
        assert all((ROOT / test).is_file() for test in tests), cell
        assert tests or "numbers.md" in cell, f"{cell} names no test"
        assert re.search(r"\]\([\w/]+\.md\)", cell), f"{cell} names no page"
        assert not names(cell)


def test_each_table_is_of_the_same_systems() -> None:
    tables = [
        [line.split(" | ")[0] for line in block.splitlines()[2:]] for block in re.findall(r"(?:^\|.*\n)+", TEXT, re.M)
    ]
    *compared, others = tables
    assert len(compared) == 5
    assert all(table == compared[0] for table in compared)
    assert others == compared[0][1:]
    assert compared[0][0] == f"| {OURS}"


@pytest.mark.parametrize("heading", ["where-was-looked", "what-others-do-that-we-do-not"])
def test_headings_that_others_link_to_are_there(heading: str) -> None:
    assert heading in Page(DOCS / "comparison.md").anchors


def test_the_readmes_table_is_taken_from_the_page() -> None:
    assert made("comparison.py") in (ROOT / "README.md").read_text(), "python docs/code/comparison.py"
