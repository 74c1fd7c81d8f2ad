"""What chat templates are given of a conversation: null contents, arguments of tool calls; what they may raise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.converters.rows.mapper import find_mapper
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.chat_template import REASONING_KEYS
from lmms_stream.processors.multimodal import MultimodalProcessor
from transformers.utils.chat_template_utils import render_jinja_template

from .test_chat_template import learnt, stored, with_template
from .tiny_vlm import save_processor

CALLS = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
WRITTEN = '{"name": "w", "arguments": {"city": "Oslo"}}<|end|>'


def showing(message: str) -> str:
    """A template that shows each message `m` by a piece of a template."""
    end = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    return "{% for m in messages %}<|{{ m.role }}|>" + message + "<|end|>" + end


def called(arguments: Any, **more: Any) -> list[dict[str, Any]]:
    """A question and a call of w. more: what else the call's message has."""
    call = {"type": "function", "function": {"name": "w", "arguments": arguments}}
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call], **more}]


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content }}",
        "{{ m['content'] | trim }}",
        "{{ '' + m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p }}{% endfor %}{% endif %}",
        "{% if m.content is not none %}{{ m.content }}{% endif %}",
        "{% if m.role == 'user' and m.content != none %}{{ m.content }}{% else %}{{ m.content | trim }}{% endif %}",
        "{% if m.role == 'user' and m.content is not none %}{{ m.content }}{% else %}{{ '' + m.content }}{% endif %}",
    ],
)
def test_a_null_content_is_no_text_whatever_the_template_does_with_it(tokenizer: Path, content: str) -> None:
    processor = ChatProcessor(with_template(tokenizer, showing(content + CALLS)))
    assert learnt(processor, stored(called({"city": "Oslo"}))) == WRITTEN
    null_question = [{"role": "user", "content": None}, {"role": "assistant", "content": "x"}]
    assert "None" not in processor.tokenizer.decode(processor.process(stored(null_question))["input_ids"])


def test_a_template_that_tests_for_a_null_content_is_given_it(tokenizer: Path) -> None:
    """DeepSeek-V3's shows tool calls only where the content is none."""
    shows = "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}"
    processor = ChatProcessor(with_template(tokenizer, showing(shows)))
    assert learnt(processor, stored(called({"city": "Oslo"}))) == WRITTEN


def test_a_null_content_is_no_text_in_processors_of_media(tmp_path: Path) -> None:
    save_processor(tmp_path)
    processor = MultimodalProcessor.from_pretrained(str(tmp_path))
    null, empty = (stored(called({}, content=content)) | {"media": b""} for content in (None, ""))
    assert processor.process(null)["input_ids"].tolist() == processor.process(empty)["input_ids"].tolist()


JOINS = "{% for c in m.tool_calls or [] %}{{ '```json\n' + c.function.arguments + '\n```' }}{% else %}{{ m.content }}"
WRITES = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}"


@pytest.mark.parametrize(("shows", "before", "after"), [(JOINS, "```json\n", "\n```"), (WRITES, "", "")])
@pytest.mark.parametrize("given", ['{"city":  "Oslo"}', {"city": "Ås"}])
def test_arguments_are_texts_where_a_template_joins_or_writes_them(
    tokenizer: Path, shows: str, before: str, after: str, given: Any
) -> None:
    processor = ChatProcessor(with_template(tokenizer, showing(shows + "{% endfor %}")))
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    assert learnt(processor, stored(called(given))) == f"{before}{text}{after}<|end|>"


@pytest.mark.parametrize("given", [{"city": "Oslo"}, '{"city": "Oslo"}'])
def test_arguments_are_objects_where_a_template_writes_json(tokenizer: Path, given: Any) -> None:
    processor = ChatProcessor(with_template(tokenizer, showing("{{ m.content }}" + CALLS)))
    chat = called(given)
    assert learnt(processor, stored(chat)) == WRITTEN
    flat = [chat[0], {**chat[1], "tool_calls": [chat[1]["tool_calls"][0]["function"]]}]
    shows = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
    assert learnt(ChatProcessor(with_template(tokenizer, showing(shows))), stored(flat)) == WRITTEN


