"""States that other projects' programs over the core stored at 67b50f60, and what they read after them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .digests import STORED, read_json
from .door_cases import CASES

FACTS: dict[str, Any] = read_json(STORED / "doors.json")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:shuffle_block_size .* is smaller than some shards:UserWarning")
def test_a_stored_state_of_a_door_is_followed_by_the_same_samples(
    name: str, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stored)
    _, after = CASES[name]()
    assert after(FACTS[name]["state"]) == FACTS[name]["following"]


def test_every_stored_state_of_a_door_has_a_case() -> None:
    assert [*FACTS] == [*CASES]
