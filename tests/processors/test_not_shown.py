"""What a chat template does not show of a conversation is found, by kind."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.errors import DataError
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.lengths import measured_with_media, shown_lengths, tells_not_shown, with_not_shown
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.processors.not_shown import (
    KINDS,
    MASKED,
    THOUGHTS,
    UNSHOWN,
    bit_of,
    check_shown,
    counts_text,
    keys_named,
    kinds_of,
)
from lmms_stream.processors.preference import MediaPreferenceProcessor, PreferenceProcessor

from .test_chat_template import stored, with_template
from .test_template_inputs import showing
from .tiny_vlm import save_processor

PLAIN = showing("{{ m.content }}")
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content | trim }}</think>{% endif %}"
WHOLE = "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}" + showing(THOUGHT + "{{ m.content | trim }}" + CALLS)
# Shows the thoughts of the last message only, also where they are in its content, as Qwen3's template does.
LAST_THOUGHT = "{% if tools %}{{ tools | tojson }}{% endif %}" + showing(
    "{% set content = m.content %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last %}<think>{{ thought }}</think>{% endif %}{{ content }}" + CALLS
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}}]
CALL = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "reasoning_content": "I look. ", "tool_calls": [CALL]},
    {"role": "tool", "content": "rain", "tool_call_id": "1", "name": "weather"},
    {"role": "assistant", "content": " It rains."},
]


def found(processor: Any, messages: list[dict[str, Any]], tools: Any = None) -> list[str]:
    """Kinds of content; the counts of answers follow from them."""
    (bits,) = processor.not_shown([stored(messages, tools)])
    kinds = kinds_of(bits)
    return [kind for kind in kinds if kind not in (UNSHOWN, THOUGHTS, *[MASKED] * (UNSHOWN in kinds))]


def chatting(tokenizer: Path, template: str) -> ChatProcessor:
    return ChatProcessor(with_template(tokenizer, template))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (WHOLE, []),
        (PLAIN, ["tools", "tool_calls", "reasoning"]),
        ("{% if tools %}{{ tools | length }} tools{% endif %}" + PLAIN, ["tools", "tool_calls", "reasoning"]),
        (WHOLE.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"), ["system"]),
        (WHOLE.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"), ["tool_results"]),
        (WHOLE.replace("{% for m in messages %}", "{% for m in messages if m.role != 'user' %}"), ["content"]),
        (WHOLE.replace("c.function |", "c.function.name |"), ["tool_calls"]),
        (WHOLE.replace("tools | tojson", "tools | map(attribute='function.name') | list | tojson"), ["tools"]),
        (WHOLE.replace("tools | tojson", "tools | map(attribute='function.description') | list | tojson"), ["tools"]),
        (
            "{% for t in tools or [] %}{{ t.function.name }}{% for name in t.function.parameters.properties or [] %}"
            "{{ name }}{% if name in t.function.parameters.required %}!{% endif %}{% endfor %}"
            "{{ t.function.description }}{% endfor %}" + WHOLE[WHOLE.index("{% for m in") :],
            [],
        ),
        (WHOLE.replace("{{ m.content | trim }}", "{{ m.content | upper }}"), []),
        (WHOLE.replace("{{ m.content | trim }}", "{{ m.content | trim | tojson }}"), []),
        (WHOLE.replace("{{ m.content | trim }}", "{% for w in m.content.split() %}{{ w }}\n{% endfor %}"), []),
        (LAST_THOUGHT.replace("m.content %}", "m.content or '' %}"), ["reasoning"]),
    ],
)
def test_kinds_of_content_that_a_template_does_not_show(tokenizer: Path, template: str, expected: list[str]) -> None:
    processor = chatting(tokenizer, template)
    for _ in range(2):  # the second time the shape is known
        assert found(processor, CHAT, TOOLS) == expected
    assert found(pickle.loads(pickle.dumps(processor)), CHAT, TOOLS) == expected


def test_tools_and_calls_without_the_layer_of_functions(tokenizer: Path) -> None:
    chat = copy.deepcopy(CHAT)
    chat[2]["tool_calls"] = [{"name": "weather", "arguments": {"city": "Oslo"}}]
    flat = WHOLE.replace("c.function |", "c |")
    assert found(chatting(tokenizer, flat), chat, [TOOLS[0]["function"]]) == []
    assert found(chatting(tokenizer, PLAIN), chat, [TOOLS[0]["function"]]) == ["tools", "tool_calls", "reasoning"]


def test_tools_of_which_a_template_shows_a_part_decide_for_their_rows_only(tokenizer: Path) -> None:
    names = "tools | map(attribute='function.name') | list | tojson"
    bare = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    for step in (1, -1):
        processor = chatting(tokenizer, WHOLE.replace("tools | tojson", names))
        for tools, expected in [(TOOLS, ["tools"]), (bare, [])][::step]:
            assert found(processor, CHAT, tools) == expected


def test_texts_that_differ_in_tags_of_no_template_are_measured_by_one_shape(tokenizer: Path) -> None:
    processor = chatting(tokenizer, LAST_THOUGHT)
    for question in ("q", "<p>q</p>", "<div> q", "q\n</b>", "q</table>", "1 < 2", "<br/>"):
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": "a"}]
        assert found(processor, chat) == []
    assert len(processor._conversations._not_shown._known) == 1


def test_a_text_that_stands_elsewhere_does_not_hide_what_is_lost(tokenizer: Path) -> None:
    """The user says the name of the tool, and the answer repeats the thought."""
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": 'weather {"city": "Oslo"}'},
        {"role": "assistant", "content": "x", "reasoning": "x", "tool_calls": [CALL]},
    ]
    assert found(chatting(tokenizer, PLAIN), chat, TOOLS) == ["tools", "tool_calls", "reasoning"]


def test_thoughts_of_earlier_answers_that_a_template_leaves_out(tokenizer: Path) -> None:
    processor = chatting(tokenizer, LAST_THOUGHT)
    asked: dict[str, Any] = {"role": "user", "content": "q"}
    for answer in ({"reasoning_content": "t", "content": "a"}, {"content": "<think>\nt\n</think>\n\na"}):
        answers: list[dict[str, Any]] = [asked, {"role": "assistant", **answer}]
        assert found(processor, answers) == []
        assert found(processor, answers * 2) == ["reasoning"]
    assert found(processor, [asked, {"role": "assistant", "content": "a"}] * 2) == []
    assert found(processor, [{"role": "user", "content": "what is </think>?"}, answers[1]]) == []


LOST_THOUGHT = "<think>\nlong\n</think>\n\na"


@pytest.mark.parametrize("as_parts", [False, True])
def test_empty_thoughts_are_not_counted_whichever_row_comes_first(as_parts: bool, tokenizer: Path) -> None:
    rows = []
    for answer in ("<think>\n\n</think>\n\na", LOST_THOUGHT):
        contents = ["q", answer, "q", "a"]
        rows.append(
            [
                {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}
                for role, text in zip(["user", "assistant"] * 2, contents, strict=True)
            ]
        )
    for order in ([0, 1], [1, 0]):
        processor = chatting(tokenizer, LAST_THOUGHT)
        assert [found(processor, rows[number]) for number in order] == [["reasoning"] * number for number in order]


def test_text_around_and_between_thoughts_that_a_template_cuts_out(tokenizer: Path) -> None:
    processor = chatting(tokenizer, LAST_THOUGHT)
    asked: dict[str, Any] = {"role": "user", "content": "q"}
    for answer, expected in (
        ("<think>t</think> end", []),
        ("t</think> end", []),
        ("Sure. <think>t</think> end", ["content"]),
        ("<think>t</think> first <think>u</think> end", ["reasoning", "content"]),
        ("<think>t</think><think>u</think> end", ["reasoning"]),
        ("<think>t", []),
    ):
        assert found(processor, [asked, {"role": "assistant", "content": answer}]) == expected


def test_tags_around_a_text_stay_for_templates_that_test_them(tokenizer: Path) -> None:
    """Qwen3's template shows the thoughts of all answers after the last question, and results are no question."""
    asks = "m.role == 'user' and not (m.content.startswith('<result>') and m.content.endswith('</result>'))"
    last = "{% set ns = namespace(last=0) %}{% for m in messages %}{% if " + asks + " %}{% set ns.last = loop.index %}"
    after = LAST_THOUGHT.replace("loop.last", "loop.index > ns.last")
    thought = {"role": "assistant", "content": LOST_THOUGHT}
    results = [("<result>\n3\n</result>", []), ("<result> 3", ["reasoning"]), ("3 </result>", ["reasoning"])]
    for order in (results, results[::-1]):
        processor = chatting(tokenizer, last + "{% endif %}{% endfor %}" + after)
        for result, expected in order:
            chat = [{"role": "user", "content": "q"}, thought, {"role": "user", "content": result}, thought]
            assert found(processor, chat) == expected


