"""Pages and pictures that are made from the code are what the code says."""

from __future__ import annotations

from pathlib import Path

from ..processes import run_module
from .pages import DOCS


def made(script: str, *arguments: str) -> str:
    """What a script of docs/code prints."""
    done = run_module(str(DOCS / "code" / script), *arguments, timeout_s=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_of_settings_is_written_by_the_code() -> None:
    assert (DOCS / "settings.md").read_text() == made("settings.py"), "python docs/code/settings.py > docs/settings.md"


def test_the_pictures_are_drawn_by_the_code(tmp_path: Path) -> None:
    made("pictures.py", str(tmp_path))
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text() for path in (DOCS / "how").glob("*.svg")}
    assert len(drawn) >= 4, "python docs/code/pictures.py docs/how"
