from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors import ProcessorConfig
from lmms_stream.processors.base import IGNORED_LABEL, processor_fingerprint
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.text import DocumentsProcessor, TextProcessor, TokensProcessor
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast


def chat(*turns: tuple[str, Any]) -> dict[str, str]:
    return {"messages": json.dumps([{"role": role, "content": content} for role, content in turns])}


def load(tokenizer: Path) -> PreTrainedTokenizerFast:
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(tokenizer)
    return loaded


def test_only_what_the_assistant_says_is_learnt(chat_processor: ChatProcessor) -> None:
    sample = chat(("user", "def f(): ..."), ("assistant", "Return."), ("user", "more"), ("assistant", "No. ü"))
    processed = chat_processor.process(sample)
    learnt = processed["labels"] != IGNORED_LABEL
    assert np.array_equal(processed["labels"][learnt], processed["input_ids"][learnt])
    assert chat_processor.tokenizer.decode(processed["labels"][learnt]) == "Return.<|end|>No. ü<|end|>"
    whole = chat_processor.tokenizer.decode(processed["input_ids"])
    assert whole.startswith("<|user|>\ndef f(): ...<|end|>\n<|assistant|>\nReturn.<|end|>")


def test_text_parts_are_read_as_their_text(chat_processor: ChatProcessor) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    joined = chat_processor.process(chat(("user", "one two"), ("assistant", "three")))
    split = chat_processor.process(chat(("user", parts), ("assistant", "three")))
    assert np.array_equal(joined["input_ids"], split["input_ids"])
    with pytest.raises(
        DataError, match=r"image, which the chat processor does not read: take .* \{type: vision, path: FOLDER\}"
    ):
        chat_processor.measure(chat(("user", [{"type": "image", "span": [0, 1]}]), ("assistant", "x")))
    with pytest.raises(DataError, match=r"with --processor audio --tokenizer FOLDER"):
        chat_processor.measure(chat(("user", [{"type": "audio", "span": [0, 1]}]), ("assistant", "x")))


def test_the_fingerprint_changes_with_the_tokenizer_and_the_template_alone(tokenizer: Path) -> None:
    original = processor_fingerprint(ChatProcessor(load(tokenizer)))
    assert processor_fingerprint(ChatProcessor(load(tokenizer), source="elsewhere")) == original
    other_template, other_tokens = load(tokenizer), load(tokenizer)
    other_template.chat_template = str(other_template.chat_template) + "\n"
    other_tokens.add_tokens(["<|new|>"])
    prints = {processor_fingerprint(ChatProcessor(changed)) for changed in (other_template, other_tokens)}
    assert len(prints | {original, processor_fingerprint(TokensProcessor())}) == 4


def test_tokenizers_without_a_chat_template_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    bare = load(tokenizer)
    bare.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatProcessor(bare)
    bare.chat_template = "{% for message in messages %}"
    with pytest.raises(ConfigError, match="the chat template is not one"):
        ChatProcessor(bare)
    with pytest.raises(ConfigError, match=r"tokenizer '.*absent' cannot be loaded: .*: name a folder with a"):
        ChatProcessor.from_pretrained(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"processor\.tokenizer is missing"):
        ProcessorConfig().build()


def test_tokens_are_learnt_in_their_spans() -> None:
    sample = {"input_ids": np.arange(6, dtype=np.int32), "loss_spans": np.array([[1, 2], [4, 6]], np.int32)}
    processed = TokensProcessor().process(sample)
    assert TokensProcessor().measure(sample) == 6
    assert processed["labels"].tolist() == [-100, 1, -100, -100, 4, 5]
    for span in ([3, 3], [-1, 2], [5, 7]):
        with pytest.raises(DataError, match="lies outside the sample's 6 tokens"):
            TokensProcessor().process(sample | {"loss_spans": np.array([span])})


TOOL_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['learn'] is defined %}learn{% endif %}"
    "{% if message['role'] == 'assistant' %}"
    "{% if message['content'] %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% generation %}{{ call['function']['name'] }}{{ call['function']['arguments'] | tojson }}<|end|>"
    "{% endgeneration %}"
    "{% endfor %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}"
)