def test_two_texts_of_reasoning_of_which_a_template_shows_one(tokenizer: Path) -> None:
    for order in (("t", "other"), ("other", "t")):
        processor = chatting(tokenizer, WHOLE)
        for reasoning in order:
            answer = {"role": "assistant", "content": "a", "reasoning_content": " t", "reasoning": reasoning}
            assert found(processor, [{"role": "user", "content": "q"}, answer]) == ["reasoning"] * (reasoning != "t")


@pytest.mark.parametrize(
    ("called", "is_lost"),
    [
        ({"arguments": [1, 2]}, True),
        ({"arguments": [{"name": "city", "value": "Oslo"}]}, True),
        ({"arguments": "Oslo"}, True),
        ({"parameters": {"city": "Oslo"}}, True),
        ({"arguments": {"city": "Oslo"}}, True),
        ({"arguments": [[], {}]}, False),
        ({"arguments": " "}, False),
        ({"arguments": {}}, False),
        ({}, False),
    ],
)
def test_arguments_of_any_form_that_are_not_shown(called: dict[str, Any], is_lost: bool, tokenizer: Path) -> None:
    asked: dict[str, Any] = {"role": "user", "content": "q"}
    chat = [asked, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "w", **called}}]}]
    assert found(chatting(tokenizer, WHOLE), chat) == []
    names_only = chatting(tokenizer, WHOLE.replace("c.function |", "c.function.name |"))
    assert found(names_only, chat) == ["tool_calls"] * is_lost
    values = "{% for a in c.function.arguments %}{{ a.value }}{% endfor %}{{ c.function.name }}"
    if called.get("arguments") == [{"name": "city", "value": "Oslo"}]:
        assert found(chatting(tokenizer, WHOLE.replace("{{ c.function | tojson }}", values)), chat) == []