def joining(begin: str) -> str:
    """Write the calls `m.tool_calls`, each with its arguments joined to a text. begin: what comes before them."""
    call = "{{ '<|call|>' + c['function']['name'] + '\\n```json\\n' + c['function']['arguments'] + '\\n```<|/call|>' }}"
    return begin + "{% for c in m['tool_calls'] %}" + call + "{% endfor %}<|end|>"


ASKS = "{% for m in messages %}{% if m['role'] != 'assistant' %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endif %}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"
SHOWS_CALLS_OF_NULLS = (  # as DeepSeek-V3's
    ASKS
    + "{% if m['role'] == 'assistant' and m['content'] is none %}"
    + joining("<|Assistant|>")
    + "{% endif %}{% if m['role'] == 'assistant' and m['content'] is not none %}"
    + "{{ '<|Assistant|>' + m['content'] + '<|end|>' }}{% endif %}"
    + PROMPT
)
SHOWS_CALLS = (  # as DeepSeek-V3-0324's and R1-0528's
    ASKS
    + "{% if m['role'] == 'assistant' and m['tool_calls'] is defined %}"
    + joining("<|Assistant|>{% if m['content'] is not none %}{{ m['content'] }}{% endif %}")
    + "{% elif m['role'] == 'assistant' %}{{ '<|Assistant|>' + m['content'] + '<|end|>' }}{% endif %}"
    + PROMPT
)
WRITTEN_BY_NAME = {"no arguments": "{}", "one": '{"city":  "Oslo"}', "the word None": '{"code": "return None"}'}


@pytest.mark.parametrize("template", [SHOWS_CALLS_OF_NULLS, SHOWS_CALLS])
@pytest.mark.parametrize("names", [[name] for name in WRITTEN_BY_NAME] + [[*WRITTEN_BY_NAME]])
def test_calls_whose_arguments_a_template_joins_are_those_of_transformers(
    tokenizer: Path, template: str, names: list[str]
) -> None:
    theirs = with_template(tokenizer, template)
    processor = ChatProcessor(theirs)
    (question, call) = called(None)
    call["tool_calls"] = [
        {"type": "function", "function": {"name": "w", "arguments": WRITTEN_BY_NAME[name]}} for name in names
    ]
    chat = [question, call, {"role": "tool", "content": "None"}, {"role": "assistant", "content": "x"}]
    for messages in (chat, chat[:2]):
        # By the function below apply_chat_template, which leaves nulls out since transformers 5.
        made: Any = render_jinja_template([messages], chat_template=template)
        text = made[0][0]
        ids = processor.process(stored(messages))["input_ids"]
        assert processor.tokenizer.decode(ids) == text
        assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"]
        assert processor.not_shown([stored(messages)]) == [0]
    calls = "".join(f"<|call|>w\n```json\n{WRITTEN_BY_NAME[name]}\n```<|/call|>" for name in names)
    assert learnt(processor, stored(chat)) == f"{calls}<|end|>x<|end|>"


def test_objects_of_calls_are_texts_where_only_a_null_content_shows_them(tokenizer: Path) -> None:
    processor = ChatProcessor(with_template(tokenizer, SHOWS_CALLS_OF_NULLS))
    assert '{"city": "Oslo"}' in learnt(processor, stored(called({"city": "Oslo"})))


def test_calls_that_say_none_are_shown_where_only_a_null_content_shows_them(tokenizer: Path) -> None:
    shows = "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}"
    processor = ChatProcessor(with_template(tokenizer, showing(shows)))
    chat = called({"code": "return None"})
    assert learnt(processor, stored(chat)) == '{"name": "w", "arguments": {"code": "return None"}}<|end|>'
    chat[1:1] = [{"role": "assistant", "content": "None"}, {"role": "user", "content": "None"}]
    null_is_written = "{{ m.content }}{% if m.content is none %}{% endif %}" + CALLS
    processor = ChatProcessor(with_template(tokenizer, showing(null_is_written)))
    written = '{"name": "w", "arguments": {"code": "return None"}}<|end|>'
    assert learnt(processor, stored(chat)) == "None<|end|>" + written


SAYS_PYTHON = "call w({'city': 'Oslo'})"


