"""Every link of a page leads somewhere: to a file of the repository, a heading of a page, or the web."""

from __future__ import annotations

import pytest

from .pages import ROOT, Page, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Page) -> None:
    wrong = [link for link in page.links if not _leads(page, link)]
    assert wrong == []


def _leads(page: Page, link: str) -> bool:
    if link.startswith(("http://", "https://")):
        return True  # no network here
    path, _, anchor = link.partition("#")
    target = (page.path.parent / path).resolve() if path else page.path
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or target.suffix != ".md" or anchor in Page(target).anchors
