from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.cursor import CURSOR_VERSION, Cursor, Place
from lmms_stream.errors import CursorError

from .strategies import examples

places = st.builds(Place, epoch=st.integers(0, 1 << 40), packs=st.integers(0, 1 << 60))
cursors = st.builds(Cursor, plan=st.text(), sources=st.dictionaries(st.text(), places, max_size=5))


def saved(**changes: Any) -> dict[str, Any]:
    data = Cursor(plan="abc", sources={"chat": Place(epoch=1, packs=20)}).to_dict()
    return {name: value for name, value in (data | changes).items() if value is not ...}


@examples(100)
@given(cursor=cursors)
def test_a_cursor_comes_back_from_json_unchanged(cursor: Cursor) -> None:
    assert Cursor.from_dict(json.loads(json.dumps(cursor.to_dict()))) == cursor


def test_a_saved_cursor_is_a_few_plain_values() -> None:
    cursor = Cursor(plan="abc", sources={"chat": Place(epoch=1, packs=20)})
    expected = {"version": CURSOR_VERSION, "plan": "abc", "sources": {"chat": {"epoch": 1, "packs": 20}}}
    assert cursor.to_dict() == expected


def test_a_place_is_the_start_of_the_first_epoch_unless_given() -> None:
    assert (Place().epoch, Place().packs) == (0, 0)


@pytest.mark.parametrize(("version", "shown"), [(2, "2"), (0, "0"), ("1", "'1'"), (..., "None")])
def test_a_cursor_of_another_version_is_refused(version: object, shown: str) -> None:
    with pytest.raises(
        CursorError,
        match=rf"^the saved cursor has version {shown}, this release reads 1: resume with the release that wrote it$",
    ):
        Cursor.from_dict(saved(version=version))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sources": ...}, "KeyError"),
        ({"sources": None}, "AttributeError"),
        ({"sources": [["chat", 1]]}, "AttributeError"),
        ({"sources": {"chat": None}}, "TypeError"),
        ({"sources": {"chat": 7}}, "TypeError"),
        ({"sources": {"chat": {"epoch": 1}}}, "KeyError"),
        ({"sources": {"chat": {"packs": 1}}}, "KeyError"),
        ({"sources": {"chat": {"epoch": "first", "packs": 1}}}, "TypeError"),
        ({"sources": {"chat": {"epoch": 0, "packs": None}}}, "TypeError"),
        ({"plan": ...}, "KeyError"),
    ],
)
def test_a_damaged_cursor_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(
        CursorError, match=rf"^the saved cursor is damaged \({problem}\(.*\)\): use another checkpoint$"
    ):
        Cursor.from_dict(saved(**changes))


@pytest.mark.parametrize(("epoch", "packs"), [(-1, 5), (0, -5)])
def test_a_place_before_the_beginning_is_refused(epoch: int, packs: int) -> None:
    with pytest.raises(
        CursorError,
        match=(
            rf"^the saved cursor is damaged: chat stands at Place\(epoch={epoch}, packs={packs}\): "
            r"use another checkpoint$"
        ),
    ):
        Cursor.from_dict(saved(sources={"chat": {"epoch": epoch, "packs": packs}}))


def test_a_cursor_follows_its_own_plan_only() -> None:
    cursor = Cursor.from_dict(saved())
    cursor.check_plan("abc")
    with pytest.raises(
        CursorError,
        match=(
            r"^the checkpoint follows plan abc, this run built xyz: restore its dataset, processor, seed and packing "
            r"settings, or start over in another output_dir$"
        ),
    ):
        cursor.check_plan("xyz")


@pytest.mark.parametrize(
    "damage",
    [
        {"sources": {"data": {"epoch": 0, "packs": float("inf")}}},
        {"sources": {"data": {"epoch": 0, "packs": 7.9}}},
        {"plan": None},
    ],
)
def test_values_of_the_wrong_kind_are_not_made_to_fit(damage: dict[str, Any]) -> None:
    state = {"version": 1, "plan": "p", "sources": {"data": {"epoch": 0, "packs": 1}}} | damage
    with pytest.raises(CursorError, match="the saved cursor is damaged"):
        Cursor.from_dict(state)


def test_what_is_no_mapping_or_has_no_number_as_version_is_refused() -> None:
    with pytest.raises(CursorError, match=r"the saved cursor is damaged \(\[\]\)"):
        Cursor.from_dict([])  # type: ignore[arg-type]
    with pytest.raises(CursorError, match="has version True"):
        Cursor.from_dict({"version": True, "plan": "p", "sources": {}})