@pytest.mark.parametrize("shows", [CALLS, JOINS + "{% endfor %}", WRITES + "{% endfor %}"])
def test_a_message_that_says_the_arguments_in_the_form_of_python_changes_no_arguments(
    tokenizer: Path, shows: str
) -> None:
    processor = ChatProcessor(with_template(tokenizer, showing(shows if shows != CALLS else "{{ m.content }}" + shows)))
    chat = called({"city": "Oslo"})
    expected = learnt(processor, stored(chat))
    assert '{"city": "Oslo"}' in expected
    assert learnt(processor, stored([{"role": "user", "content": SAYS_PYTHON}, chat[1]])) == expected
    result = {"role": "tool", "content": SAYS_PYTHON}  # what a template writes of the call must not depend on it
    assert learnt(processor, stored([*chat, result, {"role": "assistant", "content": "x"}])) == expected + "x<|end|>"
    two = [*chat, {"role": "assistant", "content": "", "tool_calls": called("Oslo")[1]["tool_calls"]}]
    if shows == CALLS:  # arguments that are a text of no object are given as they are
        assert learnt(processor, stored(two)) == expected + '{"name": "w", "arguments": "Oslo"}<|end|>'


def test_null_arguments_are_no_arguments(tokenizer: Path) -> None:
    processor = ChatProcessor(with_template(tokenizer, showing("{{ m.content }}" + CALLS)))
    assert learnt(processor, stored(called(None))) == '{"name": "w", "arguments": {}}<|end|>'


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("{{ 1 / (m.content | length - 1) }}", "ZeroDivisionError: division by zero"),
        ("{{ m.content.index('z') }}", "ValueError: substring not found"),
        ("{{ m.content[0][5] + 'x' }}", "has no element 5"),
        ("{{ [].pop() }}", "is unsafe"),
        ("{{ m.content.encode().decode('ascii') }}", "UnicodeDecodeError: "),
        ("{{ '%d' % m.content }}", "TypeError: %d format"),
        ("{{ raise_exception('roles must alternate') }}", r"conversation \(roles must alternate\)"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError: "),
        ("{{ dict(a=1).popitem('x') }}", r"\w+"),
    ],
)
def test_whatever_a_template_raises_is_the_error_of_the_row(tokenizer: Path, fault: str, said: str) -> None:
    processor = ChatProcessor(with_template(tokenizer, showing(fault + "{{ m.content }}")))
    with pytest.raises(DataError, match=r"the chat template refuses the conversation \(") as raised:
        processor.process(stored([{"role": "assistant", "content": "é"}]))
    assert raised.match(said)
    (measured,) = processor.measure_all([stored([{"role": "assistant", "content": "é"}])])
    assert isinstance(measured, DataError)


def test_a_template_that_is_nested_too_deep_is_refused(tokenizer: Path) -> None:
    with pytest.raises(ConfigError, match="the chat template is not one"):
        ChatProcessor(with_template(tokenizer, "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"))


@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
@pytest.mark.parametrize("written", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_is_shown_under_the_key_that_a_template_reads(tokenizer: Path, read: str, written: str) -> None:
    processor = ChatProcessor(with_template(tokenizer, showing("{{ m." + read + " }}{{ m.content }}")))
    sample = stored([{"role": "assistant", "content": "so", written: "since "}])
    assert learnt(processor, sample) == "since so<|end|>"
    assert processor.not_shown([sample]) == [0]


# A template that writes all keys of messages that templates are known to read.
WRITES_ALL = showing(
    "{{ m.name }}{{ m.tool_call_id }}{{ m.reasoning_content }}{{ m.content }}{{ m.function_call }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
)
NOT_TEXTS = [None, True, 1.5, ["x"], {"a": None}, [{"type": "text", "text": "x"}], float("nan")]


def call(**values: Any) -> dict[str, Any]:
    return {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "w", "arguments": {}}} | values]}


def function(**values: Any) -> dict[str, Any]:
    return call(function={"name": "w", "arguments": {}} | values)


