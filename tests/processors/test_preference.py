"""Answers that are compared, as tokens: what TRL's own trainers make of the same rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from lmms_stream.converters.rows.mapper import find_mapper
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.loader.collate import collate
from lmms_stream.processors import ProcessorConfig
from lmms_stream.processors.base import IGNORED_LABEL, Measured, processor_fingerprint
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.preference import MediaPreferenceProcessor, PreferenceProcessor
from lmms_stream.types import Processed, Sample
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from .tiny_vlm import picture, save_processor

Row = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def said(*words: str) -> list[dict[str, str]]:
    """Messages of the user and the assistant in turn."""
    return [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(words)]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


PAIRS: dict[str, list[Row]] = {
    "texts behind a prompt": [
        {"prompt": "The answer is", "chosen": " 42, since 6 times 7", "rejected": " yes"},
        {"prompt": "No (yes", "chosen": ") one", "rejected": ")<|end|>"},
    ],
    "texts that begin alike": [
        {"chosen": "The answer is 42", "rejected": "The answer is maybe"},
        {"chosen": "one two three", "rejected": "one two thrift"},
    ],
    "messages behind a prompt": [
        {"prompt": said("what?", "this", "why?"), "chosen": answer("since"), "rejected": answer("no ü")},
        {"prompt": said("x"), "chosen": [*answer("y"), *said("z", "a")], "rejected": answer("y")},
    ],
    "conversations that begin alike": [
        {"chosen": said("what?", "this"), "rejected": said("what?", "that one")},
        {"chosen": said("a", "b", "c", "d"), "rejected": said("a", "b", "c", "e")},
    ],
    "messages with tools": [
        {"prompt": said("what?"), "chosen": answer("this"), "rejected": answer("that"), "tools": TOOLS},
    ],
}
SINGLE: dict[str, list[Row]] = {
    "texts": [
        {"prompt": "The answer is", "completion": " 42", "label": True},
        {"prompt": "The answer is", "completion": " no<|end|>", "label": False},
    ],
    "messages": [
        {"prompt": said("a", "b", "c"), "completion": answer("d"), "label": False},
        {"prompt": said("what?"), "completion": answer("this"), "label": True},
    ],
}


@pytest.fixture(params=["marked", "bare"])
def loaded(request: pytest.FixtureRequest, tokenizer: Path) -> PreTrainedTokenizerFast:
    """With a template that marks what the assistant says, and with one that writes tools and a prompt's end."""
    made: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(tokenizer)
    if request.param == "bare":
        made.chat_template = (
            "{{ tools | tojson if tools }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
            "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )
    return made


def samples(rows: Sequence[Row]) -> list[Sample]:
    """What is stored of rows; prompts that are texts stay such, which the rows of a conversion have no form for."""
    if isinstance(rows[0].get("prompt"), str):
        named = ({{"completion": "answer"}.get(name, name): value for name, value in row.items()} for row in rows)
        return [{"messages": json.dumps(row), "media": b""} for row in named]
    mapper = find_mapper(rows, SchemaOptions())
    return [mapper(row, None) for row in rows]


def by_trl(trainer: Any, rows: list[Row], tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """The rows as a trainer of TRL's tokenizes them."""
    settings = SimpleNamespace(
        dataset_num_proc=None, max_length=None, truncation_mode="keep_start", per_device_train_batch_size=1
    )
    owner = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False, undesirable_weight=1.0, desirable_weight=1.0)
    return list(trainer._prepare_dataset(owner, Dataset.from_list(rows), tokenizer, settings, "test"))


def expected(prompt: list[int], answers: Sequence[list[int]], roles: Sequence[int]) -> dict[str, list[Any]]:
    return {
        "input_ids": [token for each in answers for token in prompt + each],
        "labels": [token for each in answers for token in [IGNORED_LABEL] * len(prompt) + each],
        "sequences": [[len(prompt) + len(each), role] for each, role in zip(answers, roles, strict=True)],
    }


def as_lists(processed: Processed) -> dict[str, list[Any]]:
    assert all(value.dtype == np.int64 for value in processed.values())
    return {name: value.tolist() for name, value in processed.items()}


@pytest.mark.parametrize("form", PAIRS)
def test_pairs_become_the_tokens_of_trls_dpo_trainer(form: str, loaded: PreTrainedTokenizerFast) -> None:
    from trl import DPOTrainer

    processor = PreferenceProcessor(loaded)
    made = [as_lists(processor.process(sample)) for sample in samples(PAIRS[form])]
    theirs = by_trl(DPOTrainer, PAIRS[form], loaded)
    assert made == [expected(each["prompt_ids"], [each["chosen_ids"], each["rejected_ids"]], [1, 0]) for each in theirs]


@pytest.mark.parametrize("form", SINGLE)
def test_answers_with_labels_become_the_tokens_of_trls_kto_trainer(form: str, loaded: PreTrainedTokenizerFast) -> None:
    from trl import KTOTrainer

    processor = PreferenceProcessor(loaded, objective="kto")
    made = [as_lists(processor.process(sample)) for sample in samples(SINGLE[form])]
    theirs = by_trl(KTOTrainer, SINGLE[form], loaded)
    assert made == [expected(each["prompt_ids"], [each["completion_ids"]], [each["label"]]) for each in theirs]


def test_lengths_of_all_samples_at_once_are_those_of_each(loaded: PreTrainedTokenizerFast) -> None:
    processor = PreferenceProcessor(loaded)
    rows = [sample for forms in (PAIRS, SINGLE) for each in forms.values() for sample in samples(each)]
    torn: Sample = {"messages": "{", "media": b""}
    found = processor.measure_all([*rows, torn, rows[0]])
    lengths = [len(processor.process(sample)["input_ids"]) for sample in rows]
    assert found[: len(rows)] == lengths == [processor.measure(sample) for sample in rows]
    assert isinstance(found[len(rows)], DataError)
    assert found[-1] == lengths[0]
    with pytest.raises(DataError, match="its preference is not JSON"):
        processor.measure(torn)


def test_batches_have_a_segment_for_each_answer(tokenizer: Path) -> None:
    processor = PreferenceProcessor.from_pretrained(str(tokenizer))
    made = [processor.process(sample) for sample in samples(PAIRS["messages behind a prompt"])]
    batch = collate(made, [4, 5])
    assert batch.sequences is not None
    assert batch.sequences[:, 0].tolist() == [0, 0, 1, 1]
    assert batch.sequences[:, 3].tolist() == [1, 0, 1, 0]
    assert batch.num_segments == 4


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ("[]", "it has no prompt with chosen and rejected, or with answer and label: convert the dataset again"),
        ('{"prompt": "a", "chosen": "b"}', "it has no prompt with chosen and rejected"),
        ('{"prompt": "a", "answer": "b", "label": 1}', "its label is 1, not true or false"),
        ('{"prompt": "a", "chosen": "b", "rejected": [{"role": "x"}]}', "it has no prompt with chosen and rejected"),
        ('{"prompt": [], "chosen": [], "rejected": []}', "it has no prompt with chosen and rejected"),
        ('{"prompt": [{"role": "x"}], "chosen": [3], "rejected": [3]}', r"a message has no role \('3'\)"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "tools": [3]}', "its tools are not a list of objects"),
        (
            '{"prompt": [{"role": "user", "content": "a"}], "answer": [{"role": "assistant", "learn": false}], '
            '"label": true}',
            "the loss leaves out a message of an answer, and answers are compared as a whole",
        ),
    ],
)
def test_samples_that_are_torn_are_told(stored: str, message: str, tokenizer: Path) -> None:
    processor = PreferenceProcessor.from_pretrained(str(tokenizer))
    with pytest.raises(DataError, match=message):
        processor.process({"messages": stored})


