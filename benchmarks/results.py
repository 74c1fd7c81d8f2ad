"""Write the figures of results.json into the tables of README.md and docs/numbers.md.

An entry has a figure, the figures next to it, the command that printed them, the commit, date and machine of that
measurement, and the paths with the measured code. An entry with `readme` is also a row of README.md.

    python benchmarks/results.py          write both tables
    python benchmarks/results.py --check  fail for other tables; name the commands whose script or code changed since
    python benchmarks/results.py --due    fail for changed code, too: before a release
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
Result = Mapping[str, Any]
HEADS = {
    "docs/numbers.md": ("| measurement | result | for comparison | measured |", "|---|---|---|---|"),
    "README.md": ("| | measured | the peer's |", "|---|---|---|"),
}


def results() -> list[Result]:
    made: list[Result] = json.loads((ROOT / "benchmarks/results.json").read_text(encoding="utf-8"))
    return made


def rows(page: str, given: Sequence[Result]) -> list[str]:
    """Rows of a page's table."""
    if page == "README.md":
        return [_row(each["readme"]) for each in given if "readme" in each]
    return [
        _row([each["measurement"], each["result"], each["comparison"], f"`{script_of(each)}`, {each['date']}"])
        for each in given
    ]


def _row(cells: Sequence[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def script_of(result: Result) -> str:
    return str(result["command"]).removeprefix("python benchmarks/")


def written(page: str, text: str, given: Sequence[Result]) -> str:
    """Return the text of a page with the rows of its table; rows of README.md without figures stay."""
    head = "\n".join(HEADS[page]) + "\n"
    before, found, behind = text.partition(head)
    if not found:
        raise SystemExit(f"{page} has no table with the head {head!r}: restore it")
    table, space, after = behind.partition("\n\n")
    others = [row for row in table.split("\n") if page == "README.md" and row.endswith("| | |")]
    return before + head + "\n".join([*rows(page, given), *others]) + space + after


def due(given: Sequence[Result]) -> list[str] | None:
    """Return the commands whose script or measured code changed after their figures; None without the history."""
    changed: dict[str, None] = {}
    for result in given:
        paths = ["benchmarks/" + script_of(result).split(" ")[0], *result["paths"]]
        log = subprocess.run(
            ["git", "log", "-1", "--format=%h", f"{result['commit']}..HEAD", "--", *paths],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        if log.returncode:
            return None
        if log.stdout.strip():
            changed[result["command"]] = None
    return [*changed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--due", action="store_true", help="write nothing; fail for figures of changed code")
    args = parser.parse_args()
    given = results()
    for page in HEADS:
        text = (ROOT / page).read_text(encoding="utf-8")
        made = written(page, text, given)
        if args.check or args.due:
            if made != text:
                raise SystemExit(f"{page} has other figures than benchmarks/results.json: python benchmarks/results.py")
        else:
            (ROOT / page).write_text(made, encoding="utf-8")
    changed = due(given)
    if changed:
        scripts = " ".join(dict.fromkeys(command.split("/")[1].split(" ")[0] for command in changed))
        print(f"figures of changed code, measured again before a release: {scripts}")
    if args.due and changed != []:
        raise SystemExit(f"{len(changed or [])} commands are due" if changed else "the history of git is missing")


if __name__ == "__main__":
    main()
