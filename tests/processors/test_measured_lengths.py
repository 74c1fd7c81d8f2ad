"""What a processor measures is what it makes, of every row that converts and of any conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.converters.convert import convert
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.processors.base import Processor
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.text import TextProcessor, TokensProcessor
from transformers import AutoTokenizer

from ..converters.round_trip_cases import TEXT_CASES, Case, Row
from ..converters.sources.source_rows import json_lines, write
from ..strategies import examples

# Tools, calls with their arguments, and each message; only what the assistant says is marked.
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] %}<call>{{ call['function'] | tojson }}</call>{% endfor %}"
    "<|end|>{% endgeneration %}\n{% else %}{{ message['content'] }}<|end|>\n{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def processors(tokenizer: Path) -> dict[str, Processor]:
    """Of each schema; the one of chats has a template with tools."""
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    loaded.chat_template = TEMPLATE
    return {
        "messages": ChatProcessor(loaded),
        "text": TextProcessor.from_pretrained(str(tokenizer)),
        "tokens": TokensProcessor(),
    }


def schema_of(case: Case) -> str:
    return next(schema for schema, column in COLUMNS.items() if column in case.wanted[0])


COLUMNS = {"messages": "messages", "tokens": "input_ids", "text": "text"}


@pytest.mark.parametrize("case", TEXT_CASES, ids=lambda case: case.name)
def test_the_lengths_index_of_every_kind_of_rows_is_what_is_made_of_them(
    case: Case, processors: dict[str, Processor], tmp_path: Path
) -> None:
    processor = processors[schema_of(case)]
    source = write(tmp_path / "rows.jsonl", json_lines(case.rows))
    convert([source], str(tmp_path / "out"), schema=SchemaOptions(**case.options), processor=processor, num_workers=1)
    dataset = PackedStreamingDataset(tmp_path / "out", processor=processor)
    made = [len(processor.process(sample)["input_ids"]) for sample in dataset[:]]
    assert made == [processor.measure(sample) for sample in dataset[:]] == dataset.length_index().lengths.tolist()
    assert len(made) == len(case.wanted)
    assert min(made) > 0


texts = st.text(max_size=40) | st.sampled_from(["", " ", "\n\n", "<|end|>", "<|assistant|>\n", "👩‍👧 é", "a" * 300])
arguments = st.dictionaries(texts, texts | st.integers() | st.none(), max_size=2)
calls = st.builds(
    lambda name, value: {"type": "function", "function": {"name": name, "arguments": value}},
    texts,
    arguments | arguments.map(json.dumps) | texts,
)
messages = st.builds(
    lambda role, content, more: {"role": role, "content": content} | (more if role == "assistant" else {}),
    st.sampled_from(["system", "user", "assistant", "tool"]),
    texts | st.lists(texts.map(lambda text: {"type": "text", "text": text}), max_size=3),
    st.fixed_dictionaries({}, optional={"learn": st.just(False), "tool_calls": st.lists(calls, max_size=2)}),
)
tools = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": arguments}), min_size=1, max_size=2)
stored_chats = st.lists(messages, min_size=1, max_size=6) | st.fixed_dictionaries({
    "messages": st.lists(messages, min_size=1, max_size=4), "tools": tools,
})  # fmt: skip


@given(stored=stored_chats)
@examples(300)
def test_any_conversation_measures_what_it_makes(stored: Any, processors: dict[str, Processor]) -> None:
    sample: Row = {"messages": json.dumps(stored), "media": b""}
    processed = processors["messages"].process(sample)
    assert processors["messages"].measure(sample) == len(processed["input_ids"]) == len(processed["labels"])


@given(text=st.text(min_size=1, max_size=200))
@examples(200)
def test_any_text_measures_what_it_makes(text: str, processors: dict[str, Processor]) -> None:
    sample: Row = {"text": text}
    assert processors["text"].measure(sample) == len(processors["text"].process(sample)["input_ids"])


@given(learnt=st.lists(st.booleans(), min_size=1, max_size=50).filter(any))
@examples(100)
def test_any_tokens_measure_what_they_make(learnt: list[bool], processors: dict[str, Processor]) -> None:
    edges = np.flatnonzero(np.diff([0, *learnt, 0])).reshape(-1, 2).astype(np.int32)
    sample: Row = {"input_ids": np.arange(len(learnt), dtype=np.int32), "loss_spans": edges}
    processed = processors["tokens"].process(sample)
    assert processors["tokens"].measure(sample) == len(processed["input_ids"]) == len(learnt)
    assert ((processed["labels"] >= 0) == learnt).all()
