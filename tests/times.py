"""CPU seconds of all that `make test` runs: `python -m tests.times` counts (`make test-times`), `--budget` compares.

A test counts with all processes below its own: ranks, workers, servers. Setup of a fixture counts for the first test
that needs it; the table shows it apart. The whole is counted by the kernel, with processes that outlive their parents:
this process adopts and awaits them. budget.json holds the CPU seconds that each room may take (a folder of tests, or
NOT_TESTS), the limit of their sum, which only falls, and the record of the last count, with its commit.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "build" / "test_times.json"
BUDGET = Path(__file__).with_name("budget.json")
START = "imports, collection and start"  # the whole of pytest without its tests
NOT_TESTS = {  # room -> commands; they find no cache, as in a fresh clone, and mypy writes the cache that a test reads
    "check": ("ruff check --no-cache .", "ruff format --no-cache --check .", "mypy"),
    "compiled": ("python setup.py --quiet build_ext --force --inplace",),
}
ADOPT, ORPHANS_S = 36, 60.0  # PR_SET_CHILD_SUBREAPER; time for processes that outlive a command
SHOWN = 40  # files, and tests
_last = 0.0


def descendants(pid: str = "self") -> Iterator[int]:
    """Processes that a process started, and theirs, by the kernel's lists: psutil reads all processes, in some ms."""
    with suppress(OSError):  # one that ends meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield int(child)
                yield from descendants(child)


def cpu_s() -> float:
    """CPU seconds of this process and of all processes that it started, ended ones too."""
    total = sum(os.times()[:4])
    for child in descendants():
        try:
            times = psutil.Process(child).cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def pytest_collection_finish() -> None:
    """Leave imports and collection out of the first test."""
    global _last
    _last = cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the CPU seconds of a phase to its report, in whichever process it ran."""
    global _last
    report = yield
    now = cpu_s()
    report.cpu_s, _last = now - _last, now  # type: ignore[attr-defined]
    return report


class Times:
    """Sums over the reports of a run."""

    def __init__(self) -> None:
        self.files: dict[str, Counter[str]] = defaultdict(Counter)
        self.tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = getattr(report, "cpu_s", 0.0)
        file = self.files[report.nodeid.partition("::")[0]]
        file["setup" if report.when == "setup" else "test"] += seconds  # type: ignore[assignment]
        file["wall"] += report.duration  # type: ignore[assignment]
        file["tests"] += report.when == "call"
        self.tests[report.nodeid] += seconds  # type: ignore[assignment]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        rows = sorted(self.files.items(), key=lambda row: -row[1]["setup"] - row[1]["test"])
        total = sum(each["setup"] + each["test"] for _, each in rows)
        terminalreporter.section(f"{total:.0f} CPU seconds")
        terminalreporter.line(f"{'cpu s':>8} {'setup':>8} {'wall s':>8} {'tests':>6}  file")
        for name, each in rows[:SHOWN]:
            cpu = each["setup"] + each["test"]
            terminalreporter.line(f"{cpu:8.1f} {each['setup']:8.1f} {each['wall']:8.1f} {each['tests']:6}  {name}")
        terminalreporter.line(f"{'cpu s':>8}  test")
        for name, seconds in self.tests.most_common(SHOWN):
            terminalreporter.line(f"{seconds:8.1f}  {name}")
        RECORD.parent.mkdir(exist_ok=True)
        files = {name: {key: round(value, 2) for key, value in each.items()} for name, each in rows}
        tests = {name: round(seconds, 2) for name, seconds in self.tests.most_common() if seconds >= 0.01}
        RECORD.write_text(json.dumps({"cpu_s": round(total, 1), "files": files, "tests": tests}, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Count in each process; sum in the one that prints."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Times())


def room_of(file: str) -> str:
    """Room of a file of tests: its folder below tests/, or "top"."""
    _, *folders, _ = Path(file).parts
    return folders[0] if folders else "top"


def rooms_of(files: Mapping[str, Mapping[str, float]], *, whole_cpu_s: float) -> dict[str, float]:
    """CPU seconds of each room of tests, and of START. files: figures of each file, as in RECORD."""
    rooms: Counter[str] = Counter()
    for name, figures in files.items():
        rooms[room_of(name)] += figures["setup"] + figures["test"]  # type: ignore[assignment]
    return {**dict(sorted(rooms.items())), START: max(0.0, whole_cpu_s - sum(rooms.values()))}


def counted(command: Sequence[str], **environment: str) -> float:
    """Run a command; return CPU seconds of all its processes. Exit with its status if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment)
    status, deadline = None, float("inf")
    while time.monotonic() < deadline:
        try:
            pid, code = os.waitpid(-1, 0 if status is None else os.WNOHANG)
        except ChildProcessError:  # all have ended
            break
        if pid == process.pid:
            status, deadline = os.waitstatus_to_exitcode(code), time.monotonic() + ORPHANS_S
            process.returncode = status
        elif not pid:
            time.sleep(0.1)
    if status:
        sys.exit(status)
    if left := psutil.Process().children(recursive=True):
        sys.exit(f"{' '.join(command)}: {left} still run, and are not counted: end them in their tests")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def count(pytest_command: Sequence[str]) -> dict[str, float]:
    """CPU seconds of each room."""
    ctypes.CDLL(None).prctl(ADOPT, 1, 0, 0, 0)
    shutil.rmtree(ROOT / ".mypy_cache", ignore_errors=True)
    rooms = {}
    for room, commands in NOT_TESTS.items():
        programs = [[f"{Path(sys.executable).parent}/{word}", *words] for word, *words in map(str.split, commands)]
        rooms[room] = sum(map(counted, programs))
    whole_cpu_s = counted([*pytest_command, "-p", "tests.times"])
    return rooms | rooms_of(json.loads(RECORD.read_text())["files"], whole_cpu_s=whole_cpu_s)


def over_budget(budget: Mapping[str, Any]) -> list[str]:
    """Return a line for each number that is above its limit, and for each room without a budget."""
    budgets, rooms = budget["budgets"], budget["record"]["cpu_s"]
    lines = [
        f"{room}: {cpu_s:.0f} CPU s, {budgets.get(room, 0)} are the most"
        for room, cpu_s in rooms.items()
        if cpu_s > budgets.get(room, 0)
    ]
    if (whole := sum(budgets.values())) > budget["limit"]:
        lines.append(f"the budgets: {whole} CPU s, {budget['limit']} are the most")
    return lines


def main(*words: str) -> None:
    """Count and write the record, or compare the record with the budget."""
    budget = json.loads(BUDGET.read_text())
    if words != ("--budget",):
        changes, commit = (
            subprocess.check_output(["git", *command], cwd=ROOT, text=True).strip()
            for command in (("status", "--porcelain"), ("rev-parse", "HEAD"))
        )
        rooms = {room: round(cpu_s, 1) for room, cpu_s in count(words).items()}
        for room, cpu_s in rooms.items():
            sys.stdout.write(f"{cpu_s:8.1f} of {budget['budgets'].get(room, 0):5} CPU s  {room}\n")
        sys.stdout.write(f"{sum(rooms.values()):8.1f} of {budget['limit']:5} CPU s\n")
        if changes:
            sys.exit(f"files differ from the commit ({changes.splitlines()[0]}): commit, and count again for a record")
        budget["record"] = {"commit": commit, "cpu_s": rooms}
        BUDGET.write_text(json.dumps(budget, indent=1) + "\n")
    if lines := over_budget(budget):
        sys.exit("\n".join(["tests cost more than their budget (tests/budget.json):", *lines]))


if __name__ == "__main__":
    main(*sys.argv[1:])
