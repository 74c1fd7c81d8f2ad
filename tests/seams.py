"""Tests that `make test` leaves out (seams.toml): `python -m tests.seams` prints them.

A part is left out if no file of its code, tests or seam changed since the commit of full_run.json, at which
`make test-all` passed. All tests run without a history of commits, and if that commit is older than MOST_COMMITS.
`python -m tests.seams --record` writes full_run.json after such a run, and `--budget` fails if the tests of that run
took more CPU seconds, or shares of them, than they may.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PARTS = Path(__file__).with_suffix(".toml")
RECORD = Path(__file__).with_name("full_run.json")
TIMES = ROOT / "build" / "test_times.json"  # of times.py
MOST_COMMITS = 50
MOST_CPU_S = 2600  # of all tests; these limits only fall
# Shares do not depend on the machine.
MOST_OF_FILE = 0.045  # largest share of a file
MOST_OF_PART = {"train": 0.5, "data": 0.45, "converters": 0.35}  # of the tests that run after a change of this part
DEAREST = 20  # files to name


class Choice(NamedTuple):
    """left_out: parts whose tests do not run, and files of tests that do not. reason: of the choice, in words."""

    left_out: tuple[str, ...]
    skipped: frozenset[Path]
    reason: str


def git(*words: str) -> list[str]:
    """Lines that git prints; none if it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


@cache
def choose(*, record: Path = RECORD) -> Choice:
    """Return the choice for the files as they are."""
    if not record.is_file():
        return Choice((), frozenset(), "all tests run: no run of all is recorded")
    commit = json.loads(record.read_text())["commit"]
    if git("cat-file", "-t", commit) != ["commit"]:
        return Choice((), frozenset(), f"all tests run: {commit[:8]}, where all passed, is not in this history")
    commits = git("rev-list", f"{commit}..HEAD")
    if len(commits) > MOST_COMMITS:
        return Choice(
            (), frozenset(), f"all tests run: all passed {len(commits)} commits ago, and {MOST_COMMITS} are the most"
        )
    changed = {*git("diff", "--name-only", "--no-renames", commit), *git("ls-files", "--others", "--exclude-standard")}
    return choice(changed - {str(RECORD.relative_to(ROOT))}, since=commit)


def choice(changed: Iterable[str], *, since: str) -> Choice:
    """Return the choice for files that changed since a commit."""
    changed = sorted(changed)
    parts = tomllib.loads(PARTS.read_text())
    if causes := _below(changed, parts.pop("all")["seam"]):
        return Choice((), frozenset(), f"all tests run: {causes[0]} changed since {since[:8]}, where all passed")
    left_out = tuple(
        name for name, part in parts.items() if not _below(changed, [*part["code"], *part["tests"], *part["seam"]])
    )
    skipped = {file for name in left_out for file in _files(parts[name]["tests"])}
    for part in parts.values():
        skipped -= {*_files(part["always"])}
    for name in parts.keys() - {*left_out}:
        skipped -= {*_files(parts[name]["tests"])}
    reason = f"nothing of these changed since {since[:8]}, where all passed: " + ", ".join(left_out)
    return Choice(left_out, frozenset(skipped), reason if left_out else "all tests run: each part changed")


def _below(changed: Iterable[str], paths: Iterable[str]) -> list[str]:
    """Changed files that are, or are below, one of the paths."""
    return [each for each in changed for path in paths if each == path or each.startswith(f"{path}/")]


def _files(paths: Iterable[str]) -> set[Path]:
    found: set[Path] = set()
    for path in paths:
        whole = ROOT / path
        found |= {*whole.rglob("test_*.py")} if whole.is_dir() else {whole}
    return found


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files of parts that did not change."""
    return True if collection_path in choose().skipped else None


def pytest_report_header() -> str:
    """Tell what is left out, and why."""
    today = choose()
    left_out = f"{len(today.skipped)} files of tests are left out: " if today.skipped else ""
    return f"tests: {left_out}{today.reason}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell it again at the end, where it is read."""
    if choose().skipped:
        terminalreporter.line(f"{pytest_report_header()}; make test-all runs all")


def record() -> None:
    """Write the commit, at which all tests passed, and the CPU seconds of each file."""
    if changes := git("status", "--porcelain"):
        sys.exit(f"files differ from the commit, {changes[0].strip()}: commit them, and run make test-all again")
    times = json.loads(TIMES.read_text())
    files = {name: round(each["setup"] + each["test"], 1) for name, each in times["files"].items()}
    (commit,) = git("rev-parse", "HEAD")
    RECORD.write_text(json.dumps({"commit": commit, "cpu_s": times["cpu_s"], "files": files}, indent=1) + "\n")
    sys.stdout.write(f"all tests passed at {commit[:8]}: commit {RECORD.relative_to(ROOT)}\n")


def over_budget(files: Mapping[str, float]) -> list[str]:
    """Return what is above the budget, a line each, and the dearest files. files: CPU seconds of each file."""
    whole = sum(files.values())
    found = [f"all tests: {whole:.0f} CPU s, {MOST_CPU_S} are the most"] if whole > MOST_CPU_S else []
    found += [
        f"{name}: {cpu_s / whole:.1%} of all CPU s, {MOST_OF_FILE:.1%} are the most"
        for name, cpu_s in files.items()
        if cpu_s > MOST_OF_FILE * whole
    ]
    for part, most in MOST_OF_PART.items():
        (code, *_) = tomllib.loads(PARTS.read_text())[part]["code"]
        skipped = {str(path.relative_to(ROOT)) for path in choice([f"{code}/any.py"], since="0" * 40).skipped}
        total = sum(cpu_s for name, cpu_s in files.items() if name not in skipped)
        if total > most * whole:
            found.append(f"after a change of {code}: {total / whole:.1%} of all CPU s, {most:.1%} are the most")
    dearest = sorted(files.items(), key=lambda item: -item[1])[:DEAREST] if found else []
    return found + [f"{cpu_s:6.0f} CPU s {name}" for name, cpu_s in dearest]


def check_budget() -> None:
    if RECORD.is_file() and (lines := over_budget(json.loads(RECORD.read_text())["files"])):
        sys.exit("\n".join(["tests cost more than their budget:", *lines]))


if __name__ == "__main__":
    if "--record" in sys.argv:
        record()
    elif "--budget" in sys.argv:
        check_budget()
    else:
        today = choose()
        sys.stdout.write(
            "\n".join([today.reason, *sorted(str(file.relative_to(ROOT)) for file in today.skipped)]) + "\n"
        )
