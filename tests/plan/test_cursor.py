from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import CursorError
from lmms_stream.plan.cursor import CURSOR_VERSION, Cursor, LengthChange, SourceCursor
from lmms_stream.plan.lane_cursor import LaneCursor, LaneState

from ..strategies import examples

counts = st.integers(0, 1 << 40)
credits = st.integers(-(1 << 45), 1 << 45)
length_changes = st.builds(LengthChange, epoch=counts, packs=counts, length=st.integers(1, 1 << 30))
changes = st.lists(length_changes, max_size=2).map(lambda found: tuple(sorted(found)))
source_cursors = st.builds(
    SourceCursor, plan=st.text(), epoch=counts, packs=counts, credit=credits, changes=st.just(()) | changes
)
cursors = st.builds(Cursor, step=counts, sources=st.dictionaries(st.text(), source_cursors, max_size=5))

SOURCE = {"plan": "abc", "epoch": 1, "packs": 20, "credit": -3}


def saved(**changes: Any) -> dict[str, Any]:
    data = Cursor(step=7, sources={"chat": SourceCursor(**SOURCE)}).to_dict()  # type: ignore[arg-type]
    return {name: value for name, value in (data | changes).items() if value is not ...}


@examples(100)
@given(cursor=cursors)
def test_a_cursor_comes_back_from_json_unchanged(cursor: Cursor) -> None:
    assert Cursor.from_dict(json.loads(json.dumps(cursor.to_dict()))) == cursor


@pytest.mark.parametrize("num_sources", [2, 70])
def test_the_order_of_sources_survives_sorted_keys(num_sources: int) -> None:
    cursor = Cursor(sources={f"s{number}": SourceCursor(plan="abc") for number in reversed(range(num_sources))})
    found = Cursor.from_dict(json.loads(json.dumps(cursor.to_dict(), sort_keys=True)))
    assert (found, [*found.sources], found.has_order) == (cursor, [*cursor.sources], True)


def test_a_saved_cursor_is_a_few_plain_values() -> None:
    assert saved() == {"version": CURSOR_VERSION, "step": 7, "sources": {"chat": SOURCE}}
    assert SourceCursor(plan="abc") == SourceCursor(plan="abc", epoch=0, packs=0, credit=0)


