"""A page of docs/ -> its blocks of code in order, its headings, its links.

What a block is says its fence: `bash` is typed, line by line; `python` is run, all of a page in one namespace; a block
with a title is a file of that name; `yaml` without one is a part of a run's YAML file. Others are there to look at,
`sh` among them (commands of a cluster, which tests/cluster gives in its own way) and `py` (with objects of the
reader's). What a page needs beforehand is in its head: `setup`, commands.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
_FENCE = re.compile(r'^( *)```(\w*)(?: title="([^"]+)")?[^\n]*\n(.*?)^\1```', re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)(?:\{[^}]*\})?")
_HEADING = re.compile(r"^#{1,6} (.+?)(?: *\{#([\w-]+)\})?$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Code of a page. line: that of its first line of code, counted from 1."""

    language: str
    title: str | None
    text: str
    line: int

    def commands(self) -> Iterator[str]:
        """Of a bash block: a command a line, where a backslash at its end goes on with the next."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line.strip()


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def setup(self) -> list[str]:
        """Commands that make what the page's blocks read."""
        return list(self._head.get("setup", []))

    @property
    def blocks(self) -> list[Block]:
        text = self.text
        return [
            Block(
                language=found[2],
                title=found[3],
                text=textwrap.dedent(found[4]),
                line=text.count("\n", 0, found.start(4)) + 1,
            )
            for found in _FENCE.finditer(text)
        ]

    @property
    def prose(self) -> str:
        """Without blocks of code."""
        return _FENCE.sub("", self.text)

    @property
    def links(self) -> list[str]:
        """Where links and pictures point to."""
        return [found[1] or found[2] for found in _LINK.finditer(re.sub(r"`[^`\n]*`", "", self.prose))]

    @property
    def anchors(self) -> set[str]:
        """Names of its headings, as browsers and repositories make them."""
        return {found[2] or slug(found[1]) for found in _HEADING.finditer(self.prose)}

    @property
    def _head(self) -> dict[str, Any]:
        found = re.match(r"---\n(.*?)\n---\n", self.text, re.DOTALL)
        return yaml.safe_load(found[1]) if found else {}


def slug(heading: str) -> str:
    """The anchor of a heading, as Python-Markdown makes it."""
    text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def pages() -> list[Page]:
    """All of docs/, and what lies beside it for people to read."""
    others = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
    return [Page(path) for path in (*others, *sorted(DOCS.rglob("*.md")))]
