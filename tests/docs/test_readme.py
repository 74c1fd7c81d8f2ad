"""The README is short, and begins with the two commands; CONTRIBUTING has the map of the code."""

from __future__ import annotations

import re
import shlex
import subprocess

from tests.arrows import files

from .pages import ROOT, Page

MOST_LINES = 120


def test_the_readme_is_a_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


def test_its_first_block_is_the_makefiles_commands() -> None:
    first = next(block for block in Page(ROOT / "README.md").blocks if block.language == "bash")
    assert list(first.commands()) == ["make demo", "make test"]
    for command in first.commands():
        subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True, timeout=60)


def test_every_folder_of_the_tree_is_named() -> None:
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("## Where things are")[1].split("##")[0]
    named = set(re.findall(r"(?:converters|lmms_stream)(?:/\w+)*(?=/)", tree))
    assert named == {str(path.parent.relative_to(ROOT)) for path in files().values()}


def test_every_file_that_the_map_and_the_recipes_name_is_there() -> None:
    named = re.findall(r"`((?:[\w.]+/)+(?:[\w.]+\.\w+)?)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 30
    rooms = [ROOT, ROOT / "lmms_stream"]  # paths below the package are named without it in the way of a step
    assert [name for name in named if not any((room / name).exists() for room in rooms)] == []
