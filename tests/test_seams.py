"""The choice of tests that can be left out."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from .arrows import files, imports, reached_from
from .seams import (
    MOST_COMMITS,
    MOST_CPU_S,
    PARTS,
    ROOT,
    choice,
    choose,
    git,
    over_budget,
    pytest_report_header,
)

SETTINGS = tomllib.loads(PARTS.read_text())
NAMES = SETTINGS.keys() - {"all"}
SOME_CORE = "lmms_stream/plan/short_epochs.py"


def named(*paths: str) -> set[Path]:
    return {ROOT / path for path in paths}


def test_every_path_of_the_parts_exists() -> None:
    paths = [path for part in SETTINGS.values() for kind in part.values() for path in kind]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    for name in NAMES:
        part = SETTINGS[name]
        assert all(any(file.startswith(path) for path in part["tests"]) for file in part["always"]), name


def test_every_door_tool_and_plugin_is_the_code_of_a_part() -> None:
    code = tuple(path for name in NAMES for path in SETTINGS[name]["code"])
    folders = [f"lmms_stream/{folder}" for folder in ("doors", "tools", "plugins")]
    found = [str(each.relative_to(ROOT)) for folder in folders for each in (ROOT / folder).rglob("*.py")]
    assert [each for each in found if not each.startswith(code) and not each.endswith("__init__.py")] == []


def test_no_room_of_the_data_imports_one_of_training() -> None:
    """So that a change of training cannot change the results of tests that are left out."""
    code = tuple(f"{ROOT / path}/" for path in SETTINGS["data"]["code"])
    modules = [name for name, path in files().items() if str(path).startswith(code)]
    reached = {other for name in modules for other in reached_from(name)}
    assert len(modules) > 100
    assert [name for name in sorted(reached) if name.startswith("lmms_stream.train")] == []


def test_the_seam_of_training_holds_each_file_of_the_data_that_it_imports() -> None:
    data, seam = (
        tuple(f"{ROOT / path}" for path in SETTINGS[part][kind]) for part, kind in (("data", "code"), ("train", "seam"))
    )
    used = {files()[other] for name in files() if name.startswith("lmms_stream.train") for other in imports(name)[0]}
    found = sorted(str(path) for path in used if str(path).startswith(data) and path.name != "__init__.py")
    assert len(found) > 20
    assert [path for path in found if not path.startswith(seam)] == []


def test_converters_reach_neither_the_order_of_samples_nor_the_loader() -> None:
    reached = {other for name in files() if name.startswith("lmms_stream.converters") for other in reached_from(name)}
    assert len(reached) > 50
    others = ("lmms_stream.plan", "lmms_stream.loader", "lmms_stream.train")
    assert [name for name in sorted(reached) if name.startswith(others)] == ["lmms_stream.plan.lengths"]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_change_of_a_parts_code_tests_or_seam_runs_its_tests(name: str) -> None:
    part = SETTINGS[name]
    tests = {file for path in part["tests"] for file in ([ROOT / path, *(ROOT / path).rglob("test_*.py")])}
    for path in [*part["code"], *part["tests"], *part["seam"]]:
        changed = path if (ROOT / path).is_file() else f"{path}/deep/new_file.py"
        chosen = choice([changed], since="0" * 40)
        assert name not in chosen.left_out
        assert not tests & chosen.skipped


def test_a_change_of_the_core_alone_leaves_out_parts_but_for_tests_of_their_seams() -> None:
    chosen = choice(["lmms_stream/storage/s3.py"], since="0" * 40)
    assert {"train", "relax", "llama_factory", "families", "tasks", "parallel"} <= {*chosen.left_out}
    assert not {"stores", "mosaicml"} & {*chosen.left_out}
    assert named("tests/rl/test_datasets.py", "tests/parallel/test_tensor_parallel.py") <= chosen.skipped
    assert not named("tests/rl/test_data_source.py", "tests/peers/test_nodes.py") & chosen.skipped
    assert not any("tests/plan" in str(file) or "tests/storage/test_cache" in str(file) for file in chosen.skipped)


def test_a_change_of_training_leaves_out_tests_of_the_data_and_one_of_converters_those_of_training() -> None:
    chosen = choice(["lmms_stream/train/loop.py"], since="0" * 40)
    assert named("tests/plan/test_packing.py", "tests/converters/test_append.py") <= chosen.skipped
    assert not named("tests/train/test_checkpoint.py", "tests/jobs/test_resume.py") & chosen.skipped
    chosen = choice(["converters/sources/json_array.py"], since="0" * 40)
    assert named("tests/train/test_checkpoint.py", "tests/jobs/test_sharding.py") <= chosen.skipped
    assert not named("tests/converters/test_append.py", "tests/jobs/test_training.py") & chosen.skipped


def test_files_and_parts_that_cost_too_much_are_named_with_the_dearest_files() -> None:
    doors = {str(path.relative_to(ROOT)): 10.0 for path in (ROOT / "tests" / "rl").glob("test_*.py")}
    files = {**doors, "tests/plan/test_packing.py": 2000.0, "tests/train/test_model.py": 6000.0}
    whole = sum(files.values())
    assert over_budget(files)[:5] == [
        f"all tests: {whole:.0f} CPU s, {MOST_CPU_S} are the most",
        f"tests/plan/test_packing.py: {2000 / whole:.1%} of all CPU s, 4.5% are the most",
        f"tests/train/test_model.py: {6000 / whole:.1%} of all CPU s, 4.5% are the most",
        f"after a change of lmms_stream/train: {6020 / whole:.1%} of all CPU s, 50.0% are the most",
        "  6000 CPU s tests/train/test_model.py",
    ]
    assert len(doors) > 5


def test_all_tests_run_without_a_record_a_history_or_an_unchanged_frame(tmp_path: Path) -> None:
    assert choose(record=tmp_path / "absent.json").reason == "all tests run: no run of all is recorded"
    record = tmp_path / "full_run.json"
    record.write_text(json.dumps({"commit": "1" * 40}))
    assert choose(record=record).reason == "all tests run: 11111111, where all passed, is not in this history"
    chosen = choice(["pyproject.toml"], since="2" * 40)
    assert chosen.reason == "all tests run: pyproject.toml changed since 22222222, where all passed"
    assert not chosen.skipped


OLD = git("rev-parse", "--verify", f"HEAD~{MOST_COMMITS + 1}")


@pytest.mark.skipif(not OLD, reason="the history is short")
def test_all_tests_run_if_the_record_is_old(tmp_path: Path) -> None:
    record = tmp_path / "full_run.json"
    record.write_text(json.dumps({"commit": OLD[0]}))
    assert f"commits ago, and {MOST_COMMITS} are the most" in choose(record=record).reason


def test_a_run_tells_which_tests_it_leaves_out() -> None:
    assert pytest_report_header().startswith("tests: ")
