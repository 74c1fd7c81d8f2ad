"""CPU seconds of each test and file, in a run of pytest with `-p tests.times`: what `make test-times` prints.

A test counts with all processes below its own: ranks, workers, servers. Setup of a fixture counts for the first test
that needs it; the table shows it apart.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

RECORD = Path(__file__).parent.parent / "build" / "test_times.json"
SHOWN = 40  # files, and tests
_last = 0.0


def cpu_s() -> float:
    """CPU seconds of this process and of all processes that it started, ended ones too."""
    total = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


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
    global _last
    _last = cpu_s()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Times())
