"""Compiled loops: of their present sources, by one compiler, and without a compilation at the first call."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from .compiled import ROOT, outdated

FOLDERS = ("benchmarks", "converters", "examples", "lmms_stream", "tests")
COMPILERS = re.compile(r"^ *(?:from|import) (?:numba|llvmlite)\b", re.MULTILINE)


def test_no_file_imports_numba() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 900
    assert [path for path in files if COMPILERS.search(path.read_text())] == []


def test_tests_run_with_the_loops_of_the_present_sources(tmp_path: Path) -> None:
    assert outdated(ROOT) == []
    folder = tmp_path / "lmms_loops"
    folder.mkdir()
    for name, seconds in [("old.py", 1), ("old.pxd", 3), ("old.abi3.so", 2), ("new.pxd", 1), ("new.py", 2)]:
        (folder / name).touch()
        os.utime(folder / name, (seconds, seconds))
    assert outdated(tmp_path) == ["lmms_loops/new.pxd", "lmms_loops/new.py", "lmms_loops/old.pxd"]
    (folder / "new.abi3.so").touch()
    os.utime(folder / "old.pxd", (1, 1))
    assert outdated(tmp_path) == []


def test_python_without_headers_is_named_with_the_remedy() -> None:
    script = "import runpy, sysconfig; sysconfig.get_path = lambda name: '/none'; runpy.run_path('setup.py')"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "/none/Python.h does not exist, and compiling lmms-stream needs it: install a wheel" in done.stderr
