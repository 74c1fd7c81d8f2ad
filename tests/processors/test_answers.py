"""Answers are found in whole conversations of model makers' templates, and of templates that tests write."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors.base import IGNORED_LABEL, or_error, processor_fingerprint
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.not_shown import check_shown, counts_of, counts_text
from lmms_stream.processors.preference import PreferenceProcessor

from ..rounds import rounds
from ..strategies import examples
from .test_chat_template import DROPS_THOUGHTS
from .test_stops import chat, tokenizer, trained_on

MAKERS = pytest.mark.skipif(find_spec("trl") is None, reason="TRL ships the templates of model makers")
CALL = {"id": "call12345", "type": "function", "function": {"name": "look", "arguments": {"at": "Rome"}}}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "look", "content": "3"}
TURNS = chat(("user", "Hi"), ("assistant", "One."), ("user", "And?"), ("assistant", "Two."))
TOOLS: list[dict[str, Any]] = [
    *chat(("user", "Hi")),
    {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]},
    RESULT,
    *chat(("assistant", "It is 3."), ("user", "Thanks"), ("assistant", "Welcome.")),
]
THOUGHTS: list[dict[str, Any]] = [
    *chat(("user", "Hi")), {"role": "assistant", "content": "One.", "reasoning_content": "hm"},
    *chat(("user", "And?")), {"role": "assistant", "content": "Two.", "reasoning_content": "so"},
]  # fmt: skip


def of_maker(name: str) -> ChatProcessor:
    import trl

    source = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    loaded = tokenizer(source)
    loaded.add_special_tokens({"bos_token": "<|bos|>"})
    return ChatProcessor(loaded)


def answers_of(processor: ChatProcessor, messages: list[dict[str, Any]]) -> list[str]:
    sample = {"messages": json.dumps(messages)}
    processed = processor.process(sample)
    assert processor.measure(sample) == len(processed["input_ids"])
    texts: list[list[int]] = [[]]
    for token, label in zip(processed["input_ids"].tolist(), processed["labels"].tolist(), strict=True):
        if label != IGNORED_LABEL:
            texts[-1].append(token)
        elif texts[-1]:
            texts.append([])
    return [processor.tokenizer.decode(each) for each in texts if each]


CASES: list[tuple[str, list[dict[str, Any]], list[str]]] = [
    ("qwen3", TURNS, ["One.<|im_end|>", "<think>\n\n</think>\n\nTwo.<|im_end|>"]),
    ("qwen3", THOUGHTS, ["One.<|im_end|>", "<think>\nso\n</think>\n\nTwo.<|im_end|>"]),
    ("qwen3_5_nothink", TURNS, ["One.<|im_end|>", "Two.<|im_end|>"]),
    ("nemotron_3_nano", TURNS, ["<think></think>One.<|im_end|>", "<think></think>Two.<|im_end|>"]),
    ("gptoss", TURNS, ["<|channel|>final<|message|>One.<|end|>", "<|channel|>final<|message|>Two.<|return|>"]),
    ("phi3", TURNS, ["One.<|end|>", "Two.<|end|>\n<|end|>"]),
    (
        "deepseek_r1_distill", THOUGHTS,
        ["One.<｜end▁of▁sentence｜>", "so\n</think>\n\nTwo.<｜end▁of▁sentence｜>"],
    ),
    (
        "gemma4_v4", TOOLS,
        ['<|tool_call>call:look{at:<|"|>Rome<|"|>}<tool_call|><|tool_response>', "Let me look.<turn|>",
         "It is 3.<turn|>", "Welcome.<turn|>"],
    ),
    ("idefics3", [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in TURNS],
     [" One.<end_of_utterance>", " Two.<end_of_utterance>"]),
]  # fmt: skip


@MAKERS
@pytest.mark.parametrize(
    ("name", "messages", "expected"), CASES, ids=lambda case: case if isinstance(case, str) else ""
)
def test_each_answer_is_trained_on_as_the_whole_conversation_shows_it(
    name: str, messages: list[dict[str, Any]], expected: list[str]
) -> None:
    assert answers_of(of_maker(name), messages) == expected


@MAKERS
def test_an_answer_of_which_nothing_is_shown_is_counted_and_not_trained_on() -> None:
    called = [*TOOLS]
    called[1] = {**called[1], "content": ""}
    processor, sample = of_maker("qwen2_5_vl"), {"messages": json.dumps(called)}
    assert answers_of(processor, called) == ["It is 3.<|im_end|>", "Welcome.<|im_end|>"]
    (bits,) = processor.not_shown([sample])
    assert isinstance(bits, int)
    assert counts_of([bits]) == {"tool_calls": 1, "answers": 1}  # type: ignore[arg-type]
    assert "1 sample has an answer of which nothing is shown" in counts_text({"answers": 1})
    check_shown(bits, on_dropped="warn")
    with pytest.raises(DataError, match="does not show the tool calls of the conversation"):
        check_shown(bits, on_dropped="error")
    shows_parts = of_maker("idefics3")
    assert answers_of(shows_parts, TURNS) == []
    (bits,) = shows_parts.not_shown([{"messages": json.dumps(TURNS)}])
    with pytest.raises(DataError, match="does not show the answers of the conversation"):
        check_shown(bits, on_dropped="error")  # type: ignore[arg-type]


@MAKERS
def test_answers_that_lose_their_thoughts_are_counted() -> None:
    processor = of_maker("qwen3")
    (bits,) = processor.not_shown([{"messages": json.dumps(THOUGHTS)}])
    assert counts_of([bits]) == {"reasoning": 1, "thoughts": 1}  # type: ignore[arg-type]
    assert "1 answer is trained on without its thoughts: lmms-stream convert --learn each" in counts_text(
        {"thoughts": 1}
    )


FOUND = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content CUT }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SAID, END = "<|{{ m.role }}|>{{ m.content CUT }}", "<|end|>"
PROMPT, EACH, NEXT = "{% if add_generation_prompt %}<|assistant|>{% endif %}", "{% for m in messages %}", "{% endfor %}"
LOOPS = {
    "a slice": FOUND.replace("in messages", "in messages[:1] + messages[1:]"),
    "a macro": "{% macro say(m) %}" + SAID + END + "{% endmacro %}" + EACH + "{{ say(m) }}" + NEXT + PROMPT,
    "an assignment": "{% for i in range(messages | length) %}{% set m = messages[i] %}" + SAID + END + NEXT + PROMPT,
    "a look ahead": EACH
    + "{% for o in messages %}{% if o.role == 'x' %}x{% endif %}"
    + NEXT
    + SAID
    + END
    + NEXT
    + PROMPT,
    "the prompt in the loop": EACH + SAID + END + "{% if loop.last %}" + PROMPT + "{% endif %}" + NEXT,
    "ends that the next message writes": EACH
    + "{% if not loop.first %}<|end|>{% endif %}"
    + SAID
    + NEXT
    + END
    + PROMPT,
}
CUTS: dict[str, Callable[[str], str]] = {
    "": str,
    " | trim": str.strip,
    ".split('</think>')[-1]": lambda text: text.split("</think>")[-1],
}


@pytest.mark.parametrize("loop", LOOPS)
def test_answers_are_found_for_any_loop_over_messages_and_any_texts(loop: str) -> None:
    draws = random.Random(1)
    for cut, expected in CUTS.items():
        processor = ChatProcessor(tokenizer(LOOPS[loop].replace(" CUT", cut)))
        for _ in range(rounds(6, 200)):
            texts = [
                "".join(draws.choices(["one", "two", " ", "\n", "<b>", "é", "{", "\U000f0000"], k=4)) for _ in range(4)
            ]
            texts[1] = draws.choice(["", "<think>so</think>"]) + texts[1]
            messages = chat(*zip(["user", "assistant"] * 2, texts, strict=True))
            assert answers_of(processor, messages) == [expected(text) + "<|end|>" for text in texts[1::2]]


def test_where_places_cannot_be_proven_the_beginnings_of_conversations_are_compared() -> None:
    by_index = (
        "{% for i in range(messages | length) %}<|{{ messages[i].role }}|>{{ messages[i].content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert trained_on(ChatProcessor(tokenizer(by_index)), TURNS) == "One.<|end|>Two.<|end|>"
    changing = by_index.replace("<|end|>", "<|end|>{{ messages | length }}")
    with pytest.raises(DataError, match="changes message 1 when messages follow"):
        trained_on(ChatProcessor(tokenizer(changing)), TURNS)


def test_prompts_that_a_template_changes_are_not_compared() -> None:
    processor = PreferenceProcessor(tokenizer(DROPS_THOUGHTS))
    stored = {"prompt": TURNS[:3], "chosen": TURNS[3:], "rejected": chat(("assistant", "No."))}
    sample = {"messages": json.dumps(stored)}
    made = processor.process(sample)
    kept = made["labels"][made["labels"] != IGNORED_LABEL].tolist()
    assert processor.tokenizer.decode(kept) == "<think></think>Two.<|end|><think></think>No.<|end|>"
    assert processor.measure(sample) == len(made["input_ids"])


CONTENTS = [
    "Hi",
    "",
    " ",
    None,
    "<think>\nhm\n</think>\n\nOne.",
    "<think>never ends",
    [{"type": "text", "text": "a"}],
    "{% x %}",
]
answers = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.sampled_from(CONTENTS)},
    optional={
        "tool_calls": st.sampled_from([[CALL], [CALL, {**CALL, "id": "call12346"}], []]),
        "reasoning_content": st.sampled_from(["hm", "", None]),
        "learn": st.booleans(),
    },
)
others = st.sampled_from([*chat(("user", "And?"), ("user", ""), ("system", "Be brief.")), RESULT])
conversations = st.lists(answers | others, min_size=1, max_size=6)
NAMES = rounds(
    ("qwen3", "gptoss"),
    (
        "deepseekv3",
        "llama3_1",
        "phi3",
        "glm4moe",
        "gemma3",
        "gemma4_v4",
        "lfm2",
        "smolvlm",
        "nemotron_3_nano",
        "cohere2",
        "deepseek_r1_distill",
    ),
)
PROCESSORS: dict[str, Callable[[ChatProcessor], Any]] = {
    "all": lambda chats: chats,
    "last": lambda chats: ChatProcessor(chats.tokenizer, learn="last"),
    "stop": lambda chats: ChatProcessor(chats.tokenizer, learn_stop=True),
    "dpo": lambda chats: PreferenceProcessor(chats.tokenizer),
    "kto": lambda chats: PreferenceProcessor(chats.tokenizer, objective="kto"),
}


@MAKERS
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_length_is_measured_exactly_where_training_takes_the_row(kind: str, name: str) -> None:
    try:
        processor = PROCESSORS[kind](of_maker(name))
    except ConfigError:  # no token ends the template's answers
        return

    @examples(24)
    @given(conversations, conversations)
    def check(messages: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
        row: Any = messages
        if isinstance(processor, PreferenceProcessor):
            row = {"prompt": messages[:-1], "chosen": messages[-1:], "rejected": other[-1:]}
            if processor.objective == "kto":
                row = {"prompt": messages[:-1], "completion": messages[-1:], "label": True}
        sample = {"messages": json.dumps(row)}
        length, processed = or_error(processor.measure, sample), or_error(processor.process, sample)
        if isinstance(length, DataError) or isinstance(processed, DataError):
            assert (type(length), str(length)) == (type(processed), str(processed))
        else:
            assert length == len(processed["input_ids"])

    check()


@MAKERS
@pytest.mark.parametrize("name", ["qwen3", "phi3_training", "diffusion_gemma_training"])
def test_a_run_with_other_answers_to_train_on_takes_all_rows_of_a_conversion(name: str) -> None:
    chats = of_maker(name)
    last = PROCESSORS["last"](chats)
    assert processor_fingerprint(last) == processor_fingerprint(chats)  # the lengths of the conversion are its own
    assert processor_fingerprint(ChatProcessor(chats.tokenizer, learn_stop=True)) != processor_fingerprint(chats)

    @examples(24)
    @given(conversations)
    def check(messages: list[dict[str, Any]]) -> None:
        sample = {"messages": json.dumps(messages)}
        length = or_error(chats.measure, sample)
        assert isinstance(length, DataError) or len(last.process(sample)["input_ids"]) == length

    check()
    for messages in (TURNS, TOOLS, THOUGHTS):
        assert answers_of(last, messages)[-1:] == answers_of(chats, messages)[-1:] != []
