"""The site is built strictly, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from .pages import DOCS, ROOT

LOADED = re.compile(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(https?:[^"]+)"')


def test_the_site_is_built_strictly_and_is_whole_without_a_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.relative_to(tmp_path).with_suffix("") for path in tmp_path.rglob("*.html")}
    assert pages == {path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md")} | {Path("404")}
    elsewhere = {
        address for path in tmp_path.rglob("*.html") for address in LOADED.findall(path.read_text(encoding="utf-8"))
    }
    assert elsewhere == set()
