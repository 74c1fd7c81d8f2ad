"""What an ordinary `pip install` of the project holds."""

from __future__ import annotations

import tomllib
from pathlib import Path

from .arrows import ROOT, files

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_folder_of_the_code_is_a_package_that_is_installed() -> None:
    folders = {module.rpartition(".")[0] if path.name != "__init__.py" else module for module, path in files().items()}
    assert sorted(SETTINGS["packages"]) == sorted(folders)


def test_every_other_file_of_the_code_is_installed_with_it() -> None:
    there = {
        path.relative_to(ROOT)
        for folder in ("lmms_stream", "converters")
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and path.suffix not in (".py", ".so")  # libraries are compiled from sources by setup.py
        and "__pycache__" not in path.parts
        and "lmms_stream/converters" not in str(path)  # the link for type checkers
    }
    installed = {
        Path(*package.split("."), name) for package, names in SETTINGS["package-data"].items() for name in names
    }
    assert (ROOT / "MANIFEST.in").read_text() == "recursive-include lmms_stream *.pxd\n"
    assert {path for path in there if path.suffix != ".pxd"} == installed
