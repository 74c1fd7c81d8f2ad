from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .datasets import set_source_times
from .digests import STORED


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the stored files, so that no test writes next to them; sources keep their time."""
    folder = tmp_path_factory.mktemp("golden") / "stored"
    shutil.copytree(STORED, folder, copy_function=shutil.copyfile)
    set_source_times(folder)
    return folder