@pytest.mark.parametrize(
    ("version", "shown"), [(1, "1"), (3, "3"), (0, "0"), ("1", "'1'"), (True, "True"), (..., "None")]
)
def test_a_cursor_of_another_version_is_refused(version: object, shown: str) -> None:
    with pytest.raises(
        CursorError,
        match=rf"^the saved cursor has version {shown}, this release reads 2, with different packs: finish the "
        r"run with the release that wrote the cursor, or start the data over \(train.resume never, in "
        r"another output_dir\)$",
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
        ({"sources": {"chat": SOURCE | {"credit": 1 << 62}}}, "ValueError"),
        ({"sources": {"chat": SOURCE | {"credit": 0.5}}}, "TypeError"),
        ({"version": 6}, "ValueError"),  # turns by tokens, without shares
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


_OF_GROWTH = r" \(a dataset that has grown since, .* is read as it was with num_parts, and its new part, .* beside it"


@pytest.mark.parametrize(
    ("built", "difference"),
    [
        ("2-a-b-c-d-e", r"the plan version \(release\)"),
        ("1-x-b-c-d-e", r"the lengths index \(dataset or processor\)"),
        ("1-a-x-c-d-e", r"the shards \(dataset\), or the samples of its streams in an epoch"),
        ("1-a-b-x-d-e", r"the order settings \(seed, shuffle, num_canonical_nodes, shuffle_block_size\)"),
        ("1-a-b-c-x-e", r"the packing settings \(packing_length, strategy, .*\)"),
        (
            "1-x-y-c-d-e",
            r"the lengths index \(dataset or processor\) and the shards \(dataset\), or the samples of its streams in "
            "an epoch",
        ),
        ("1-a-b-c-d-x", r"the random streams \(the NumPy that is installed\)"),
        ("other", "everything"),
    ],
)
def test_a_foreign_plan_is_refused_and_the_error_says_what_differs(built: str, difference: str) -> None:
    cursor = Cursor(sources={"chat": SourceCursor(plan="1-a-b-c-d-e"), "old": SourceCursor(plan="gone")})
    cursor.check_plans({"chat": "1-a-b-c-d-e", "new": "any"})
    with pytest.raises(
        CursorError,
        match=rf"^the checkpoint follows plan 1-a-b-c-d-e of 'chat', this run built {built}: they differ in "
        rf"{difference}; restore that, or start over in another output_dir"
        rf"{_OF_GROWTH if 'shards' in difference else '$'}",
    ):
        cursor.check_plans({"chat": built})


def test_a_cursor_of_the_release_before_is_refused_by_name() -> None:
    written = {"plan": "1-7bb7411063df4bef-c1359816a45df046-0d98acbef052877c-eca03c76a98fec87", "epoch": 0, "packs": 5}
    before = {"version": 1, "step": 1, "phase": "39bc5ae3994e2dec", "sources": {"a": {**written, "taken": 5}}}
    with pytest.raises(CursorError, match=r"has version 1, this release reads 2, with different.*the cursor.*"):
        Cursor.from_dict(before)
    lanes = {"version": 1, "plan": "lanes1-a", "num_lanes": 1, "step": 0, "packs": 0, "lanes": {}}
    with pytest.raises(CursorError, match=r"has version 1, this release reads 2, with different.*the cursor.*"):
        LaneCursor.from_dict(lanes)


@pytest.mark.parametrize(
    "changes",
    [{"num_lanes": 0}, {"step": 4}, {"packs": -1}, {"packs": 1 << 70}, {"lanes": {"4": LaneState().to_dict()}}],
)
def test_a_cursor_of_lanes_with_a_number_out_of_range_is_refused(changes: dict[str, Any]) -> None:
    written = LaneCursor(plan="p", num_lanes=4, step=1, packs=3, states={0: LaneState(num_packs=1)}).to_dict()
    LaneCursor.from_dict(written)
    with pytest.raises(CursorError, match=r"^the saved cursor is damaged \(.*\): use another checkpoint$"):
        LaneCursor.from_dict(written | changes)
    with pytest.raises(CursorError, match="the saved cursor has 4 lanes, and its plan 2: it is damaged; use another"):
        LaneCursor.from_dict(written).check("p", 2)


def test_a_state_of_a_loader_of_samples_is_refused_by_name() -> None:
    state = {"epoch": 0, "sample_in_epoch": 80, "num_canonical_nodes": 2, "shuffle_seed": 9176}
    message = r"^the saved state is of a StreamingDataLoader, .*: read the epoch to its end .* without a state$"
    with pytest.raises(CursorError, match=message):
        Cursor.from_dict(state)
    with pytest.raises(CursorError, match=message):
        LaneCursor.from_dict(state)


def _of_thousand_sources() -> Cursor:
    rng = np.random.default_rng(0)
    shared = "0d98acbef052877c-eca03c76a98fec87-9b2f0c7d1e5a6b48"  # settings, which a run's sources mostly share
    return Cursor(
        step=250_000,
        sources={
            f"commoncrawl-{2013 + number // 100}-{number % 100:02}-en": SourceCursor(
                plan=f"2-{rng.bytes(8).hex()}-{rng.bytes(8).hex()}-{shared}",
                epoch=int(rng.integers(4)),
                packs=int(rng.integers(10**7)),
                credit=int(rng.integers(-(1 << 40), 1 << 40)),
            )
            for number in range(1000)
        },
    )


def test_the_cursor_of_a_thousand_sources_takes_at_most_64_kib_in_a_checkpoint() -> None:
    cursor = _of_thousand_sources()
    written = json.dumps(cursor.to_dict(), indent=1)  # as a checkpoint has it
    assert len(written) <= 64 << 10
    assert Cursor.from_dict(json.loads(written)) == cursor


def test_a_cursor_of_many_sources_that_is_damaged_is_refused() -> None:
    written = _of_thousand_sources().to_dict()
    packed = written["packed_sources"]
    for damaged in (packed[:-40], packed[:100] + "AAAA" + packed[104:], "no base64", 7, packed[:100]):
        with pytest.raises(CursorError, match=r"^the saved cursor is damaged \((Value|Type|)Error\(.*use another"):
            Cursor.from_dict(written | {"packed_sources": damaged})
