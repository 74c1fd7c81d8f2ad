"""Packs of every strategy, order and mixture of samples, against the digests of 67b50f60."""

from __future__ import annotations

from typing import Any

import pytest

from .digests import STORED, differing, read_json
from .pack_cases import GROUPS, pack_digests

DIGESTS: dict[str, Any] = read_json(STORED / "packs.json")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.filterwarnings("ignore:shuffle_block_size .* is smaller than some shards:UserWarning")
def test_packs_are_those_of_the_first_commit(group: str) -> None:
    assert differing(DIGESTS[group], pack_digests(group)) == []


def test_every_group_of_digests_is_compared() -> None:
    assert [*DIGESTS] == [*GROUPS]