def test_short_values_that_a_template_tests_decide_for_their_rows_only(tokenizer: Path) -> None:
    typed = "{% for t in tools or [] if t.type == 'function' %}{{ t.function | tojson }}{% endfor %}"
    channels = showing("{% if m.channel != 'hidden' %}{{ m.content }}{% endif %}")
    asked: dict[str, Any] = {"role": "user", "content": "q"}
    untyped = [{"function": TOOLS[0]["function"]}]
    for step in (1, -1):
        processor = chatting(tokenizer, typed + channels)
        for tools, expected in [(TOOLS, []), (untyped, ["tools"])][::step]:
            assert found(processor, [asked, {"role": "assistant", "content": "a"}], tools) == expected
        for channel, expected in [("final", []), ("hidden", ["content"])][::step]:
            assert found(processor, [asked, {"role": "assistant", "content": "a", "channel": channel}]) == expected


def test_a_call_without_a_content_is_not_of_the_shape_of_a_null_answer(tokenizer: Path) -> None:
    processor = chatting(tokenizer, PLAIN)
    asked: dict[str, Any] = {"role": "user", "content": "q"}
    assert found(processor, [asked, {"role": "assistant", "content": None}]) == ["empty"]
    assert found(processor, [asked, {"role": "assistant", "tool_calls": [CALL]}]) == ["tool_calls"]


def test_texts_that_a_template_writes_as_json_are_shown_also_where_it_refuses_marks(tokenizer: Path) -> None:
    strict = "{% if m.role == 'tool' and not m.content.startswith('{') %}{{ raise_exception('no') }}{% endif %}"
    content = "{{ m.content | tojson(ensure_ascii=true) }}"
    processor = chatting(tokenizer, showing(strict + content + CALLS))
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": 'say "hi"\nin Århus'},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": "3"}'},
        {"role": "assistant", "content": "Ø"},
    ]
    assert found(processor, chat) == []
    hidden = strict + "{% if m.role != 'user' %}" + content + "{% endif %}" + CALLS
    assert found(chatting(tokenizer, showing(hidden)), chat) == ["content"]


