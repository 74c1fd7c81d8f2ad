"""The notebook is run, cell after cell, in a clean folder; what it is to find it asserts itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ..rounds import in_long_rounds
from .pages import ROOT
from .session import session

NOTEBOOK = ROOT / "examples" / "explore.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return found


@in_long_rounds
def test_the_cells_of_the_notebook_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")  # figures without a screen, as in a notebook's kernel
    with session(tmp_path) as python:
        for number, cell in enumerate(cells()):
            if cell["cell_type"] == "code":
                python.run("".join(cell["source"]), source=f"{NOTEBOOK.name}, cell {number}", line=1)
        python.run("assert len(plt.get_fignums()) == 4", source=NOTEBOOK.name, line=1)


def test_the_notebook_is_kept_without_what_its_cells_gave() -> None:
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)


def test_each_part_of_the_notebook_checks_what_it_shows() -> None:
    parts = [cell for cell in cells() if "plt." in "".join(cell["source"]) or "ledger." in "".join(cell["source"])]
    assert all("\nassert " in "".join(cell["source"]) for cell in parts)