def with_template(tokenizer: Path, template: str) -> ChatProcessor:
    loaded = load(tokenizer)
    loaded.chat_template = template
    return ChatProcessor(loaded)


def learnt_text(processor: ChatProcessor, sample: dict[str, str]) -> str:
    processed = processor.process(sample)
    assert processor.measure(sample) == len(processed["input_ids"]) == len(processed["labels"])
    labels = processed["labels"]
    return str(processor.tokenizer.decode(labels[labels != IGNORED_LABEL]))


def test_messages_that_are_not_learnt_are_read_all_the_same(chat_processor: ChatProcessor) -> None:
    turns = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"), ("assistant", "five")]
    whole = chat(*turns)
    for left_out, expected in (
        ({1}, "four<|end|>five<|end|>"),
        ({3}, "two<|end|>five<|end|>"),
        ({1, 3}, "five<|end|>"),
        ({0, 2}, "two<|end|>four<|end|>five<|end|>"),  # nothing of the user's is learnt in any case
        ({1, 3, 4}, ""),
    ):
        messages = json.loads(whole["messages"])
        for index in left_out:
            messages[index]["learn"] = False
        sample = {"messages": json.dumps(messages)}
        assert learnt_text(chat_processor, sample) == expected
        same = chat_processor.process(whole)["input_ids"]
        assert np.array_equal(chat_processor.process(sample)["input_ids"], same)


def test_a_message_that_the_template_marks_several_times_is_left_out_whole(tokenizer: Path) -> None:
    processor = with_template(tokenizer, TOOL_TEMPLATE)
    calls = [{"type": "function", "function": {"name": name, "arguments": {"x": 1}}} for name in ("f", "g")]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "tool_calls": calls},
        {"role": "tool", "content": "three"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "four", "learn": False},
        {"role": "assistant", "content": "five"},
    ]
    said = 'two<|end|>f{"x": 1}<|end|>g{"x": 1}<|end|>'
    assert learnt_text(processor, {"messages": json.dumps(messages)}) == said + "five<|end|>"
    messages[1]["learn"] = False
    assert learnt_text(processor, {"messages": json.dumps(messages)}) == "five<|end|>"


def test_what_is_not_learnt_must_be_told_apart_by_the_template(tokenizer: Path) -> None:
    marked = "{% generation %}{% for message in messages %}{{ message['content'] }}{% endfor %}{% endgeneration %}"
    processor = with_template(tokenizer, "begin " + marked + "{% generation %}end{% endgeneration %}")
    messages = [{"role": "assistant", "content": text, "learn": False} for text in ("one", "two", "three")]
    with pytest.raises(DataError, match="marks 2 spans that do not match single messages, so messages with"):
        processor.process({"messages": json.dumps(messages)})


def test_the_template_sees_the_tools_and_arguments_as_objects(tokenizer: Path) -> None:
    processor = with_template(tokenizer, TOOL_TEMPLATE)
    tools = [{"type": "function", "function": {"name": "f"}}]
    for arguments in ('{"x": 1}', {"x": 1}):
        call: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        sample = {"messages": json.dumps({"messages": messages, "tools": tools})}
        assert learnt_text(processor, sample) == 'f{"x": 1}<|end|>'
        text = processor.tokenizer.decode(processor.process(sample)["input_ids"])
        assert text.startswith(f"<|system|>{json.dumps(tools)}<|end|><|user|>?<|end|><|assistant|>f")
    call["function"]["arguments"] = "not JSON"
    assert learnt_text(processor, {"messages": json.dumps(messages)}) == 'f"not JSON"<|end|>'


def test_a_conversation_that_the_template_refuses_is_named(tokenizer: Path) -> None:
    refusing = "{{ raise_exception('roles must alternate') }}{% generation %}{% endgeneration %}"
    adding = "{% generation %}{{ messages[0]['content'] + 1 }}{% endgeneration %}"
    for template, reason in ((refusing, "roles must alternate"), (adding, "can only concatenate")):
        processor = with_template(tokenizer, template)
        for act in (processor.measure, processor.process):
            with pytest.raises(
                DataError, match=rf"the chat template refuses the conversation \(.*{reason}.*\): correct it"
            ):
                act(chat(("assistant", None)))


