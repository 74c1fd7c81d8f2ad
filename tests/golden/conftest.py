from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .digests import STORED


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the stored files, so that no test writes next to them."""
    folder = tmp_path_factory.mktemp("golden") / "stored"
    shutil.copytree(STORED, folder)
    return folder