def test_a_template_that_refuses_marks_is_asked_by_the_texts_themselves(tokenizer: Path) -> None:
    strict = "{% if m.content not in ['q', 'a', ''] %}{{ raise_exception('no') }}{% endif %}"
    processor = chatting(tokenizer, showing(strict + "{% if m.role != 'user' %}{{ m.content }}{% endif %}"))
    answer = {"role": "assistant", "content": "a"}
    assert found(processor, [{"role": "user", "content": "q"}, answer]) == ["content"]
    assert found(processor, [{"role": "user", "content": ""}, answer]) == []
    assert found(processor, [{"role": "user", "content": "other"}, answer]) == []  # measuring it is the error


def test_what_is_not_shown_to_other_processors(tokenizer: Path, tmp_path: Path) -> None:
    answers = {"chosen": CHAT[2:3], "rejected": CHAT[4:]}
    sample = {"messages": json.dumps({"prompt": CHAT[:2], **answers, "tools": TOOLS})}
    processor = PreferenceProcessor(with_template(tokenizer, PLAIN))
    assert [kinds_of(bits) for bits in processor.not_shown([sample])] == [  # type: ignore[arg-type]
        ["tools", "tool_calls", "reasoning", "answers"]
    ]
    texts = {"messages": json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"})}
    assert processor.not_shown([texts]) == [0]

    save_processor(tmp_path)
    media = MultimodalProcessor.from_pretrained(str(tmp_path))
    image = {"type": "image", "mime": "image/png", "span": [0, 0], "width": 28, "height": 28}
    chat = [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}, CHAT[2]]
    assert found(media, chat, TOOLS) == ["reasoning"]
    pair = {"messages": json.dumps({"prompt": chat[:1], "chosen": CHAT[2:3], "rejected": CHAT[4:]}), "media": b""}
    assert [kinds_of(bits) for bits in MediaPreferenceProcessor(media).not_shown([pair])] == [  # type: ignore[arg-type]
        ["reasoning", "thoughts"]
    ]


def test_a_sample_that_cannot_be_read_is_its_error(tokenizer: Path) -> None:
    (error,) = chatting(tokenizer, PLAIN).not_shown([{"messages": "["}])
    assert isinstance(error, DataError)

    class Other(ChatProcessor):
        def process(self, sample: Any) -> Any:
            return super().process(sample)

    assert tells_not_shown(chatting(tokenizer, PLAIN))
    assert not tells_not_shown(Other(with_template(tokenizer, PLAIN)))  # it may read samples otherwise


@pytest.mark.parametrize("learn", ["all", "last"])
@pytest.mark.parametrize("template", [PLAIN, WHOLE])
def test_lengths_and_content_of_one_reading_are_those_of_two(template: str, learn: Any, tokenizer: Path) -> None:
    processor = ChatProcessor(with_template(tokenizer, template), learn=learn)
    chats = [CHAT, CHAT[1:2], [CHAT[1], {"role": "assistant", "content": " "}], [CHAT[1], CHAT[-1]], [*CHAT[:-1], {}]]
    samples = [{"messages": "["}, *(stored(chat, TOOLS) for chat in chats), stored(CHAT[3:])]
    of_two = with_not_shown(processor, samples, measured_with_media(processor, samples))
    of_one = shown_lengths(processor, samples)
    assert [str(each) for each in of_one] == [str(each) for each in of_two]


def test_lost_tools_and_calls_are_an_error_and_other_content_is_counted() -> None:
    for kind in KINDS:
        if kind in ("tools", "tool_calls", "answers"):
            name = kind.replace("_", " ")
            with pytest.raises(DataError, match=f"does not show the {name} of the conversation, .*--on-dropped warn"):
                check_shown(bit_of(kind), on_dropped="error")
        else:
            check_shown(bit_of(kind), on_dropped="error")
        check_shown(bit_of(kind), on_dropped="warn")
    assert counts_text({"tool_calls": 3, "reasoning": 1}) == (
        "the chat template does not show: tool calls of 3 samples, reasoning of 1 sample"
    )


def test_words_of_a_template_are_the_keys_that_it_reads(tokenizer: Path) -> None:
    names = keys_named(chatting(tokenizer, WHOLE))
    assert {"content", "reasoning_content"} <= names
    assert "mood" not in names
    assert keys_named(None) == set()