def test_a_text_ends_once_and_is_learnt_whole(tokenizer: Path) -> None:
    processor = ProcessorConfig(type="text", tokenizer=str(tokenizer)).build()
    assert isinstance(processor, TextProcessor)
    for text in ("def f(): ...", "def f(): ...<|end|>"):
        processed = processor.process({"text": text})
        assert processor.tokenizer.decode(processed["input_ids"]) == "def f(): ...<|end|>"
        assert np.array_equal(processed["labels"], processed["input_ids"])
        assert processor.measure({"text": text}) == len(processed["input_ids"])
    assert processor.process({"text": ""})["input_ids"].tolist() == [processor.tokenizer.eos_token_id]


def test_a_text_needs_a_tokenizer_that_says_where_it_ends(tokenizer: Path) -> None:
    endless, other_end = load(tokenizer), load(tokenizer)
    endless.eos_token = None
    with pytest.raises(ConfigError, match="has no end-of-text token: set"):
        TextProcessor(endless)
    other_end.eos_token = "<|user|>"
    prints = [processor_fingerprint(TextProcessor(one)) for one in (load(tokenizer), load(tokenizer), other_end)]
    assert prints[0] == prints[1] != prints[2]


def test_what_stands_around_a_text_is_the_tokenizers_own_unless_it_is_said(tokenizer: Path) -> None:
    framed = load(tokenizer)
    user, end = (framed.backend_tokenizer.token_to_id(token) for token in ("<|user|>", "<|end|>"))
    framed.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", user)]
    )
    plain = [int(token) for token in framed.encode("def f", add_special_tokens=False)]
    mark = [int(token) for token in framed.encode("##", add_special_tokens=False)]
    expected: list[tuple[dict[str, str], list[int]]] = [
        ({}, [user, *plain, end]),
        ({"suffix": "##"}, [user, *plain, *mark]),
        ({"prefix": "##"}, [*mark, *plain, end]),
        ({"prefix": "", "suffix": ""}, plain),
        ({"prefix": "<|end|>", "suffix": "##<|end|>"}, [end, *plain, *mark, end]),
    ]
    for said, ids in expected:
        processor = TextProcessor(framed, **said)
        assert processor.process({"text": "def f"})["input_ids"].tolist() == ids
        assert processor.measure({"text": "def f"}) == len(ids)
    assert len({processor_fingerprint(TextProcessor(framed, **said)) for said, _ in expected}) == len(expected)
    framed.eos_token = None
    assert TextProcessor(framed, suffix="##").process({"text": "def f"})["input_ids"].tolist() == [user, *plain, *mark]


@pytest.mark.parametrize("starts", [[1, 3], [0, 5], [0, 3, 3], [[0, 3]]])
def test_documents_that_do_not_make_up_their_sample_are_refused(starts: list[Any]) -> None:
    sample = {"input_ids": np.arange(5), "loss_spans": [(0, 5)], "document_starts": np.array(starts, np.int32)}
    with pytest.raises(
        DataError, match=r"its documents begin at the tokens \[.*, expected some of its 5 tokens, ascending"
    ):
        DocumentsProcessor().process(sample)


def test_settings_of_texts_and_documents_are_refused_for_other_processors(tokenizer: Path) -> None:
    for name, value, kind in (
        ("text_prefix", "", "text"),
        ("text_suffix", "x", "text"),
        ("isolate_documents", True, "tokens"),
    ):
        settings: dict[str, Any] = {name: value, "tokenizer": str(tokenizer)}
        with pytest.raises(
            ConfigError, match=rf"processor.{name} is for processor.type {kind}, and that is chat: leave"
        ):
            ProcessorConfig(type="chat", **settings)
    assert processor_fingerprint(DocumentsProcessor()) == processor_fingerprint(TokensProcessor())
