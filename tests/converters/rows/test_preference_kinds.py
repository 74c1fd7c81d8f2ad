"""Rows of preferences in the forms of TRL and LLaMA-Factory, stored as a prompt and its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from lmms_stream import PackedStreamingDataset
from lmms_stream.converters.convert import convert
from lmms_stream.converters.exporting.export import export_dataset
from lmms_stream.converters.rows.mapper import find_mapper
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.stored.merge import merge_datasets
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.tools.inspect.summary import inspect_dataset

from ..media_files import image_bytes
from ..sources.source_rows import write

Row = dict[str, Any]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def says(text: str) -> Row:
    return {"role": "assistant", "content": text}


def human(text: str) -> Row:
    return {"from": "human", "value": text}


def gpt(text: str) -> Row:
    return {"from": "gpt", "value": text}


HI, GOOD, BAD = user("hi"), says("hello"), says("no")
PAIR = {"prompt": [HI], "chosen": [GOOD], "rejected": [BAD]}
JUDGED = {"prompt": [HI], "answer": [GOOD], "label": True}
LONG = [HI, says("yes?"), user("more")]
TOOL = {"name": "add", "parameters": {}}


@pytest.mark.parametrize("said", ["hi", " hi\n"])
def test_a_filled_question_that_no_turn_holds_is_refused(said: str) -> None:
    row = {**PAIR, "input": said}
    assert json.loads(find_mapper([row], SchemaOptions())(row, None)["messages"]) == PAIR
    with pytest.raises(DataError, match=r"column 'input' holds 'x', which is in neither the prompt nor the answers, "):
        find_mapper([row], SchemaOptions())({**row, "input": "x"}, None)


CASES: list[tuple[str, Row, Row]] = [
    ("preference", {"prompt": "hi", "chosen": "hello", "rejected": "no", "score": 3}, PAIR),
    ("preference", {"prompt": [HI], "chosen": [GOOD], "rejected": [BAD]}, PAIR),
    ("preference", {"prompt": json.dumps([HI]), "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])}, PAIR),
    ("preference", {"chosen": [HI, GOOD], "rejected": [HI, BAD]}, PAIR),
    ("preference", {"chosen": [*LONG, GOOD], "rejected": [*LONG, BAD]}, {**PAIR, "prompt": LONG}),
    ("preference", {"prompt": "hi", "messages": [HI, GOOD], "chosen": [HI, GOOD], "rejected": [HI, BAD]}, PAIR),
    ("preference", {"conversations": [human("hi")], "chosen": gpt("hello"), "rejected": gpt("no")}, PAIR),
    (
        "preference",
        {"instruction": "hi", "input": "you", "chosen": "hello", "rejected": "no"},
        {**PAIR, "prompt": [user("hi\n\nyou")]},
    ),
    (
        "preference",
        {"prompt": "hi", "input": "you", "chosen": "hello", "rejected": "no"},
        {**PAIR, "prompt": [user("hi\n\nyou")]},
    ),
    ("preference", {"prompt": "hi", "messages": [HI, GOOD], "chosen": "hello", "rejected": "no"}, PAIR),
    (
        "preference",
        {"system": "S", "question": "hi", "chosen": "hello", "rejected": "no", "tools": [TOOL]},
        {**PAIR, "prompt": [{"role": "system", "content": "S"}, HI], "tools": [TOOL]},
    ),
    ("kto", {"prompt": "hi", "completion": "hello", "label": True}, JUDGED),
    ("kto", {"prompt": [HI], "completion": [GOOD], "label": "False"}, {**JUDGED, "label": False}),
    ("kto", {"prompt": "hi", "completion": "hello", "label": 0}, {**JUDGED, "label": False}),
    ("kto", {"prompt": "hi", "completion": "hello", "label": "1"}, JUDGED),
    ("kto", {"messages": [HI, GOOD], "label": True}, JUDGED),
    ("kto", {"conversations": [human("hi"), gpt("hello")], "kto_tag": True}, JUDGED),
]


@pytest.mark.parametrize(("kind", "row", "wanted"), CASES)
def test_rows_of_preferences_are_found_and_stored(kind: str, row: Row, wanted: Row) -> None:
    mapper = find_mapper([row], SchemaOptions())
    assert (mapper.kind.name, mapper.schema) == (kind, "preference")
    sample = mapper(row, None)
    assert (json.loads(sample["messages"]), sample["media"]) == (wanted, b"")


def test_images_belong_to_the_prompt() -> None:
    row = {"prompt": "what?", "chosen": "red", "rejected": "blue", "images": [image_bytes()]}
    sample = find_mapper([row], SchemaOptions())(row, None)
    stored = json.loads(sample["messages"])
    assert [part["type"] for part in stored["prompt"][0]["content"]] == ["image", "text"]
    assert (stored["chosen"], sample["media"]) == ([says("red")], row["images"][0])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hi", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same, .*: remove the row"),
        ({"prompt": "hi", "chosen": "a", "rejected": ""}, "rejected is an empty answer: complete or remove the row"),
        (
            {"chosen": "Human: hi", "rejected": "no"},
            "has answers and no prompt, .*: name the prompt's column with --columns prompt",
        ),
        ({"chosen": [HI, GOOD], "rejected": [user("x"), BAD]}, "they have no common prompt: correct the row"),
        ({"chosen": [HI, GOOD], "rejected": [HI]}, "rejected has no message behind the prompt: complete or remove"),
        ({"chosen": [HI, GOOD], "rejected": [HI, user("x")]}, "rejected is from 'user', and answers are the assistant"),
        ({"prompt": "x", "chosen": [HI, GOOD], "rejected": [HI, BAD]}, "column 'prompt' says 'x', which is not among"),
        ({"prompt": "hi", "completion": "", "label": True}, "answer is an empty answer"),
        (
            {"prompt": "hi", "messages": LONG, "chosen": "a", "rejected": "b"},
            "column 'messages' holds 'yes\\?', which is",
        ),
        (
            {"messages": [HI, GOOD], "input": "x", "label": True},
            "column 'input' holds 'x', .* --columns input= to leave",
        ),
        ({"messages": [HI, GOOD], "history": [["x", "y"]], "kto_tag": True}, "column 'history' holds 'x'"),
        ({"input": "x", "chosen": "It is a", "rejected": "It is b"}, "whole texts, which cannot hold input: name"),
        ({"completion": "a", "label": True}, "the row has answers and no prompt"),
        ({"messages": [GOOD], "label": True}, "the prompt has no message to answer"),
        ({"messages": [GOOD, HI], "label": True}, "answer is from 'user', and answers are the assistant's"),
        (
            {"prompt": "a", "chosen": [{**GOOD, "weight": 0}], "rejected": "b"},
            "the loss leaves out every message of chosen: complete or remove the row",
        ),
    ],
)
def test_rows_that_prefer_nothing_are_errors(row: Row, message: str) -> None:
    with pytest.raises(DataError, match=message):
        find_mapper([row], SchemaOptions())(row, None)


def test_a_label_that_is_none_is_an_error_and_so_is_a_sample_for_each_answer() -> None:
    row = {"prompt": "hi", "completion": "hello", "label": True}
    with pytest.raises(DataError, match="column 'label' is 'good': expected true or false, or 1 or 0"):
        find_mapper([row], SchemaOptions())({**row, "label": "good"}, None)
    with pytest.raises(DataError, match="--learn each makes a sample of each answer, but a preference compares"):
        find_mapper([row], SchemaOptions(learn="each"))(row, None)


def test_an_answer_of_several_messages_is_refused_where_only_the_last_would_be_learnt() -> None:
    row = {"prompt": "hi", "chosen": [GOOD, HI, GOOD], "rejected": "no"}
    assert len(json.loads(find_mapper([row], SchemaOptions())(row, None)["messages"])["chosen"]) == 3
    with pytest.raises(DataError, match=r"chosen has 2 messages of the assistant, .*: leave --learn last out, or"):
        find_mapper([row], SchemaOptions(learn="last"))(row, None)
    of_one = {"prompt": "hi", "chosen": [GOOD], "rejected": "no"}
    assert "learn" not in find_mapper([of_one], SchemaOptions(learn="last"))(of_one, None)["messages"]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_preferences_are_shown_verified_exported_and_merged_as_such(format: Any, tmp_path: Path) -> None:
    pairs, judged, chats = (str(tmp_path / name) for name in ("pairs", "judged", "chats"))
    for target, row in (
        (pairs, CASES[0][1]),
        (judged, {**CASES[11][1], "label": False}),
        (chats, {"messages": [HI, GOOD]}),
    ):
        convert([str(write(Path(f"{target}.json"), orjson.dumps([row])))], target, num_workers=1)
    seen = inspect_dataset(pairs, num_samples=1)
    assert seen.schema == "preference"
    roles = [message.role for message in seen.samples[0].messages]
    assert roles == ["prompt: user", "chosen: assistant", "rejected: assistant"]
    assert inspect_dataset(judged, num_samples=1).samples[0].messages[1].role == "answer (bad): assistant"
    assert inspect_dataset(chats, num_samples=1).schema == "messages"
    assert not verify_dataset(pairs, deep=True, num_workers=1).problems
    for name in pairs, judged:
        export_dataset(name, f"{name}-rows", format=format)
        convert([f"{name}-rows"], f"{name}-again", num_workers=1)
        again, first = (PackedStreamingDataset(each)[0] for each in (f"{name}-again", name))
        assert again == first
    with pytest.raises(ConfigError, match=r"holds preference, .* holds messages: only datasets with the same"):
        merge_datasets(str(tmp_path), [pairs, chats])
