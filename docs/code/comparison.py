"""The README's table of systems, from docs/comparison.md: `python docs/code/comparison.py` prints it.

What it says of a system is what the page says, with the page's links.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parent.parent / "comparison.md"
SHOWN = (  # columns of the page -> what the README calls them
    ("planned before, and how", "packs planned before"),
    ("in the middle of an epoch", "resumes in an epoch"),
    ("on other numbers of ranks and workers", "on other ranks"),
    ("mixing by weights", "weights"),
)
SYSTEMS = ("lmms_stream", "MosaicML Streaming", "LMMS Engine", "Megatron-Energon", "OLMo-core", "TRL")  # of the README
_REFERENCE = re.compile(r"^\[([\w-]+)\]: (\S+)$", re.MULTILINE)
_TEST = re.compile(r", `(tests/[\w/]+\.py)`")


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The head and the rows of each table of a page, by cells."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line[1:-1].split(" |")] for line in block.splitlines()]
        yield head, rows


def markdown() -> str:
    text = PAGE.read_text(encoding="utf-8")
    urls = dict(_REFERENCE.findall(text))
    cells = {
        (row[0], name): cell
        for head, rows in tables(text)
        for row in rows
        for name, cell in zip(head, row, strict=True)
    }
    lines = [f"| | {' | '.join(name for _, name in SHOWN)} |", f"|---|{'---|' * len(SHOWN)}"]
    for system in SYSTEMS:
        shown = " | ".join(_inline(cells[system, column], urls) for column, _ in SHOWN)
        lines.append(f"| {system} | {shown} |")
    return "\n".join(lines) + "\n"


def _inline(cell: str, urls: dict[str, str]) -> str:
    """A cell with its links as they are from the README: our own cells link to their tests."""
    if test := _TEST.search(cell):
        return re.sub(r"\]\([^)]*\)", f"]({test[1]})", _TEST.sub("", cell))
    return re.sub(r"\]\[([\w-]+)\]", lambda found: f"]({urls[found[1]]})", cell)


if __name__ == "__main__":
    sys.stdout.write(markdown())
