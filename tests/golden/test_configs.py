"""Configs that 67b50f60 loaded, with old and new keys: they load, to the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .config_cases import config_values
from .digests import STORED, changed_values, read_json

VALUES: dict[str, Any] = read_json(STORED / "configs.json")


@pytest.mark.filterwarnings("ignore:.* is an old key:FutureWarning")
def test_stored_configs_load_to_the_same_values(stored: Path) -> None:
    computed = config_values(stored)
    assert computed.keys() == VALUES.keys()
    assert changed_values(VALUES, computed) == []
