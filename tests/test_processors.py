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
from lmms_stream.processors.text import TokensProcessor
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
    with pytest.raises(DataError, match="a message holds image, which the chat processor does not read"):
        chat_processor.measure(chat(("user", [{"type": "image", "span": [0, 1]}]), ("assistant", "x")))


def test_the_fingerprint_changes_with_the_tokenizer_and_the_template_alone(tokenizer: Path) -> None:
    original = processor_fingerprint(ChatProcessor(load(tokenizer)))
    assert processor_fingerprint(ChatProcessor(load(tokenizer), source="elsewhere")) == original
    other_template, other_tokens = load(tokenizer), load(tokenizer)
    other_template.chat_template = str(other_template.chat_template) + "\n"
    other_tokens.add_tokens(["<|new|>"])
    prints = {processor_fingerprint(ChatProcessor(changed)) for changed in (other_template, other_tokens)}
    assert len(prints | {original, processor_fingerprint(TokensProcessor())}) == 4


def test_tokenizers_that_cannot_tell_what_is_learnt_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    bare = load(tokenizer)
    bare.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"has no \{% generation %\} marks"):
        ChatProcessor(bare)
    bare.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatProcessor(bare)
    with pytest.raises(ConfigError, match=r"tokenizer '.*absent' cannot be loaded"):
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
