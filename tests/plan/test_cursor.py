from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import CursorError
from lmms_stream.plan.cursor import CURSOR_VERSION, Cursor, SourceCursor

from ..strategies import examples

counts = st.integers(0, 1 << 60)
source_cursors = st.builds(SourceCursor, plan=st.text(), epoch=counts, packs=counts, taken=counts)
cursors = st.builds(
    Cursor, step=counts, phase=st.text(), sources=st.dictionaries(st.text(), source_cursors, max_size=5)
)

SOURCE = {"plan": "abc", "epoch": 1, "packs": 20, "taken": 3}


def saved(**changes: Any) -> dict[str, Any]:
    data = Cursor(step=7, phase="p", sources={"chat": SourceCursor(**SOURCE)}).to_dict()  # type: ignore[arg-type]
    return {name: value for name, value in (data | changes).items() if value is not ...}


@examples(100)
@given(cursor=cursors)
def test_a_cursor_comes_back_from_json_unchanged(cursor: Cursor) -> None:
    assert Cursor.from_dict(json.loads(json.dumps(cursor.to_dict()))) == cursor


def test_a_saved_cursor_is_a_few_plain_values() -> None:
    assert saved() == {"version": CURSOR_VERSION, "step": 7, "phase": "p", "sources": {"chat": SOURCE}}
    assert SourceCursor(plan="abc") == SourceCursor(plan="abc", epoch=0, packs=0, taken=0)


@pytest.mark.parametrize(("version", "shown"), [(2, "2"), (0, "0"), ("1", "'1'"), (True, "True"), (..., "None")])
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
        ({"sources": {"chat": {"plan": "abc", "epoch": 1, "packs": 1}}}, "KeyError"),
        ({"sources": {"chat": SOURCE | {"plan": None}}}, "TypeError"),
        ({"sources": {"chat": SOURCE | {"epoch": "first"}}}, "TypeError"),
        ({"sources": {"chat": SOURCE | {"packs": None}}}, "TypeError"),
        ({"sources": {"chat": SOURCE | {"packs": 7.9}}}, "TypeError"),
        ({"sources": {"chat": SOURCE | {"packs": float("inf")}}}, "TypeError"),
        ({"sources": {"chat": SOURCE | {"epoch": -1}}}, "ValueError"),
        ({"sources": {"chat": SOURCE | {"packs": -5}}}, "ValueError"),
        ({"step": ...}, "KeyError"),
        ({"step": -1}, "ValueError"),
        ({"phase": 3}, "TypeError"),
    ],
)
def test_a_damaged_cursor_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(
        CursorError, match=rf"^the saved cursor is damaged \({problem}\(.*\)\): use another checkpoint$"
    ):
        Cursor.from_dict(saved(**changes))


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(CursorError, match=r"the saved cursor is damaged \(\[\]\)"):
        Cursor.from_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("built", "difference"),
    [
        ("2-a-b-c-d", r"the plan version \(release\)"),
        ("1-x-b-c-d", r"the lengths index \(dataset or processor\)"),
        ("1-a-x-c-d", r"the shards \(dataset\)"),
        ("1-a-b-x-d", r"the order settings \(seed, shuffle, num_canonical_nodes, shuffle_block_size\)"),
        ("1-a-b-c-x", r"the packing settings \(packing_length, strategy, .*\)"),
        ("1-x-y-c-d", r"the lengths index \(dataset or processor\) and the shards \(dataset\)"),
        ("other", "everything"),
    ],
)
def test_a_foreign_plan_is_refused_and_the_error_says_what_differs(built: str, difference: str) -> None:
    cursor = Cursor(sources={"chat": SourceCursor(plan="1-a-b-c-d"), "old": SourceCursor(plan="gone")})
    cursor.check_plans({"chat": "1-a-b-c-d", "new": "any"})
    with pytest.raises(
        CursorError,
        match=rf"^the checkpoint follows plan 1-a-b-c-d of 'chat', this run built {built}: they differ in "
        rf"{difference}; restore that, or start over in another output_dir$",
    ):
        cursor.check_plans({"chat": built})


def test_a_place_beyond_its_epoch_is_refused() -> None:
    at = SourceCursor(plan="p", epoch=2, packs=9)
    at.check_packs("chat", 9)
    with pytest.raises(CursorError, match="stands at pack 9 of epoch 2 of 'chat', which has 8: use another checkpoint"):
        at.check_packs("chat", 8)