def test_answers_that_are_read_as_chats_name_their_processor(chat_processor: ChatProcessor) -> None:
    (sample, *_) = samples(PAIRS["messages behind a prompt"])
    with pytest.raises(DataError, match="it holds answers to compare, and is read as a chat: use the processor"):
        chat_processor.measure(sample)


def test_an_answer_of_which_nothing_is_shown_is_told(tokenizer: Path) -> None:
    loaded: Any = AutoTokenizer.from_pretrained(tokenizer)
    loaded.chat_template = "{% for message in messages %}{{ message.content if message.role == 'user' }}{% endfor %}"
    (sample,) = samples([{"prompt": said("what?"), "chosen": answer("this"), "rejected": answer("that")}])
    processor = PreferenceProcessor(loaded)
    for method in (processor.process, processor.measure):
        with pytest.raises(
            DataError, match="the chat template shows nothing of an answer, so no token would be compared"
        ):
            method(sample)


def test_what_a_tokenizer_lacks_is_told_where_a_sample_needs_it(tokenizer: Path) -> None:
    loaded: Any = AutoTokenizer.from_pretrained(tokenizer)
    texts, chats = samples(PAIRS["texts behind a prompt"]), samples(PAIRS["messages behind a prompt"])
    whole = processor_fingerprint(PreferenceProcessor(loaded))
    assert processor_fingerprint(PreferenceProcessor(loaded, objective="kto")) == whole  # of the same lengths
    loaded.chat_template = None
    bare = PreferenceProcessor(loaded)
    assert processor_fingerprint(bare) != whole
    assert bare.measure(texts[0])
    with pytest.raises(ConfigError, match="has no chat template: write a template into chat_template"):
        bare.measure(chats[0])
    loaded.eos_token = None
    with pytest.raises(ConfigError, match=r"has no end-of-text token: set tokenizer\.eos_token and save it"):
        PreferenceProcessor(loaded).measure(texts[0])


