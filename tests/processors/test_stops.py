"""Ends of answers are trained on, or a template that leaves them out is warned of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.errors import ConfigError
from lmms_stream.mds.measuring import index_dataset
from lmms_stream.processors import ProcessorConfig
from lmms_stream.processors.base import IGNORED_LABEL, processor_fingerprint
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.not_shown import bit_of, counts_of, counts_text, kinds_of
from lmms_stream.processors.preference import PreferenceProcessor
from tokenizers import Tokenizer, decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

SPEAKERS = ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|end|>"]
BY_NEXT_SPEAKER = (  # as GLM's: a turn ends where the next speaker's token begins
    "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>{% else %}<|{{ m.role }}|>{% endif %}"
    "{{ '\\n' }}{{ m.content }}{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}"
    "BREAK{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}BREAK{% endfor %}"
)
CLOSED = MARKED.replace("{% endgeneration %}", "<|end|>{% endgeneration %}").replace("BREAK", "\n")
CHAT = [("user", "q"), ("assistant", "one"), ("user", "r"), ("assistant", "two")]


def tokenizer(template: str | dict[str, str], words: str = "one two") -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=SPEAKERS, initial_alphabet=ByteLevel.alphabet(), vocab_size=300, show_progress=False
    )
    backend.train_from_iterator([words], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    made.chat_template = template
    return made


def trained_on(processor: ChatProcessor, messages: list[dict[str, Any]]) -> str:
    sample = {"messages": json.dumps(messages)}
    processed = processor.process(sample)
    assert processor.measure(sample) == len(processed["input_ids"])
    return processor.tokenizer.decode(processed["labels"][processed["labels"] != IGNORED_LABEL].tolist())


def chat(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (BY_NEXT_SPEAKER.replace("BREAK", ""), "<|user|>"),
        (BY_NEXT_SPEAKER.replace("BREAK", "{{ '\\n' }}"), "\n<|user|>"),
        (MARKED.replace("BREAK", ""), "<|user|>"),
        (MARKED.replace("BREAK", "<|end|>\n"), "<|end|>"),
    ],
)
def test_the_end_of_an_answer_is_trained_on_if_asked_for_and_warned_of_if_not(template: str, end: str) -> None:
    with pytest.warns(UserWarning, match="does not mark the end of an answer"):
        without = ChatProcessor(tokenizer(template))
    assert trained_on(without, chat(*CHAT)) == "onetwo"
    processor = ChatProcessor(tokenizer(template), learn_stop=True)
    assert trained_on(processor, chat(*CHAT)) == f"one{end}two{end}"
    assert trained_on(processor, chat(*CHAT[:-1])) == f"one{end}"
    messages = chat(*CHAT)
    messages[1]["learn"] = False
    assert trained_on(processor, messages) == f"two{end}"
    messages[3]["learn"] = False
    assert trained_on(processor, messages) == ""
    last = ChatProcessor(tokenizer(template), learn="last", learn_stop=True)
    assert trained_on(last, chat(*CHAT)) == f"two{end}"


def test_a_call_of_a_tool_ends_with_the_token_of_its_result() -> None:
    processor = ChatProcessor(tokenizer(BY_NEXT_SPEAKER.replace("BREAK", "")), learn_stop=True)
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*chat(("user", "q")), {"role": "assistant", "content": "one", "tool_calls": [call]}]
    assert trained_on(processor, messages) == "one[f]<|observation|>"
    messages += chat(("tool", "r"), ("assistant", "two"))
    assert trained_on(processor, messages) == "one[f]<|observation|>two<|user|>"


def test_answers_that_have_no_end_that_is_trained_on_are_counted(tmp_path: Path) -> None:
    template = BY_NEXT_SPEAKER.replace("BREAK", "")
    asked = ChatProcessor(tokenizer(template), learn_stop=True)
    without = ChatProcessor(tokenizer(template))
    unlearnt = chat(*CHAT)
    for message in unlearnt:
        message["learn"] = False
    samples = [{"messages": json.dumps(each)} for each in (chat(*CHAT), unlearnt, chat(*CHAT[:2]))]
    bits = [each if isinstance(each, int) else -1 for each in without.not_shown(samples)]
    assert [kinds_of(each) for each in bits] == [["ends"], ["masked"], ["ends"]]
    assert counts_of(np.array(bits)) == {"ends": 3, "masked": 1}
    last_of = ChatProcessor(tokenizer(template), learn="last")
    assert counts_of(np.array(last_of.not_shown(samples))) == {"ends": 2, "masked": 1}
    pair = {"messages": json.dumps({"prompt": chat(*CHAT[:1]), "chosen": chat(CHAT[1]), "rejected": chat(CHAT[3])})}
    assert PreferenceProcessor(tokenizer(template)).not_shown([pair]) == [0]  # TRL trains on what the template writes
    masked = [0, bit_of("masked"), 0]
    assert asked.not_shown(samples) == ChatProcessor(tokenizer(CLOSED)).not_shown(samples) == masked

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples[::2]))
    for settings in ({}, {"tokenize": True}, {"shuffle_seed": 1}):
        report = convert([str(tmp_path / "rows.jsonl")], tmp_path / str(settings), processor=without, **settings)
        assert counts_text(report.not_shown) == "the ends of 3 answers are not trained on"
    index = index_dataset(str(tmp_path / "{}"), last_of, num_workers=1)
    assert counts_text(index.not_shown) == "the ends of 2 answers are not trained on"


def test_an_answer_that_a_system_turn_follows_ends_with_the_token_of_that_turn() -> None:
    processor = ChatProcessor(tokenizer(BY_NEXT_SPEAKER.replace("BREAK", "")), learn_stop=True)
    messages = chat(*CHAT[:2], ("system", "s"), *CHAT[2:])
    assert trained_on(processor, messages) == "one<|system|>two<|user|>"
    refuses = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system') }}{% endif %}"
    template = BY_NEXT_SPEAKER.replace("BREAK", "").replace("%}", "%}" + refuses, 1)
    assert trained_on(ChatProcessor(tokenizer(template), learn_stop=True), chat(*CHAT)) == "one<|user|>two<|user|>"


@pytest.mark.filterwarnings("error")
def test_a_template_that_ends_answers_itself_is_not_changed() -> None:
    closed, asked = ChatProcessor(tokenizer(CLOSED)), ChatProcessor(tokenizer(CLOSED), learn_stop=True)
    sample = {"messages": json.dumps(chat(*CHAT))}
    for name in ("input_ids", "labels"):
        assert closed.process(sample)[name].tolist() == asked.process(sample)[name].tolist()
    assert trained_on(closed, chat(*CHAT)) == "one<|end|>two<|end|>"


def test_a_template_in_which_nothing_follows_an_answer_has_no_end_to_train_on() -> None:
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<|assistant|>{% else %}"
    template += "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% if loop.last %}{% endif %}{% endfor %}"
    nothing = template.replace("{{ m.content }}<|assistant|>", "")
    with pytest.raises(ConfigError, match="writes nothing but white space between an answer and the next question"):
        ChatProcessor(tokenizer(nothing), learn_stop=True)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.content }}"
        "{% if m.role == 'user' %}\n### Response:\n{% else %}{{ '\n\n' }}{% endif %}{% endfor %}",
    ],
)
def test_a_letter_of_the_next_question_ends_no_answer(template: str) -> None:
    with pytest.warns(UserWarning, match="does not learn to stop: use a template that ends them$"):
        ChatProcessor(tokenizer(template))
    for templates in (template, {"default": CLOSED, "tool_use": template}):
        with pytest.raises(ConfigError, match=r"writes nothing but white space .*: use a template that ends them$"):
            ChatProcessor(tokenizer(templates), learn_stop=True)


def test_the_end_of_an_answer_has_no_letter_of_the_next_message() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}Q{% elif m.role == 'tool' %}{{ '\\n' + m.name }}: {% endif %}"
        "{{ m.content }}{% if m.role == 'user' %}<|assistant|>{% endif %}{% endfor %}"
    )
    processor = ChatProcessor(tokenizer(template, words="one two Qz Qz Qz"), learn_stop=True)
    assert len(processor.tokenizer.encode("Qz", add_special_tokens=False)) == 1
    assert trained_on(processor, chat(*CHAT)) == "oneQtwoQ"
    result = {"role": "tool", "name": "zqnamekx", "content": "r"}
    assert trained_on(processor, [*chat(*CHAT[:2]), result]) == "one"
    assert trained_on(processor, [*chat(*CHAT[:2]), {**result, "name": "f"}]) == "one"


def test_a_call_whose_arguments_a_template_joins_ends_with_the_token_of_its_result() -> None:
    joins = "[{{ call.function.name + call.function.arguments }}]"
    template = BY_NEXT_SPEAKER.replace("BREAK", "").replace("[{{ call.function.name }}]", joins)
    processor = ChatProcessor(tokenizer(template), learn_stop=True)
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*chat(("user", "q")), {"role": "assistant", "content": "one", "tool_calls": [call]}]
    assert trained_on(processor, messages) == "one[f{}]<|observation|>"


def test_the_setting_is_of_chats_and_of_their_fingerprint(tmp_path: Path) -> None:
    tokenizer(BY_NEXT_SPEAKER.replace("BREAK", "")).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="--learn-stop"):
        without = ProcessorConfig(tokenizer=str(tmp_path)).build()
    asked = ProcessorConfig(tokenizer=str(tmp_path), learn_stop=True).build()
    assert processor_fingerprint(without) != processor_fingerprint(asked)
    with pytest.raises(ConfigError, match=r"processor\.learn_stop is for chats, and processor\.type is text"):
        ProcessorConfig(type="text", tokenizer=str(tmp_path), learn_stop=True)
