from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.converters.convert import convert
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.errors import DataError
from lmms_stream.mds.decoding import decoder
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.json_text import parsed
from lmms_stream.processors.stored_chat import read_chat
from lmms_stream.tools.inspect.page import render_page
from lmms_stream.tools.inspect.summary import inspect_dataset

from ..conftest import run_cli
from ..strategies import examples

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> in a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"town": "Zürich", "day": 2}'}},
    {"type": "function", "function": {"name": "get_weather", "arguments": {"town": "東京"}}},
    {"id": "c3", "type": "function", "function": {"name": "get_weather", "arguments": "not JSON"}},
]
MESSAGES = [
    {"role": "user", "content": "Is it raining? ☔"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "12 °C"},
    {"role": "assistant", "content": "No."},
]


@pytest.fixture
def called(tmp_path: Path, chat_processor: ChatProcessor) -> str:
    """A dataset of one chat with tools and one without."""
    rows = [{"messages": MESSAGES, "tools": [WEATHER]}, {"messages": MESSAGES[:1] + MESSAGES[-1:], "tools": None}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    convert([tmp_path / "rows.jsonl"], str(tmp_path / "chats"), processor=chat_processor, on_dropped="warn")
    return str(tmp_path / "chats")


def test_a_conversation_is_read_with_its_tools_and_without() -> None:
    assert read_chat(json.dumps(MESSAGES)) == (MESSAGES, None)
    assert read_chat(json.dumps({"messages": MESSAGES, "tools": [WEATHER]})) == (MESSAGES, [WEATHER])
    assert read_chat(json.dumps({"messages": MESSAGES})) == (MESSAGES, None)
    image = {"type": "image", "span": [0, 1], "text": "what a screen reader says"}
    assert read_chat(json.dumps([{"role": "user", "content": [image]}])).messages[0]["content"] == [image]


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(1 << 64, 1 << 1200)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(extra=values, text=st.text(st.characters()), ascii_only=st.booleans())
@examples(300)
def test_any_values_of_a_message_are_read_as_they_were_written(extra: Any, text: str, ascii_only: bool) -> None:
    messages = [{"role": "assistant", "content": text, "extra": extra}, {"role": "user", "content": "\ud800"}]
    assert read_chat(json.dumps(messages, ensure_ascii=ascii_only)).messages == messages
    assert read_chat(json.dumps(messages[:1], ensure_ascii=ascii_only)).messages == messages[:1]


LONG_NUMBERS = ["1." + "3" * 5_000_000, "3" * 5_000_000, "1." + "3" * 5_000 + "e5", "0." + "0" * 5_000 + "1"]


@pytest.mark.parametrize("number", LONG_NUMBERS, ids=["float", "integer", "exponent", "small"])
def test_numbers_of_thousands_of_digits_are_refused(number: str) -> None:
    reason = r"a number has|is infinity|Exceeds the limit"
    with pytest.raises(ValueError, match=reason):
        parsed(f'{{"a": {number}}}'.encode())
    with pytest.raises(ValueError, match=rf"{reason}|unexpected character"):
        parsed(f'{{"a": {number}, "b": NaN}}'.encode())
    for encoding in ("json", "str_float", "str_decimal"):
        with pytest.raises(ValueError, match=reason):
            decoder(encoding)(memoryview(number.encode()), 0, len(number))


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        ("{", "its messages are not JSON (Expecting property name"),
        ("[" * 100_000, "its messages are not JSON (maximum recursion depth"),
        ("{}", "its messages are not a list of messages"),
        ("[]", "its messages are not a list of messages"),
        ('{"messages": "hi", "tools": []}', "its messages are not a list of messages"),
        ("[1]", "a message has no role ('1')"),
        ('[{"content": "hi"}]', "a message has no role (\"{'content': 'hi'}\")"),
        ('[{"role": "user", "content": 7}]', "the content of a message is int, not text or parts"),
        ('[{"role": "user", "content": [{"type": "text"}]}]', "a part of a message is neither text nor media"),
        ('[{"role": "user", "content": [{"type": ["text"]}]}]', "a part of a message is neither text nor media"),
        ('[{"role": "user", "content": ["hi"]}]', "a part of a message is neither text nor media ('hi')"),
        ('{"messages": [{"role": "user"}], "tools": {}}', "its tools are not a list of objects ('{}')"),
        ('{"messages": [{"role": "user"}], "tools": ["f"]}', "its tools are not a list of objects"),
    ],
)
def test_what_is_no_conversation_is_named(stored: str, reason: str, chat_processor: ChatProcessor) -> None:
    for read in (read_chat, lambda text: chat_processor.measure({"messages": text, "media": b""})):
        with pytest.raises(DataError) as raised:
            read(stored)
        assert reason in str(raised.value)
        assert str(raised.value).endswith(": convert the dataset again")


def test_a_chat_with_tools_stands_a_deep_check(called: str, chat_processor: ChatProcessor) -> None:
    for processor in (None, chat_processor):
        report = verify_dataset(called, deep=True, processor=processor, num_workers=1)
        assert report.problems == ()
        assert report.num_samples == 2


def test_tools_and_calls_are_shown_as_a_person_reads_them(called: str) -> None:
    found = inspect_dataset(called, num_samples=2)
    first, second = found.samples
    assert (len(first.tools), second.tools) == (1, ())
    assert json.loads(first.tools[0]) == WEATHER
    assert [message.role for message in first.messages] == ["user", "assistant", "tool", "assistant"]
    texts: list[Any] = [[block.text for block in message.blocks] for message in first.messages]
    assert texts[0] == ["Is it raining? ☔"]
    assert texts[1] == [
        'calls get_weather, id c1: {\n "town": "Zürich",\n "day": 2\n}',
        'calls get_weather: {\n "town": "東京"\n}',
        "calls get_weather, id c3: not JSON",
    ]
    assert texts[2] == ["12 °C", '{\n "tool_call_id": "c1"\n}']
    page = render_page(found)
    assert "The weather &lt;now&gt; in a town" in page
    assert "calls get_weather: {\n &quot;town&quot;: &quot;東京&quot;" in page


def test_the_command_prints_tools_and_calls(called: str) -> None:
    result = run_cli("inspect", called)
    assert result.returncode == 0, result.stderr
    assert '"description": "The weather <now> in a town"' in result.stdout
    assert "calls get_weather, id c1: {" in result.stdout
