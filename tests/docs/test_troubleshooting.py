"""Every message that the page of errors names is one of the code's."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from ..arrows import trees
from .pages import DOCS, Page

MESSAGES = re.findall(r"^#### `(.+)`$", Page(DOCS / "troubleshooting.md").text, re.MULTILINE)


@cache
def texts() -> list[str]:
    """All texts of the code, with … where a value is put in."""
    found = []
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_the_page_names_many() -> None:
    assert len(MESSAGES) > 20


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_one_of_the_code(message: str) -> None:
    pieces = [piece for piece in message.split("…") if piece.strip(" ()")]
    pattern = re.compile(".*".join(re.escape(piece) for piece in pieces), re.DOTALL)
    assert any(pattern.search(text) for text in texts()), f"no error says {message!r}"