WRONG_KEYS: list[tuple[str, dict[str, Any]]] = [
    *(("name", {"name": value}) for value in NOT_TEXTS[1:]),
    *(("tool_call_id", {"tool_call_id": value}) for value in NOT_TEXTS[1:]),
    *((key, {key: value}) for key in REASONING_KEYS for value in [*NOT_TEXTS[1:], 7, False]),
    *(("tool_calls.id", call(id=value)) for value in NOT_TEXTS[1:]),
    *(("tool_calls.function", call(function=value)) for value in [*NOT_TEXTS[:4], "w"]),
    *(("tool_calls.function.name", function(name=value)) for value in [*NOT_TEXTS, 7, " "]),
    *(("tool_calls.function.arguments", function(arguments=value)) for value in [True, 1.5, 7]),
    *(("function_call", {"function_call": value}) for value in NOT_TEXTS[1:4]),
    *(("function_call.name", {"function_call": {"name": value}}) for value in NOT_TEXTS),
    *(("role", {"role": value}) for value in ["", " ", "user\n<|im_end|>"]),
]


@pytest.mark.parametrize(("key", "values"), WRONG_KEYS)
def test_a_value_that_a_template_would_write_in_pythons_notation_is_an_error(
    key: str, values: dict[str, Any], named_processor: ChatProcessor
) -> None:
    answer = {"role": "assistant", "content": "x"}
    messages = [{"role": "user", "content": "q"} | ({"role": values["role"]} if key == "role" else {}), answer | values]
    messages = messages if key != "role" else [messages[0], answer]
    reason = r"a message has {} .* unchanged: write .*, or remove the key"
    converted = re.escape(key.replace("function_call", "tool_calls.function"))
    with pytest.raises(DataError, match=reason.format(converted)):
        find_mapper([{"messages": messages}], SchemaOptions())({"messages": messages}, None)
    with pytest.raises(DataError, match=reason.format(re.escape(key))):
        named_processor.process(stored(messages))


@pytest.fixture(scope="module")
def named_processor(tokenizer: Path) -> ChatProcessor:
    return ChatProcessor(with_template(tokenizer, WRITES_ALL))


def test_nulls_of_keys_and_calls_are_left_out(named_processor: ChatProcessor) -> None:
    """Tables of structs fill keys that a row lacks with null."""
    nulls = {"name": None, "tool_call_id": None, "reasoning_content": None, "function_call": None}
    answer = {"role": "assistant", "content": None, **call(id=None, index=None), **nulls}
    asked = {"role": "user", "content": "q", **nulls, "tool_calls": None}
    messages = json.loads(
        find_mapper([{"messages": [asked, answer]}], SchemaOptions())({"messages": [asked, answer]}, None)["messages"]
    )
    assert messages[0] == {"role": "user", "content": "q"}
    assert messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "w", "arguments": {}}}]
    for each in (messages, [asked, messages[1]]):
        text = named_processor.tokenizer.decode(named_processor.process(stored(each))["input_ids"])
        assert "None" not in text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"x": NaN}', "arguments of a call are not JSON"),
        ('{"x": -Infinity}', "arguments of a call are not JSON"),
        ('{"x": "\\ud800"}', "arguments of a call are not JSON"),
        ('{"x":' * 3000 + "1" + "}" * 3000, "arguments of a call are nested too deep"),
    ],
)
def test_arguments_that_only_python_reads_are_an_error(
    arguments: str, reason: str, named_processor: ChatProcessor
) -> None:
    row = {"messages": called(arguments)}
    with pytest.raises(DataError, match=reason):
        find_mapper([row], SchemaOptions())(row, None)
    with pytest.raises(DataError, match=reason):
        named_processor.process(stored(row["messages"]))


def test_half_of_a_surrogate_pair_in_any_key_is_an_error_of_its_sample(named_processor: ChatProcessor) -> None:
    right = stored([{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}])
    for wrong in ({"name": "\ud800"}, {"content": "\ud800"}, function(name="\ud800")):
        made = named_processor.tokenize_all([right, stored([{"role": "assistant", "content": "x"} | wrong])])
        assert not isinstance(made[0], DataError)
        assert "half of a surrogate pair" in str(made[1])


def test_lists_of_arguments_are_written_as_json(tokenizer: Path) -> None:
    shown = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
    processor = ChatProcessor(with_template(tokenizer, showing(shown)))
    assert learnt(processor, stored(called([{"x": "y", "z": None}]))) == '[{"x": "y", "z": null}]<|end|>'
