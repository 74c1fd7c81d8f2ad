"""Answers of templates whose generation prompt begins a thought that the template cuts from answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lmms_stream.errors import DataError
from lmms_stream.processors.base import IGNORED_LABEL
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.preference import PreferenceProcessor

from .test_stops import chat, tokenizer, trained_on

CUTS_THOUGHTS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{{ (m.content or '').split('</think>')[-1] }}<|end|>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '<think>\\n' }}{% endif %}"
)  # fmt: skip
TRIMS = CUTS_THOUGHTS.replace("[-1] }}", "[-1] | trim }}")
PROMPT = "<|user|>q<|assistant|><think>\n"


def written(processor: ChatProcessor, messages: list[dict[str, Any]]) -> tuple[str, str]:
    """The text of a sample, and what of it is trained on."""
    processed = processor.process({"messages": json.dumps(messages)})
    whole = processor.tokenizer.decode(processed["input_ids"].tolist())
    return whole, trained_on(processor, messages)


@pytest.mark.parametrize("template", [CUTS_THOUGHTS, TRIMS])
@pytest.mark.parametrize("learn", ["all", "last"])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"content": "<think>\nso\n</think>\n\nyes"}, "so\n</think>\n\nyes<|end|>"),
        ({"content": "<think>so</think>yes"}, "so\n</think>yes<|end|>"),
        ({"content": "so\n</think>\n\nyes"}, "so\n</think>\n\nyes<|end|>"),
        ({"content": "yes", "reasoning_content": "so\n"}, "so\n</think>\n\nyes<|end|>"),
        ({"content": "yes"}, "\n</think>\n\nyes<|end|>"),
    ],
)
def test_the_thought_and_the_answer_after_the_generation_prompt_are_trained_on(
    template: str, learn: Any, answer: dict[str, str], expected: str
) -> None:
    processor = ChatProcessor(tokenizer(template), learn=learn)
    messages = [*chat(("user", "q")), {"role": "assistant", **answer}]
    assert written(processor, messages) == (PROMPT + expected, expected)


def test_of_several_answers_all_can_be_trained_on_or_the_last_or_each_as_a_sample() -> None:
    messages = chat(("user", "q"), ("assistant", "<think>a</think>one"), ("user", "r"), ("assistant", "b</think>two"))
    assert written(ChatProcessor(tokenizer(CUTS_THOUGHTS)), messages) == (
        "<|user|>q<|assistant|>one<|end|><|user|>r<|assistant|><think>\nb\n</think>two<|end|>",
        "one<|end|>b\n</think>two<|end|>",
    )
    last = ChatProcessor(tokenizer(CUTS_THOUGHTS), learn="last")
    assert written(last, messages) == (
        "<|user|>q<|assistant|>one<|end|><|user|>r<|assistant|><think>\nb\n</think>two<|end|>",
        "b\n</think>two<|end|>",
    )
    each = ChatProcessor(tokenizer(CUTS_THOUGHTS))
    assert trained_on(each, messages[:2]) == "a\n</think>one<|end|>"


def test_a_generation_prompt_that_answers_do_not_begin_with_is_another_error() -> None:
    template = CUTS_THOUGHTS.replace("<think>\\n", "Answer: ")
    for learn in ("all", "last"):
        processor = ChatProcessor(tokenizer(template), learn=learn)
        with pytest.raises(
            DataError, match="does not begin message 1 with its generation prompt: 'Answer: ' is missing"
        ):
            processor.process({"messages": json.dumps(chat(("user", "q"), ("assistant", "yes")))})
    marked = template.replace("{{ (m", "{% generation %}{{ (m").replace("<|end|>", "<|end|>{% endgeneration %}", 1)
    assert trained_on(ChatProcessor(tokenizer(marked)), chat(("user", "q"), ("assistant", "yes"))) == "yes<|end|>"


@pytest.mark.parametrize("content", ["ans", "<think>so</think>ans"])
@pytest.mark.parametrize("prompt", ["<|assistant|><say>\\n", "<|assistant|><think>\\n"])
def test_a_tag_that_the_template_does_not_cut_from_answers_begins_no_thought(prompt: str, content: str) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}{{ 'PROMPT' }}{% endif %}"
    ).replace("PROMPT", prompt)
    processor = ChatProcessor(tokenizer(template))
    with pytest.raises(DataError, match="does not begin message 1 with its generation prompt"):
        processor.process({"messages": json.dumps(chat(("user", "q"), ("assistant", content)))})
    begun = prompt.removeprefix("<|assistant|>").replace("\\n", "\n") + "so"
    assert trained_on(processor, chat(("user", "q"), ("assistant", begun))) == "so<|end|>"


WRITES_THOUGHTS = (  # where there is one, as MiniMax-M2's
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '<think>\\n' }}{% endif %}"
)


def test_a_template_that_writes_thoughts_behind_its_prompt_is_given_answers_without_one() -> None:
    processor = ChatProcessor(tokenizer(WRITES_THOUGHTS))
    thinks = [*chat(("user", "q")), {"role": "assistant", "content": "yes", "reasoning_content": "so"}]
    assert trained_on(processor, thinks) == "so\n</think>\n\nyes<|end|>"
    assert trained_on(processor, chat(("user", "q"), ("assistant", "yes"))) == "\n</think>\n\nyes<|end|>"
    thought = "<think>so</think>yes"  # begins with the prompt but for the thought's tag, which is trained on
    assert trained_on(processor, chat(("user", "q"), ("assistant", thought))) == f"{thought}<|end|>"


@pytest.mark.parametrize("template", [CUTS_THOUGHTS, TRIMS])
@pytest.mark.parametrize("learn", ["all", "last"])
@pytest.mark.parametrize("content", ["<think>only", "<think>\nonly", " <think>only", "<think>"])
def test_a_thought_without_an_end_is_the_error_of_the_row(template: str, learn: Any, content: str) -> None:
    processor = ChatProcessor(tokenizer(template), learn=learn)
    messages = chat(("user", "q"), ("assistant", content))
    sample = {"messages": json.dumps(messages)}
    with pytest.raises(DataError, match=r"begins with <think> and has no </think>, .* remove the row"):
        processor.process(sample)
    (measured,) = processor.measure_all([sample])
    assert isinstance(measured, DataError)
    last = ChatProcessor(tokenizer(template), learn="last")
    messages += chat(("user", "r"), ("assistant", "so</think>yes"))
    assert trained_on(last, messages) == "so\n</think>yes<|end|>"  # the template writes the earlier answer as it is


def test_two_different_thoughts_of_an_answer_are_the_error_of_the_row() -> None:
    processor = ChatProcessor(tokenizer(CUTS_THOUGHTS))
    for answer in (
        {"content": "<think>a</think>yes", "reasoning_content": "OTHER"},
        {"content": "yes", "reasoning_content": "a", "thinking": "OTHER"},
    ):
        messages = [*chat(("user", "q")), {"role": "assistant", **answer}]
        with pytest.raises(DataError, match="has two different thoughts, 'a' and 'OTHER', and the chat template"):
            processor.process({"messages": json.dumps(messages)})
    for answer in (
        {"content": "<think>a</think>yes", "reasoning_content": "a\n", "reasoning": ""},
        {"content": "<think></think>yes", "reasoning_content": "", "thinking": "a"},
    ):
        messages = [*chat(("user", "q")), {"role": "assistant", **answer}]
        assert trained_on(processor, messages) == "a\n</think>yes<|end|>"


def test_answers_that_are_compared_follow_the_generation_prompt_too() -> None:
    processor = PreferenceProcessor(tokenizer(CUTS_THOUGHTS))
    stored = {name: chat(("assistant", f"<think>so</think>{name}")) for name in ("chosen", "rejected")}
    made = processor.process({"messages": json.dumps({"prompt": chat(("user", "q")), **stored})})
    kept = made["labels"][made["labels"] != IGNORED_LABEL].tolist()
    assert processor.tokenizer.decode(kept) == "so\n</think>chosen<|end|>so\n</think>rejected<|end|>"
