"""States that 67b50f60 stored in the middle of runs, and the samples that it read after them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .digests import STORED, differing, read_json
from .state_cases import LOADERS, MIXTURES, following, mixture_digests, new_digests

OF_MIXTURES: dict[str, Any] = read_json(STORED / "mixtures.json")
OF_LOADERS: dict[str, Any] = read_json(STORED / "loaders.json")


@pytest.mark.parametrize("name", MIXTURES)
def test_a_stored_cursor_is_followed_by_the_same_packs_in_any_world(name: str) -> None:
    computed = mixture_digests(MIXTURES[name], OF_MIXTURES[name]["state"])
    assert differing(OF_MIXTURES[name]["digests"], computed) == []


@pytest.mark.parametrize("name", LOADERS)
def test_a_stored_state_of_a_loader_is_followed_by_the_same_samples_in_any_world(name: str, stored: Path) -> None:
    expected = OF_LOADERS[name]["following"]
    computed = following(LOADERS[name], stored, json.loads(json.dumps(OF_LOADERS[name]["state"])))
    assert computed["steps"] == expected["steps"]
    assert differing(expected, computed) == []


def test_new_runs_of_several_sources_have_the_packs_of_the_first_release_with_shares_of_tokens() -> None:
    assert json.loads(json.dumps(new_digests())) == read_json(STORED.with_name("shares.json"))


def test_every_stored_state_has_a_case() -> None:
    assert [*OF_MIXTURES] == [*MIXTURES]
    assert [*OF_LOADERS] == [*LOADERS]
