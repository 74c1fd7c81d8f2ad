"""What a processor measures is what it makes, of every row that converts and of any conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.converters.convert import convert
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.processors.base import Processor
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.lengths import groups, measured
from lmms_stream.processors.text import TextProcessor, TokensProcessor
from lmms_stream.types import Sample
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
    texts.filter(str.strip),
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


def one_by_one(processor: Processor, samples: Sequence[Sample]) -> list[int | str]:
    """The length of each, or what is wrong with it."""
    found: list[int | str] = []
    for sample in samples:
        try:
            found.append(processor.measure(sample))
        except DataError as error:
            found.append(str(error))
    return found


def together(processor: Processor, samples: Sequence[Sample]) -> list[int | str]:
    return [str(each) if isinstance(each, DataError) else each for each in measured(processor, samples)]


@given(stored=st.lists(stored_chats.map(json.dumps) | st.sampled_from(["", "[]", "{", '[{"role": 1}]']), max_size=6))
@examples(150)
def test_conversations_measured_together_have_the_lengths_and_errors_of_each(
    stored: list[str], processors: dict[str, Processor]
) -> None:
    samples: list[Sample] = [{"messages": each, "media": b""} for each in stored]
    assert together(processors["messages"], samples) == one_by_one(processors["messages"], samples)


@given(texts=st.lists(st.text(max_size=60), max_size=6))
@examples(100)
def test_texts_measured_together_have_the_lengths_of_each(texts: list[str], processors: dict[str, Processor]) -> None:
    samples: list[Sample] = [{"text": text} for text in texts]
    assert together(processors["text"], samples) == one_by_one(processors["text"], samples)


class Measuring(TextProcessor):
    def measure(self, sample: Sample) -> int:
        return 7


class Processing(TextProcessor):
    def process(self, sample: Sample) -> Any:
        return {"input_ids": np.zeros(8), "labels": np.zeros(8)}

    def measure(self, sample: Sample) -> int:
        return 8


class ProcessingAlone(TextProcessor):
    """As TextProcessor, whose `measure` it has, and not known to measure several as it does each."""

    def process(self, sample: Sample) -> Any:
        return super().process(sample)


class Both(TextProcessor):
    def measure(self, sample: Sample) -> int:
        return 9

    def measure_all(self, samples: Sequence[Sample]) -> list[int | DataError]:
        return [9, DataError("nine"), *([9] * (len(samples) - 2))]


class Below(Both):
    pass


class Around:
    """Stands for another processor, all of whose members it has."""

    def __init__(self, inner: Processor):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def measure(self, sample: Sample) -> int:
        return 10


def test_a_measure_that_a_subclass_has_replaced_is_what_measures(tokenizer: Path) -> None:
    samples: list[Sample] = [{"text": "a b"}, {"text": "c"}]
    loaded = TextProcessor.from_pretrained(str(tokenizer)).tokenizer
    assert together(Measuring(loaded), samples) == [7, 7]
    assert together(Processing(loaded), samples) == [8, 8]
    assert together(ProcessingAlone(loaded), samples) == together(TextProcessor(loaded), samples)
    assert together(Both(loaded), samples) == together(Below(loaded), samples) == [9, "nine"]
    assert together(Around(TextProcessor(loaded)), samples) == [10, 10]


def test_a_processor_that_measures_too_few_together_is_told_so(tokenizer: Path) -> None:
    class Few(TextProcessor):
        def measure(self, sample: Sample) -> int:
            return 1

        def measure_all(self, samples: Sequence[Sample]) -> list[int | DataError]:
            return [1]

    few = Few(TextProcessor.from_pretrained(str(tokenizer)).tokenizer)
    with pytest.raises(ConfigError, match="measure_all gave 1 lengths of 2 samples: it must return a length for"):
        list(measured(few, [{}, {}]))


def test_an_error_that_is_nobodys_is_raised_at_its_sample_after_the_lengths_before_it(tokenizer: Path) -> None:
    processor = TextProcessor.from_pretrained(str(tokenizer))
    lengths = measured(processor, [{"text": "a"}, {"other": "b"}])
    assert next(lengths) == processor.measure({"text": "a"})
    with pytest.raises(KeyError, match="text"):
        next(lengths)


def test_groups_hold_some_samples_or_one_large_one_and_all_that_comes_before_an_error() -> None:
    assert [len(group) for group in groups(range(150), num_bytes=lambda item: 1)] == [64, 64, 22]
    assert [list(group) for group in groups([1, 2, 3], num_bytes=lambda item: 1 << 30)] == [[1], [2], [3]]
    assert list(groups([], num_bytes=lambda item: 1)) == []

    def failing() -> Iterator[int]:
        yield from range(70)
        raise DataError("the file ends")

    found: list[int] = []
    with pytest.raises(DataError, match="the file ends"):
        found.extend(item for group in groups(failing(), num_bytes=lambda item: 1) for item in group)
    assert found == list(range(70))
