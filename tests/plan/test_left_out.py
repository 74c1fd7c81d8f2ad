from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import DataError
from lmms_stream.plan.left_out import LeftOut, LeftOutSample

ENTRY: dict[str, Any] = {"source": "a", "sample_id": 1, "reason": "", "since_step": 0, "kind": "dropped"}
SAMPLES = st.builds(
    LeftOutSample,
    st.sampled_from(["chats", "books"]),
    st.integers(0, 20),
    st.text(max_size=5),
    st.integers(0, 9),
    st.sampled_from(["quarantined", "dropped"]),
)


@given(st.lists(SAMPLES), st.lists(SAMPLES))
def test_lists_of_ranks_are_one_list_in_any_order(here: list[LeftOutSample], there: list[LeftOutSample]) -> None:
    one = LeftOut(here).merge([LeftOut(there)])
    assert one.samples == LeftOut([*there, *reversed(here)]).samples
    assert {each.name for each in one.samples} == {each.name for each in [*here, *there]}
    assert LeftOut.load(json.loads(json.dumps(one.state_dict()))).samples == one.samples


@given(st.lists(SAMPLES), st.integers(0, 10))
def test_a_sample_is_left_out_from_its_first_step_on(samples: list[LeftOutSample], step: int) -> None:
    left_out = LeftOut(samples)
    for source in ("chats", "books"):
        expected = sorted({each.sample_id for each in samples if each.source == source and each.since_step <= step})
        assert left_out.of_source(source).at_step(step).tolist() == expected
        assert [n for n in range(21) if left_out.is_left_out(source, n, step=step)] == expected


def test_a_sample_is_listed_once_with_its_first_step() -> None:
    later, first = (LeftOutSample("chats", 7, "cannot be decoded", step, "quarantined") for step in (9, 3))
    left_out = LeftOut([later])
    assert not left_out.add(first)
    assert left_out.get("chats", 7) == first
    assert (len(left_out), first.source, first.name) == (1, "chats", "chats:7")
    assert len(left_out.of_kind("quarantined")) == 1
    assert not left_out.of_kind("dropped")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"source": "chats"}, "must have exactly source, sample_id, reason, since_step, kind"),
        ("chats:7", "must have exactly source"),
        (ENTRY | {"sample_id": -1}, "must be numbers from 0 on"),
        (ENTRY | {"kind": "lost"}, "kind quarantined or dropped"),
        (ENTRY | {"source": 3}, "source and reason texts"),
    ],
)
def test_entries_of_another_form_are_refused(entry: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        LeftOut.load([entry])
