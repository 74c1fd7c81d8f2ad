"""A JSON file read member by member, whatever the size of the windows it is decoded in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.mds.shard_table import members

from ..converters.sources.test_json_array import Trickle

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=5), each, max_size=4),
    max_leaves=12,
)


@given(
    before=st.dictionaries(st.text(max_size=5).filter(lambda name: name != "shards"), VALUES, max_size=3),
    shards=st.lists(VALUES, max_size=6),
    indent=st.sampled_from([None, 1]),
    is_ascii=st.booleans(),
    step=st.integers(1, 40),
)
def test_members_and_items_are_those_that_json_finds_and_lie_where_they_are_said_to(
    before: dict[str, Any], shards: list[Any], indent: int | None, is_ascii: bool, step: int
) -> None:
    data = json.dumps({**before, "shards": shards, "after": [1]}, indent=indent, ensure_ascii=is_ascii).encode()
    found = [*members(Trickle(data, step), array="shards", name="x")]
    assert [each.value for each in found if each.is_item] == shards
    assert {each.name: each.value for each in found if not each.is_item} == {**before, "after": [1]}
    assert [json.loads(data[each.start : each.stop]) for each in found] == [each.value for each in found]


@pytest.mark.parametrize(
    "data",
    ["", "[]", "{", '{"shards"', '{"shards": 3}', '{"shards": [1', '{"shards": [1 2]}', '{"shards": [}', '{1: 2}',
     '{"a": }', '{"a": 1 "b": 2}', '{"shards": ["a]}', '{"a": tru',
     '{"shards": []} 1', '{}]'],
)  # fmt: skip
@pytest.mark.parametrize("step", [1, 3, 1 << 20])
def test_what_is_no_object_with_such_an_array_is_an_error(data: str, step: int) -> None:
    with pytest.raises(ValueError, match=r"expected|not closed|Expecting|Extra|something follows"):
        [*members(Trickle(data.encode(), step), array="shards", name="x")]


def test_bytes_that_are_no_text_are_an_error() -> None:
    with pytest.raises(UnicodeDecodeError):
        [*members(Trickle(b'{"shards": ["\xff\xff\xff\xff"]}', 9), array="shards", name="x")]
