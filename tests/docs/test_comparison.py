"""The comparison with other libraries: each cell says where it is from, and nothing of it is lost when files move."""

from __future__ import annotations

import importlib.util
import re
from datetime import date
from typing import Any

import pytest

from .pages import DOCS, ROOT, Page
from .test_tables import made

TEXT = (DOCS / "comparison.md").read_text(encoding="utf-8")
REFERENCES = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", TEXT, re.MULTILINE))
NONE = "not found"
OURS = "lmms_stream"
PINNED = r"https://github\.com/[\w-]+/[\w-]+/(?:(?:blob|tree)/(?:v\d+(?:\.\d+)+|[0-9a-f]{40})/\S+|pull/\d+)"


def checked_rows() -> list[list[str]]:
    """Rows of all tables, without heads."""
    lines = [line[2:-2].split(" | ") for line in TEXT.splitlines() if line.startswith("| ") and line[2] != "|"]
    assert len(lines) > 50
    return lines


def rows() -> list[list[str]]:
    """Rows without the column of checks."""
    return [row[:-1] for row in checked_rows()]


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


def version_of(url: str) -> str:
    """Version in a link: a release, the first digits of a commit, or a pull request."""
    parts = url.split("/")
    if parts[5] == "pull":
        return f"#{parts[6]}"
    return parts[6].removeprefix("v") if parts[6].startswith("v") else parts[6][:8]


def test_each_row_has_the_date_of_its_check_and_the_versions_of_its_links() -> None:
    for system, *cells, checked in checked_rows():
        if system == OURS:
            assert checked == "by the tests"
            continue
        day, _, versions = checked.partition(": ")
        assert date(2026, 11, 23) <= date.fromisoformat(day) <= date.today(), f"{system}: {checked}"
        said = {each.split()[-1] for each in versions.split(", ")}
        linked = {version_of(REFERENCES[name]) for cell in cells for name in names(cell)}
        assert said >= linked, f"{system}: {checked} lacks {linked - said}"
        assert versions, f"{system} has no version"


PAGE_OF_TWO_DATES = """
| | formats | checked |
|---|---|---|
| lmms_stream | [MDS](streaming.md) | by the tests |
| Zebra | [rows][z] | 2026-01-01: 1.0 |
| Ant | [rows][a] | 2026-06-30: 2.0 |

| | packs | checked |
|---|---|---|
| Ant | not found | 2026-01-02: 1.9 |
"""


def script() -> Any:
    spec = importlib.util.spec_from_file_location("comparison", DOCS / "code" / "comparison.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("days", "stale"),
    [
        (90, ["Ant: packs (2026-01-02: 1.9)", "Zebra: formats (2026-01-01: 1.0)"]),
        (180, ["Zebra: formats (2026-01-01: 1.0)"]),
        (0, ["Ant: formats (2026-06-30: 2.0)", "Ant: packs (2026-01-02: 1.9)", "Zebra: formats (2026-01-01: 1.0)"]),
    ],
)
def test_rows_older_than_some_days_are_listed_by_system(days: int, stale: list[str]) -> None:
    assert script().stale(PAGE_OF_TWO_DATES, today=date(2026, 7, 1), days=days) == stale


def test_the_command_lists_stale_rows_in_place_of_the_table() -> None:
    lines = made("comparison.py", "--stale", "-1").splitlines()
    assert len(lines) == sum(system != OURS for system, *_ in rows())
    assert lines == sorted(lines, key=lambda line: line.partition(":")[0])


@pytest.mark.parametrize("heading", ["where-was-looked", "what-others-do-that-we-do-not"])
def test_headings_that_others_link_to_are_there(heading: str) -> None:
    assert heading in Page(DOCS / "comparison.md").anchors


def test_the_readmes_table_is_taken_from_the_page() -> None:
    assert made("comparison.py") in (ROOT / "README.md").read_text(), "python docs/code/comparison.py"
