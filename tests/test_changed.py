"""The choice of tests for changed files, compared with the files that tests run, and the budget of tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .arrows import ROOT
from .changed import ALWAYS, FOR_ALL, chosen, is_test_file, main, paths, reaching_tests
from .recorded import RECORDED
from .rounds import in_long_rounds
from .times import BUDGET, NOT_TESTS, START, over_budget, room_of, rooms_of

# File that changes -> files and folders of tests that must run, files and folders that need not.
EXAMPLES = {
    "lmms_stream/train/checkpoint/saving.py": (
        [
            "tests/demo/test_demo.py",
            "tests/loader/test_elastic.py",
            "tests/jobs/test_t",
            "tests/train/test_resuming.py",
        ],
        ["tests/plan/", "tests/storage/test_locks.py"],
    ),
    "lmms_stream/plan/order.py": (
        ["tests/mds/test_d", "tests/loader/test_loader.py", "tests/jobs/test_resume.py", "tests/plan/test_order.py"],
        ["tests/storage/test_locks.py"],
    ),
    "converters/rows/mapper.py": (
        ["tests/converters/rows/test_mapper.py", "tests/mds/test_measuring.py", "tests/jobs/test_training.py"],
        ["tests/plan/test_packing.py", "tests/storage/test_locks.py"],
    ),
    "lmms_stream/storage/s3.py": (
        ["tests/storage/test_outages.py", "tests/mds/test_network_faults.py", "tests/docs/test_pages.py"],
        ["tests/plan/test_packing.py"],
    ),
    "lmms_stream/doors/relax/rollouts.py": (
        ["tests/rl/test_rollouts.py", "tests/rl/test_relax_names.py"],
        ["tests/mds/test_lengths.py"],
    ),
    "tests/jobs/slow_job.py": (["tests/jobs/test_slow_parts.py"], ["tests/jobs/test_mesh.py"]),
    "tests/mds/programs/foundry.py": (["tests/mds/test_programs.py"], ["tests/mds/test_lengths.py"]),
    "tests/plan/mosaic_orders.json": (["tests/plan/test_mosaic_order.py"], ["tests/plan/test_packing.py"]),
    "lmms_stream/tools/watch/page.html": (["tests/watch/test_watch.py"], ["tests/plan/test_packing.py"]),
    "examples/own_loop.py": (["tests/docs/test_pages.py"], ["tests/plan/test_packing.py"]),
    "docs/extending.md": (["tests/test_registry.py", "tests/docs/test_links.py"], ["tests/plan/test_packing.py"]),
}
SAMPLES = (
    "tests/plan/test_cursor.py", "tests/converters/sources/test_text_lines.py", "tests/loader/test_collate.py",
    "tests/cli/test_help.py", "tests/rl/test_rollouts.py", "tests/mds/test_streams.py",
    "tests/processors/test_stops.py", "tests/datasets/test_names.py", "tests/llama_factory/test_described.py",
    "tests/train/test_schedules.py", "tests/ledger/test_ledger.py", "tests/converters/rows/test_mapper.py",
    "tests/jobs/test_mesh.py", "tests/jobs/test_agreement.py", "tests/jobs/test_slow_parts.py",
)  # fmt: skip


@pytest.mark.parametrize("path", EXAMPLES)
def test_a_change_runs_the_tests_that_it_can_break(path: str) -> None:
    needed, spared = EXAMPLES[path]
    tests, cause = chosen([path])
    assert not cause
    for start in needed:
        below = [test for test in paths() if is_test_file(test) and test.startswith(start)]
        assert below
        assert [test for test in below if test not in tests] == [], start
    assert [test for test in tests if test.startswith(tuple(spared)) and test not in ALWAYS] == []


@pytest.mark.parametrize("path", [*sorted(FOR_ALL), "tests/mds/conftest.py", "lmms_stream/removed.py"])
def test_all_tests_run_for_files_of_all_and_for_files_that_no_test_reaches(path: str) -> None:
    tests, cause = chosen([path, "docs/extending.md"])
    assert cause == path
    assert {*tests} == {*filter(is_test_file, paths())}


def test_resume_elasticity_exactly_once_the_demo_and_the_examples_always_run() -> None:
    assert {*ALWAYS} <= paths()
    assert chosen(["tests/plan/test_removed.py"]) == ({*ALWAYS}, "")
    assert {*ALWAYS} < {*chosen(["tests/plan/test_packing.py"])[0]}


def test_every_module_of_the_package_is_reached() -> None:
    modules = {path for path in paths() if path.startswith(("lmms_stream/", "converters/")) and path.endswith(".py")}
    assert len(modules) > 400
    assert modules - reaching_tests().keys() == set()


def test_the_first_and_last_line_say_that_tests_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    assert main("HEAD", sys.executable, "-c", "print('between')") == 0
    first, between, last = capfd.readouterr().out.splitlines()
    assert first == last
    assert first.startswith("make test-changed: ")
    assert first.endswith("; make test runs all")
    assert between == "between"


def test_an_unknown_base_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"git diff .* no-such-commit: (.|\n)*; make test needs no history"):
        main("no-such-commit")


def test_times_counts_rooms_and_compares_them_with_the_budget() -> None:
    files = {"tests/plan/test_a.py": {"setup": 1.0, "test": 2.0}, "tests/test_b.py": {"setup": 0.5, "test": 4.0}}
    rooms = rooms_of(files, whole_cpu_s=10.0)
    assert rooms == {"plan": 3.0, "top": 4.5, START: 2.5}
    budget = {"limit": 10, "budgets": {"plan": 3, "top": 4, START: 4}, "record": {"cpu_s": {**rooms, "rl": 1.0}}}
    assert over_budget(budget) == [
        "top: 4 CPU s, 4 are the most",
        "rl: 1 CPU s, 0 are the most",
        "the budgets: 11 CPU s, 10 are the most",
    ]


def test_each_folder_of_tests_has_a_budget() -> None:
    budgets = json.loads(BUDGET.read_text())["budgets"]
    assert {room_of(path) for path in paths() if is_test_file(path)} | {*NOT_TESTS, START} == budgets.keys()


ORPHAN = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; [*iter(lambda: time.process_time() < 1, False)]"])
"""
COUNT = f"""
import ctypes, sys
from tests.times import ADOPT, counted
ctypes.CDLL(None).prctl(ADOPT, 1, 0, 0, 0)
print(counted([sys.executable, "-c", {ORPHAN!r}]))
"""


def test_times_counts_a_process_that_outlives_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert float(done.stdout) >= 1, done.stderr


@in_long_rounds
@pytest.mark.timeout(900)
@pytest.mark.parametrize("test", SAMPLES)
def test_no_function_runs_in_a_file_that_the_choice_does_not_reach(test: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.recorded", test]
    environment = {**os.environ, RECORDED: str(tmp_path / "recorded"), "LMMS_STREAM_ROUNDS": "short"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout
    names = {*(tmp_path / "recorded").read_text().split()} - {"tests/recorded.py"}
    recorded = {str((ROOT / name).resolve().relative_to(ROOT)) for name in names}
    assert test in recorded
    # Functions that run in each process that forks, if tests/preloaded.py has imported their files.
    recorded -= {path for path in recorded if "os.register_at_fork(" in (ROOT / path).read_text()}
    assert [path for path in sorted(recorded) if test not in reaching_tests().get(path, ())] == []
