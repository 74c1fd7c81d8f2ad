"""The README's table of systems, from docs/comparison.md: `python docs/code/comparison.py` prints it.

Cells and links are the page's. `--stale [DAYS]` instead prints the rows that were checked more than DAYS days ago
(default 90), by system.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from datetime import date, timedelta
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
CHECKED = "checked"  # column with the date of the last check, and versions
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
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


def stale(text: str, *, today: date, days: int) -> list[str]:
    """Return a line for each row of a page that was checked more than `days` days before today, by system.

    Rows without a date, checked by tests, are not listed.
    """
    found = []
    for head, rows in tables(text):
        for row in rows:
            checked = row[head.index(CHECKED)]
            day = _DATE.match(checked)
            if day and date.fromisoformat(day[0]) < today - timedelta(days=days):
                found.append(
                    (row[0], f"{row[0]}: {'; '.join(name for name in head[1:] if name != CHECKED)} ({checked})")
                )
    return [line for _, line in sorted(found, key=lambda each: each[0])]


def _inline(cell: str, urls: dict[str, str]) -> str:
    """A cell with its links as they are from the README: our own cells link to their tests."""
    if test := _TEST.search(cell):
        return re.sub(r"\]\([^)]*\)", f"]({test[1]})", _TEST.sub("", cell))
    return re.sub(r"\]\[([\w-]+)\]", lambda found: f"]({urls[found[1]]})", cell)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the README's table of systems, from docs/comparison.md.")
    parser.add_argument(
        "--stale", metavar="DAYS", type=int, nargs="?", const=90,
        help="print the rows that were checked more than DAYS days ago (default: 90), by system",
    )  # fmt: skip
    days = parser.parse_args().stale
    if days is None:
        sys.stdout.write(markdown())
    else:
        lines = stale(PAGE.read_text(encoding="utf-8"), today=date.today(), days=days)
        sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
