"""Parts of other packages: the package of docs/extending.md is installed, and each of its parts is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from lmms_stream import registry
from lmms_stream.cli.main import COMMANDS
from lmms_stream.errors import ConfigError
from lmms_stream.processes.engine import ENGINES
from lmms_stream.processors.families.registry import FAMILIES
from lmms_stream.storage.storage import STORES
from lmms_stream.train.tasks.registry import TASKS

from .docs.pages import DOCS, Page
from .forks import Ended, command, limited, run_forks

pytestmark = limited
CONVERT_AND_READ = """
import lmms_stream
from lmms_stream.__main__ import main
assert not main("convert old.riddles home://riddles --engine here --workers 1".split())
print(*(row["text"] for row in lmms_stream.StreamingDataset(local="riddles")[:]))
"""
LINES = "moon = it shines at night\nrain = it falls and is not hurt\n"
PARTS = """
import json
from lmms_stream.processors.families.registry import FAMILIES, family_of_model
from lmms_stream.train.tasks.registry import build_task
task = build_task("focal", {"gamma": 1})
import torch
losses = task.of_tokens(torch.tensor([0.0, 100.0]))
print(json.dumps([family_of_model("riddle_vlm").name, FAMILIES.origin("RiddleProcessor"), losses.tolist()]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, installed in `site`, and a file of its format."""
    folder = tmp_path_factory.mktemp("package")
    for block in Page(DOCS / "extending.md").blocks:
        if block.title:
            (folder / block.title).parent.mkdir(exist_ok=True)
            (folder / block.title).write_text(block.text)
    (folder / "old.riddles").write_text(LINES)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(folder / "site"), str(folder / "riddles")], check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def ends(folder: Path) -> dict[str, Ended]:
    """The end of each script in a process that has the package."""
    path = os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    scripts = {
        "convert": CONVERT_AND_READ,
        "parts": PARTS,
        "solve": command("solve", "moon"),
        "help": command("--help"),
    }
    environment = {**os.environ, "PYTHONPATH": path, "HOME": str(folder)}
    return run_forks(scripts, folder, imports=["numpy"], environment=environment)


def test_a_format_a_kind_of_rows_a_store_and_an_engine_of_another_package(ends: dict[str, Ended], folder: Path) -> None:
    assert ends["convert"].status == 0, ends["convert"].stderr
    assert ends["convert"].stdout.splitlines()[-1:] == ["moon? it shines at night! rain? it falls and is not hurt!"]
    description = json.loads((folder / "riddles/_lmms/dataset.json").read_text())
    assert description["schema"] == "text"


def test_a_task_and_a_family_of_another_package(ends: dict[str, Ended]) -> None:
    assert ends["parts"].status == 0, ends["parts"].stderr
    assert json.loads(ends["parts"].stdout) == ["Riddle VLM", "riddles 1.0", [0.0, 100.0]]


def test_a_command_of_another_package_is_in_the_overview(ends: dict[str, Ended]) -> None:
    assert ends["solve"].stdout == "moon is solved\n", ends["solve"].stderr
    assert "added by other packages:\n  solve" in ends["help"].stdout, ends["help"].stderr


@pytest.mark.parametrize("parts", [TASKS, FAMILIES, STORES, ENGINES, COMMANDS], ids=lambda parts: str(parts.group))
def test_each_part_of_ours_can_be_imported(parts: registry.Registry[Any]) -> None:
    assert all(callable(parts[name]) or parts[name].model_types for name in parts.ours)


def test_each_family_stands_under_all_its_names_and_no_others() -> None:
    for name, family in FAMILIES.items():
        assert name in (*family.model_types, *family.processor_classes)
    for family in FAMILIES.values():
        assert {*family.model_types, *family.processor_classes} <= set(FAMILIES)


def test_a_part_that_cannot_be_used_is_an_error_that_names_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_part.py").write_text("raise ValueError('no loss')")
    monkeypatch.syspath_prepend(tmp_path)
    group = "lmms_stream.tasks"
    installed: list[EntryPoint] = []
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: EntryPoints(installed))

    def parts(*pairs: tuple[str, str]) -> registry.Registry[Any]:
        installed[:] = [EntryPoint(name, value, group) for name, value in pairs]
        registry._entry_points.cache_clear()
        return registry.Registry("tasks", {"causal": "train.tasks.causal:CausalLanguageModelling"})

    try:
        with pytest.raises(ConfigError, match=r"'mine' of lmms_stream.tasks is absent_module:Mine of .* cannot be imp"):
            parts(("mine", "absent_module:Mine"))["mine"]
        with pytest.raises(ConfigError, match=r"'mine' .* cannot be imported \(ValueError: no loss\): correct that"):
            parts(("mine", "broken_part:Mine"))["mine"]
        with pytest.raises(
            ConfigError, match=r"adds 'causal' to lmms_stream.tasks, but lmms_stream itself has this name"
        ):
            list(parts(("causal", "os:path")))
        with pytest.raises(
            ConfigError, match=r"os:path and os:sep both add 'mine' to lmms_stream.tasks: uninstall one"
        ):
            list(parts(("mine", "os:path"), ("mine", "os:sep")))
        with pytest.raises(ConfigError, match=r"'mine' .* is os:sep of .*, a str, and must be a function or a class"):
            parts(("mine", "os:sep"))["mine"]
        assert parts(("mine", "os:getcwd"))["mine"] is os.getcwd
    finally:
        registry._entry_points.cache_clear()
