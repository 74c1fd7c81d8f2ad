"""What `make demo` runs, to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import run_cli


@pytest.mark.timeout(900)
def test_the_demo_ends_with_equal_runs(tmp_path: Path) -> None:
    result = run_cli("demo", "--output", str(tmp_path / "demo"), timeout_s=840)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "EQUAL: sample ids and losses of steps" in result.stdout
    assert "DIFFERENT" not in result.stdout
    assert (tmp_path / "demo" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    result = run_cli("demo", "--output", str(tmp_path))
    assert result.returncode == 1
    assert f"error: {tmp_path} holds files that no demo wrote: pass another folder as --output" in result.stderr
    assert (tmp_path / "mine.txt").read_text() == "kept"
