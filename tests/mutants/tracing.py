"""Which tests execute the line of a mutant: traces are written into a copy of the project, and all tests run there.

As a plugin of pytest it keeps the order of the tests that are named, and writes the seconds and results of tests.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from .copies import run_tests
from .table import ROOT, Mutant, edit_of

HIT = """
import os

_done = set()


def hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (number, test) not in _done:
        _done.add((number, test))
        with open({path!r}, "a") as file:
            file.write(f"{{number}}\\t{{test}}\\n")
"""
PROCESSES = "3"
RUNNING = "running.txt"  # holds the name of the test that runs


def write_traces(copy: Path, mutants: list[Mutant]) -> None:
    """Write a call of `hit` next to the line of each mutant that can have one."""
    (copy / "lmms_stream" / "_hit.py").write_text(HIT.format(path=str(copy / "hits.txt")))
    insertions: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for number, mutant in enumerate(mutants):
        edit = edit_of(mutant)
        if edit is None or edit.probe is None:
            continue
        start, end, is_expression = edit.probe
        if is_expression:
            insertions[mutant.file] += [(start, 1, f"(_hit({number}), "), (end, 0, ")[1]")]
        else:
            insertions[mutant.file].append((start, 1, _as_line(number, (ROOT / mutant.file).read_bytes(), start)))
    for file, texts in insertions.items():
        path = copy / file
        data = path.read_bytes()
        for offset, _, text in sorted(texts, reverse=True):
            data = data[:offset] + text.encode() + data[offset:]
        future = b"from __future__ import annotations\n"
        path.write_bytes(data.replace(future, future + b"from lmms_stream._hit import hit as _hit\n", 1))


def _as_line(number: int, data: bytes, start: int) -> str:
    """Return the call as a statement in front of the one at `start`."""
    before = data[data.rfind(b"\n", 0, start) + 1 : start].decode()
    return f"_hit({number}); " if before.strip() else f"_hit({number})\n{before}"


def trace(copy: Path, mutants: list[Mutant], *, timeout_s: float) -> dict[str, object]:
    """Run all tests in a copy; return the tests of each mutant, and the seconds and results of all tests."""
    write_traces(copy, mutants)
    options = ["--numprocesses", PROCESSES, "--dist", "loadfile", "--no-loadscope-reorder"]
    run_tests(copy, ["tests"], timeout_s=timeout_s, options=options)
    hits: dict[str, set[str]] = defaultdict(set)
    for line in (copy / "hits.txt").read_text().splitlines():
        number, _, test = line.partition("\t")
        hits[mutants[int(number)].name].add(test)
    return {
        "hits": {name: sorted(tests - {""}) for name, tests in hits.items()},
        **json.loads((copy / "results.json").read_text()),
    }


class Results:
    """Seconds and results of a run's tests."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []
        self.passed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += round(report.duration, 3)
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.passed and report.when == "call":
            self.passed.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        results = {"seconds": self.seconds, "failed": self.failed, "passed": self.passed}
        Path(session.config.rootpath, "results.json").write_text(json.dumps(results))


def pytest_runtest_logstart(nodeid: str) -> None:
    Path(RUNNING).write_text(nodeid)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the order of the tests of the command line, where tests and not folders are named."""
    order = {name: number for number, name in enumerate(config.args)}
    if any("::" in name for name in order):
        items.sort(key=lambda item: order.get(item.nodeid, len(order)))
