"""What a page tells people to type is typed: every block, in order, in a clean folder."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmms_stream.config import build_config
from lmms_stream.train.run_config import RunConfig

from ..conftest import last_words
from ..jobs.launcher import run_job
from ..processes import run_module
from ..rounds import LONG
from .pages import ROOT, Block, Page, pages
from .session import Session, session

COMMAND_S = 240.0
SHORT = ("README.md", "docs/how/plan.md")  # whose blocks run in short rounds, too
RUN: dict[str, dict[str, Any]] = {
    "dataset": {"remote": "build/chats", "packing_length": 4096, "processor": {"tokenizer": "build/tokenizer"}},
    "model": {"config": {"model_type": "llama"}},
    "train": {"output_dir": "build/run", "global_batch": 8, "max_steps": 100},
}  # what a part of a run's file is added to
ENDS = {"num_train_epochs", "max_tokens"}  # of a run, in place of max_steps
TYPED = [page for page in pages() if any(block.language in ("bash", "python") or block.title for block in page.blocks)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A clean folder, with the repository's examples in it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.mark.parametrize("page", [page for page in TYPED if LONG or page.name in SHORT], ids=lambda page: page.name)
@pytest.mark.timeout(1200)
def test_every_block_of_a_page_runs_as_it_is_written(page: Page, folder: Path, bucket: None) -> None:
    for command in page.setup:
        run(command, folder)
    with session(folder) as python:
        for block in page.blocks:
            run_block(block, folder, python, source=page.name)


def run_block(block: Block, folder: Path, python: Session, *, source: str) -> None:
    if block.title is not None:
        file = folder / block.title
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text)
        if file.suffix in (".sh", ".sbatch"):
            subprocess.run(["bash", "-n", str(file)], check=True, timeout=COMMAND_S)
    elif block.language == "bash":
        for command in block.commands():
            run(command, folder)
    elif block.language == "python":
        python.run(block.text, source=source, line=block.line)


def run(command: str, folder: Path) -> None:
    """As a shell would; programs of ours in processes that have their imports, unless rounds are long."""
    words = shlex.split(command)
    if words[0] == "make":  # each is what this test is part of, or has a test of its own
        return
    if LONG or set(words) & {"|", ">", "&&", "--nproc"}:
        done = run_in_shell(command, folder)
    elif words[0] == "torchrun":  # jobs/test_torchrun.py and jobs/test_launcher.py show what torchrun itself does
        option, number, _, module, *arguments = words[1:]
        assert option == "--nproc-per-node"
        done = run_job(int(number), module, *arguments, timeout_s=COMMAND_S, cwd=folder)
    elif words[0] in ("lmms-stream", "python"):
        program, *arguments = words[1:] if words[0] == "python" else ["lmms_stream", *words[1:]]
        done = run_module(program, *arguments, timeout_s=COMMAND_S, cwd=folder)
    else:
        done = run_in_shell(command, folder)
    assert done.returncode == 0, f"{command}\n{last_words(done.stdout)}\n{last_words(done.stderr)}"


def run_in_shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "200"}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=COMMAND_S,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def fragments() -> list[Any]:
    """Blocks of YAML that are no files: parts of a run's."""
    return [
        pytest.param(block, id=f"{page.name}:{block.line}")
        for page in pages()
        for block in page.blocks
        if block.language == "yaml" and block.title is None
    ]


@pytest.mark.parametrize("block", fragments())
def test_parts_of_a_runs_file_are_ones_that_it_takes(block: Block) -> None:
    part = yaml.safe_load(block.text)
    whole = {section: settings for section, settings in RUN.items() if section != "dataset" or "datasets" not in part}
    if set(part) == {"processor"}:
        part = {"dataset": {**RUN["dataset"], **part}}
    if "train" in part:
        ends = {name: value for name, value in RUN["train"].items() if name != "max_steps"}
        part["train"] = {**(ends if ENDS & set(part["train"]) else RUN["train"]), **part["train"]}
    build_config(RunConfig, {**whole, **part}, source="the page")
