"""Every link of a page leads somewhere: to a file of the repository, a heading of a page, or the web."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from .pages import ROOT, Page, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Page) -> None:
    wrong = [link for link in page.links if not _leads(page, link)]
    assert wrong == []


def test_tests_that_pages_name_exist() -> None:
    text = "".join(page.path.read_text() for page in pages())
    named = re.findall(r"`(tests/\w[\w/]*\.py)(?:::(\w+))?`", text)
    assert len(named) > 20
    assert [(path, name) for path, name in named if name not in _tests_of(path)] == []


@cache
def _tests_of(path: str) -> set[str]:
    """Names of the tests of a file, and "" for the file itself; nothing where it is absent."""
    file = ROOT / Path(path)
    return {"", *re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)} if file.exists() else set()


def _leads(page: Page, link: str) -> bool:
    if link.startswith(("http://", "https://")):
        return True  # no network here
    path, _, anchor = link.partition("#")
    target = (page.path.parent / path).resolve() if path else page.path
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or target.suffix != ".md" or anchor in Page(target).anchors
