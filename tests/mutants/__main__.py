"""Draw mutants, or run the tests against them: `python -m tests.mutants draw`, `python -m tests.mutants run`.

A run first tries the test that killed a mutant before. Where that test is gone or passes, it tries the tests that
execute the mutant's line (a traced run of all tests finds them), those of its own room first, the quick ones before the
slow ones, and ends at the first that fails. Verdicts are written to build/mutants/ as they fall: a stopped run
continues. `run --write` then writes them into mutants.json; without it, a mutant that was killed before and survives
now is an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

from .copies import copy_project, run_tests
from .operators import COMPILED
from .table import MOST_STRUCK, ROOT, Mutant, draw, load, save
from .tracing import trace

BUILD = ROOT / "build" / "mutants"
PROCESSES = 2
MOST_S = 240.0  # of all tests of a mutant
MOST_TESTS_S = 100.0  # of the tests that are tried, by their seconds in the traced run
TEST_S = 60  # of a test: a fault may wait for ever
SURVIVED = "survived"


def traces(mutants: list[Mutant]) -> dict[str, Any]:
    """Return what trace() returns, from an earlier part of this run if there is one."""
    record = BUILD / "traces.json"
    if record.is_file() and json.loads(record.read_text())["of"] == [mutant.name for mutant in mutants]:
        return dict(json.loads(record.read_text()))
    copy = BUILD / "traced"
    shutil.rmtree(copy, ignore_errors=True)
    traced = {"of": [mutant.name for mutant in mutants], **trace(copy_project(copy), mutants, timeout_s=5400)}
    record.write_text(json.dumps(traced))
    return traced


def tests_of(mutant: Mutant, traced: dict[str, Any]) -> list[str]:
    """Return the tests to try, in order: files of the mutant's own room first, then by their seconds.

    A line without a trace (of a compiled loop, of a class) takes the tests that execute others of its file, and those
    of its room.
    """
    seconds, passed = traced["seconds"], {*traced["passed"]} - {*traced["failed"]}
    room = mutant.room.removeprefix("lmms_stream/").split("/")[0]
    names = set(traced["hits"].get(mutant.name, ()))
    if not names:
        names = {name for name in passed if name.startswith(f"tests/{room}/")}
    files: dict[str, list[str]] = {}
    for name in sorted(names & passed, key=lambda name: seconds.get(name, 0.0)):
        files.setdefault(name.partition("::")[0], []).append(name)
    own = {file: not file.startswith(f"tests/{room}/") for file in files}
    order = sorted(files, key=lambda file: (own[file], min(seconds.get(name, 0.0) for name in files[file])))
    chosen: list[str] = []
    total = 0.0
    for name in [name for file in order for name in files[file]]:
        total += seconds.get(name, 0.0)
        if chosen and total > MOST_TESTS_S:
            total -= seconds.get(name, 0.0)
            continue
        chosen.append(name)
    return chosen


def verdict(mutant: Mutant, copy: Path, tests: list[str]) -> str:
    """Return the test that kills a mutant, or "survived" with the number of tests."""
    path = copy / mutant.file
    data, times = path.read_bytes(), path.stat()
    compiled = copy / "compiled"
    shutil.rmtree(compiled, ignore_errors=True)
    path.write_bytes(mutant.applied(data))
    try:
        status, output = run_tests(
            copy, tests, timeout_s=MOST_S, options=["-x", "--timeout", str(TEST_S)],
            compiled=compiled if COMPILED.search(data.decode()) else None,
        )  # fmt: skip
    finally:
        path.write_bytes(data)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/\S+?)(?: - .*)?$", output, flags=re.MULTILINE)
    if failed:
        return str(failed[0])
    if status == 0:
        return f"{SURVIVED} {len(tests)} tests"
    if status is None:
        return f"{SURVIVED} {len(tests)} tests, of which some did not run in {MOST_S:.0f} s"
    return f"a run that ended with status {status}: {output[-200:]}"


def run() -> dict[str, str]:
    """Return the verdict of each mutant."""
    mutants = [mutant for mutant in load() if not mutant.equivalent]
    BUILD.mkdir(parents=True, exist_ok=True)
    record = BUILD / "verdicts.jsonl"
    verdicts: dict[str, str] = {}
    if record.is_file():
        verdicts = {name: killer for line in record.read_text().splitlines() for name, killer in [json.loads(line)]}
    copies: Queue[Path] = Queue()
    for number in range(PROCESSES):
        shutil.rmtree(BUILD / f"copy-{number}", ignore_errors=True)
        copies.put(copy_project(BUILD / f"copy-{number}"))

    def judge(mutant: Mutant, tests: list[str]) -> None:
        copy, began = copies.get(), time.monotonic()
        try:
            verdicts[mutant.name] = verdict(mutant, copy, tests) if tests else f"{SURVIVED} 0 tests"
        finally:
            copies.put(copy)
        with record.open("a") as file:
            file.write(json.dumps([mutant.name, verdicts[mutant.name]]) + "\n")
        seconds = time.monotonic() - began
        subject = f"{len(verdicts)}/{len(mutants)} {mutant.file} {mutant.operator}"
        sys.stdout.write(f"{subject}: {verdicts[mutant.name]} ({seconds:.0f} s)\n")
        sys.stdout.flush()

    with ThreadPoolExecutor(PROCESSES) as pool:
        known = [mutant for mutant in mutants if mutant.name not in verdicts and mutant.killed_by.startswith("tests/")]
        [*pool.map(lambda mutant: judge(mutant, [mutant.killed_by]), known)]
        waiting = [mutant for mutant in mutants if not verdicts.get(mutant.name, "").startswith("tests/")]
        waiting = [mutant for mutant in waiting if not verdicts.get(mutant.name) or mutant in known]
        if waiting:
            traced = traces(mutants)
            [*pool.map(lambda mutant: judge(mutant, tests_of(mutant, traced)), waiting)]
    return verdicts


def main() -> None:
    if "draw" in sys.argv:
        mutants = draw()
        struck = sum(bool(mutant.equivalent) for mutant in mutants)
        if struck > MOST_STRUCK * len(mutants):
            sys.exit(f"{struck} of {len(mutants)} mutants are struck as equivalent, {MOST_STRUCK:.0%} are the most")
        save(mutants)
        return
    verdicts = run()
    if "--write" in sys.argv:
        save([replace(mutant, killed_by=verdicts.get(mutant.name, "")) for mutant in load()])
    lost = [
        f"{mutant.file} {mutant.operator}: {verdicts[mutant.name]}, was killed by {mutant.killed_by}"
        for mutant in load()
        if mutant.killed_by.startswith("tests/") and not verdicts[mutant.name].startswith("tests/")
    ]
    killed = sum(killer.startswith("tests/") for killer in verdicts.values())
    sys.stdout.write("\n".join([*lost, f"{killed} of {len(verdicts)} mutants are killed"]) + "\n")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
