"""Model makers' templates with model makers' tokenizers: no conversation that a template shows is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from lmms_stream.errors import DataError
from lmms_stream.processors.base import IGNORED_LABEL
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.tokenizers import FastTokenizer

from ..rounds import in_long_rounds
from . import makers


def trained_on(loaded: FastTokenizer, processed: Mapping[str, Any]) -> list[str]:
    pairs = zip(processed["input_ids"].tolist(), processed["labels"].tolist(), strict=True)
    runs = groupby(pairs, lambda pair: pair[1] != IGNORED_LABEL)
    return [loaded.decode([token for token, _ in run]) for is_trained, run in runs if is_trained]


def rendered(loaded: FastTokenizer, conversation: makers.Conversation) -> str | None:
    """Return transformers' text; None if the template raises."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages, tools = conversation
    texts = {name: text for name, text in loaded.special_tokens.items() if isinstance(text, str)}
    try:
        (text,), _ = render_jinja_template(
            [messages], tools=tools, chat_template=loaded.chat_templates["default"], **texts
        )
    except Exception:  # noqa: BLE001 - templates raise any error
        return None
    return str(text)


def shown_answers(loaded: FastTokenizer) -> Iterator[tuple[str, makers.Conversation, list[list[str]]]]:
    """Yield the conversations whose answers are all in the text of transformers."""
    for kind, conversation in makers.CONVERSATIONS.items():
        text, answers = rendered(loaded, conversation), [*makers.words_of(conversation[0])]
        if text is not None and all(word in text for words in answers for word in words):
            yield kind, conversation, answers


@in_long_rounds
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3", "deepseek_v3"])
def test_what_a_template_shows_is_trained_on(name: str) -> None:
    loaded = makers.tokenizer(name)
    special = {"bos_token": "<|bos|>", **loaded.special_tokens}
    sources = {**makers.templates(), **({name: loaded.chat_templates["default"]} if loaded.chat_templates else {})}
    refused, lost, num_shown = [], [], 0
    for template, source in sources.items():
        processor = ChatProcessor(replace(loaded, chat_templates={"default": source}, special_tokens=special))
        for kind, conversation, answers in shown_answers(processor.tokenizer):
            num_shown += 1
            try:
                processed = processor.process(makers.stored(conversation))
            except Exception as error:  # noqa: BLE001 - any is a refusal
                refused.append((template, kind, str(error)))
                continue
            texts = trained_on(loaded, processed)
            if not all(any(word in text for text in texts) for words in answers for word in words):
                lost.append((template, kind, texts))
    assert (refused, lost) == ([], [])
    assert num_shown > 350


@in_long_rounds
def test_deepseeks_own_template_leads_no_prompt_to_calls_of_a_second_step() -> None:
    """The template writes these calls without a header, as if the first step had made them, and writes another text
    before them than behind a result at the end.
    """
    loaded = makers.tokenizer("deepseek_v3")
    called = [{**makers.ROME, "function": {"name": "get_weather", "arguments": "{}"}}]
    step = [makers.answer(None, tool_calls=called), makers.result("3")]
    messages = [makers.user("Weather?"), *step, *step]
    context, whole = rendered(loaded, (messages[:3], None)), rendered(loaded, (messages, None))
    assert context is not None
    assert context.endswith("<｜tool▁outputs▁end｜>")
    assert not str(whole).startswith(context)
    with pytest.raises(DataError, match=r"does not begin message 3 with its generation prompt|changes message 3"):
        ChatProcessor(loaded).process(makers.stored((messages, None)))
