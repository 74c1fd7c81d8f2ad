"""Mutants -> verdicts: the first test that fails with each fault.

A run first tries the test that killed a mutant before. Where that test is gone or passes, it tries the tests that
execute the mutant's line (a traced run of all tests finds them), those of its own room first, the quick ones before the
slow ones, and ends at the first that fails. Verdicts and traces are kept in build/mutants/, in a folder for the state
of the code: a stopped run continues.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from .copies import copy_project, run_tests
from .table import ROOT, Mutant
from .tracing import RUNNING, trace

PROCESSES = 2
MOST_S = 240.0  # of all tests of a mutant
MOST_TESTS_S = 100.0  # of the tests that are tried, by their seconds in the traced run
TEST_S = 60  # of a test: a fault may wait for ever
TRACED_S = 5400.0  # of the run of all tests
SURVIVED = "survived"


def state_folder() -> Path:
    """Return the folder of the code as it is now."""
    digest = hashlib.sha256()
    for folder in ("lmms_stream", "converters", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return ROOT / "build" / "mutants" / digest.hexdigest()[:12]


def traces(folder: Path, mutants: list[Mutant]) -> dict[str, Any]:
    """Return the result of trace(), of an earlier part of this run if there is one."""
    record = folder / "traces.json"
    if not record.is_file():
        shutil.rmtree(folder / "traced", ignore_errors=True)
        traced = trace(copy_project(folder / "traced"), mutants, timeout_s=TRACED_S)
        record.write_text(json.dumps(traced))
    return dict(json.loads(record.read_text()))


def tests_of(mutant: Mutant, mutants: list[Mutant], traced: dict[str, Any]) -> list[str]:
    """Return the tests to try, in order: files of the mutant's own room first, then by their seconds.

    A line without a trace (of a compiled loop, of a class) takes the tests that execute others of its file or room.
    """
    hits, seconds = traced["hits"], traced["seconds"]
    of_file = {test for other in mutants if other.file == mutant.file for test in hits.get(other.name, ())}
    of_room = {test for other in mutants if other.room == mutant.room for test in hits.get(other.name, ())}
    names = ({*hits.get(mutant.name, ())} or of_file or of_room) & {*traced["passed"]} - {*traced["failed"]}
    files: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: seconds.get(name, 0.0)):
        files.setdefault(name.partition("::")[0], []).append(name)
    own = f"tests/{mutant.room.removeprefix('lmms_stream/').split('/')[0]}/"
    order = sorted(files, key=lambda file: (not file.startswith(own), seconds.get(files[file][0], 0.0)))
    chosen: list[str] = []
    total = 0.0
    for name in [name for file in order for name in files[file]]:
        if not chosen or total + seconds.get(name, 0.0) <= MOST_TESTS_S:
            total += seconds.get(name, 0.0)
            chosen.append(name)
    return chosen


def verdict(mutant: Mutant, copy: Path, tests: list[str]) -> str:
    """Return the test that kills a mutant, or "survived" with the number of tests."""
    path = copy / mutant.file
    data, times = path.read_bytes(), path.stat()
    (copy / RUNNING).unlink(missing_ok=True)
    options = ["-x", "--timeout", str(TEST_S)]
    path.write_bytes(mutant.applied(data))
    try:
        status, output = run_tests(copy, tests, timeout_s=MOST_S, options=options)
    finally:
        path.write_bytes(data)
        if not path.with_suffix(".pxd").exists():  # compiled loops are compiled again
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, flags=re.MULTILINE)
    if failed:
        return str(failed[0])
    if status == 0:
        return f"{SURVIVED} {len(tests)} tests"
    if status is None:
        return f"{SURVIVED} {len(tests)} tests, of which some did not run in {MOST_S:.0f} s"
    running = copy / RUNNING  # the interpreter crashed in this test, or could not import the tests
    return running.read_text() if running.is_file() else "tests/conftest.py"


def run(mutants: list[Mutant]) -> dict[str, str]:
    """Return the verdict of each mutant, by name."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup ignores it, and tests send it
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "verdicts.jsonl"
    verdicts = dict(map(json.loads, record.read_text().splitlines())) if record.is_file() else {}
    copies: Queue[Path] = Queue()
    for number in range(PROCESSES):
        shutil.rmtree(folder / f"copy-{number}", ignore_errors=True)
        copies.put(copy_project(folder / f"copy-{number}"))

    def judge(mutant: Mutant, tests: list[str]) -> None:
        copy, began = copies.get(), time.monotonic()
        try:
            result = verdict(mutant, copy, tests) if tests else f"{SURVIVED} 0 tests"
        finally:
            copies.put(copy)
        if tests == [mutant.killed_by] and not result.startswith("tests/"):
            return  # others may kill it
        verdicts[mutant.name] = result
        with record.open("a") as file:
            file.write(json.dumps([mutant.name, result]) + "\n")
        subject = f"{len(verdicts)}/{len(mutants)} {mutant.file} {mutant.operator}"
        sys.stdout.write(f"{subject}: {result} ({time.monotonic() - began:.0f} s)\n")
        sys.stdout.flush()

    with ThreadPoolExecutor(PROCESSES) as pool:
        known = [mutant for mutant in mutants if mutant.name not in verdicts and mutant.killed_by.startswith("tests/")]
        [*pool.map(lambda mutant: judge(mutant, [mutant.killed_by]), known)]
        if others := [mutant for mutant in mutants if mutant.name not in verdicts]:
            traced = traces(folder, mutants)
            [*pool.map(lambda mutant: judge(mutant, tests_of(mutant, mutants, traced)), others)]
    return verdicts