def test_a_runs_file_says_what_is_learnt(tokenizer: Path) -> None:
    for objective, found in ((None, "dpo"), ("dpo", "dpo"), ("kto", "kto")):
        config = ProcessorConfig(type="preference", tokenizer=str(tokenizer), objective=objective)  # type: ignore[arg-type]
        assert getattr(config.build(), "objective", "") == found
    with pytest.raises(ConfigError, match=r"type preference has no objective reconstruction: choose dpo or kto"):
        ProcessorConfig(type="preference", objective="reconstruction")
    with pytest.raises(ConfigError, match=r"type image has no objective dpo: choose flow_matching or reconstruction"):
        ProcessorConfig(type="image", objective="dpo")
    with pytest.raises(ConfigError, match=r"type chat has no objective dpo: leave objective out"):
        ProcessorConfig(objective="dpo")
    with pytest.raises(ConfigError, match=r"tokenizer and processor\.path are both named: path has a tokenizer of its"):
        ProcessorConfig(type="preference", path="a", tokenizer="b")
    with pytest.raises(ConfigError, match=r"objective must be dpo or kto, got 'orpo'"):
        PreferenceProcessor.from_pretrained(str(tokenizer), objective="orpo")  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_each_answer_has_the_media_of_its_prompt(family: str, tmp_path: Path) -> None:
    save_processor(tmp_path, family)
    rows = [
        {
            "prompt": said("What do you see?"),
            "chosen": answer("A chart"),
            "rejected": answer("No picture"),
            "images": [picture(64, 96), picture(140, 56)],
        }
    ]
    (sample,) = samples(rows)
    processor: Any = ProcessorConfig(type="preference", path=str(tmp_path)).build()
    assert isinstance(processor, MediaPreferenceProcessor)
    made = processor.process(sample)
    total = len(made["input_ids"])
    alone = [processor.processor.process(chat) for chat in _chats(sample)]
    assert made["sequences"].tolist() == [[len(alone[0]["input_ids"]), 1], [len(alone[1]["input_ids"]), 0]]
    for name, axis in (("input_ids", 0), ("position_ids", 1)):
        assert np.array_equal(made[name], np.concatenate([each[name] for each in alone], axis=axis))
    for name, value in made["media"].items():
        assert np.array_equal(value, np.concatenate([each["media"][name] for each in alone]))
    learnt = made["labels"] != IGNORED_LABEL
    assert processor.tokenizer.decode(made["labels"][learnt]) == "A chart<|im_end|>\nNo picture<|im_end|>\n"
    facts = {name: value for name, value in sample.items() if name != "media"}
    (measured,) = processor.measure_media([facts])
    assert isinstance(measured, Measured)
    assert measured.tokens == total == processor.measure(sample)
    (of_one,) = processor.processor.measure_media([_chats(sample)[0]])
    assert isinstance(of_one, Measured)
    assert (measured.patches, measured.image_tokens) == (2 * of_one.patches, 2 * of_one.image_tokens)
    seen = processor.see_media(sample)
    assert len(seen) == 4
    assert all(not learnt[start:stop].any() for medium in seen for start, stop in medium.spans)
    batch = collate([made], [0])
    assert batch.sequences is not None
    assert len(batch.sequences) == 2
    texts = samples(PAIRS["texts behind a prompt"])[0]
    with pytest.raises(
        DataError, match=r"it is of texts, and a processor of media reads chats: name processor\.tokenizer"
    ):
        processor.process(texts)
    torn = processor.measure_media([{"messages": "{}"}, facts])
    assert isinstance(torn[0], DataError)
    assert torn[1] == measured


def _chats(sample: Mapping[str, Any]) -> list[Sample]:
    """The conversation of each answer."""
    stored = json.loads(sample["messages"])
    return [
        {"messages": json.dumps(stored["prompt"] + stored[name]), "media": sample["media"]}
        for name in ("chosen", "rejected")
    ]
