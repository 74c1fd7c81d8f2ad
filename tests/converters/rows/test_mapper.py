from __future__ import annotations

import base64
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.converters.rows.mapper import Mapper, find_mapper
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.rows.tokens import to_tokens
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.processors.base import Processor, or_error
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.text import TextProcessor, TokensProcessor
from lmms_stream.types import Sample
from streaming import MDSWriter

from ...strategies import examples
from ..media_files import CLIP, CLIP_FACTS, CLIP_SOUND_FACTS, image_bytes, wav_bytes
from ..sources.source_rows import write

Row = dict[str, Any]


def says(role: str, content: Any, **others: Any) -> Row:
    return {"role": role, "content": content, **others}


CHAT = [says("user", "hi"), says("assistant", "hello")]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

# rows, options -> the messages that are stored
CHATS: list[tuple[str, Row, Row, Any]] = [
    ("exchanges", {"conversation": [{"human": "hi", "assistant": "hello"}]}, {}, CHAT),
    (
        "exchanges",
        {"texts": json.dumps([{"user": "hi", "assistant": "hello", "system": "s", "source": "x"}])},
        {},
        [says("system", "s"), CHAT[0], {"source": "x", **CHAT[1]}],
    ),
    (
        "exchanges",
        {
            "texts": [
                {"user": "hi", "assistant": "hello", "loss": False},
                {"instruction": "a", "input": "", "output": "b"},
            ]
        },
        {},
        [CHAT[0], says("assistant", "hello", learn=False), says("user", "a"), says("assistant", "b")],
    ),
    (
        "exchanges",
        {"conversation": [{"input": "hi", "output": "hello", "output_with_loss": False}, {"input": "", "output": "b"}]},
        {},
        [CHAT[0], says("assistant", "hello", learn=False), says("user", ""), says("assistant", "b")],
    ),
    ("exchanges", {"conversation": [{"instruction": "hi", "prompt": None, "response": "hello"}]}, {}, CHAT),
    ("messages", {"messages": [], "conversations": CHAT}, {}, CHAT),
    ("messages", {"messages": [says("system", "s"), *CHAT], "system": "s"}, {}, [says("system", "s"), *CHAT]),
    (
        "messages",
        {"messages": [says("system", "s"), *CHAT], "system": "t"},
        {"columns": {"system": ""}},
        [says("system", "s"), *CHAT],
    ),
    ("messages", {"messages": [says("system", "s\n"), *CHAT], "system": "s"}, {}, [says("system", "s\n"), *CHAT]),
    (
        "messages",
        {"messages": [says("system", [{"type": "text", "text": "s"}]), *CHAT], "system": "s"},
        {},
        [says("system", [{"type": "text", "text": "s"}]), *CHAT],
    ),
    ("messages", {"messages": CHAT, "system": "", "system_prompt": "s"}, {}, [says("system", "s"), *CHAT]),
    ("prompt-response", {"query": "hi", "response": "hello", "history": []}, {}, CHAT),
    (
        "prompt-response",
        {"query": "b", "response": "c", "history": [["hi", "hello"]]},
        {},
        [*CHAT, says("user", "b"), says("assistant", "c")],
    ),
    (
        "question-answer",
        {"system_prompt": "s", "question": "hi", "response": "hello"},
        {},
        [says("system", "s"), *CHAT],
    ),
    ("alpaca", {"instruction": "hi", "context": "", "response": "hello", "category": "x"}, {}, CHAT),
    ("prompt-response", {"instruction": "hi", "prompt": "hi", "response": "hello"}, {}, CHAT),
    (
        "messages",
        {
            "messages": [
                CHAT[0],
                says("assistant", [{"type": "reasoning", "text": "t"}, {"type": "output_text", "text": "a"}]),
            ]
        },
        {},
        [CHAT[0], says("assistant", [{"type": "text", "text": "a"}], reasoning_content="t")],
    ),
    ("messages", {"messages": CHAT}, {}, CHAT),
    ("messages", {"messages": json.dumps(CHAT)}, {}, CHAT),
    ("messages", {"conversations": CHAT, "messages": None}, {}, CHAT),
    ("messages", {"dialog": CHAT, "text": "x"}, {"columns": {"messages": "dialog"}}, CHAT),
    ("messages", {"messages": CHAT}, {"system": "Be kind."}, [says("system", "Be kind."), *CHAT]),
    ("messages", {"messages": CHAT, "system": "No."}, {"system": "Be kind."}, [says("system", "No."), *CHAT]),
    ("messages", {"messages": [says("developer", "d"), *CHAT]}, {"system": "x"}, [says("developer", "d"), *CHAT]),
    (
        "messages",
        {"messages": [says("customer", "hi"), says("model", "hello", name=None)]},
        {"roles": {"customer": "user"}},
        CHAT,
    ),
    (
        "messages",
        {"messages": [says("user", "f?", weight=1), says("assistant", None, tool_calls=[CALL]), says("tool", "3")]},
        {},
        [says("user", "f?"), says("assistant", None, tool_calls=[CALL]), says("tool", "3")],
    ),
    (
        "messages",
        {"messages": [*CHAT, says("user", "and?"), says("assistant", "so", weight=0.0), *CHAT]},
        {},
        [*CHAT, says("user", "and?"), says("assistant", "so", learn=False), *CHAT],
    ),
    (
        "messages",
        {"messages": [*CHAT, *CHAT]},
        {"learn": "last"},
        [CHAT[0], says("assistant", "hello", learn=False), *CHAT],
    ),
    (
        "messages",
        {"messages": CHAT, "tools": json.dumps([TOOL])},
        {},
        {"messages": CHAT, "tools": [TOOL]},
    ),
    ("messages", {"messages": CHAT, "tools": []}, {}, CHAT),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "system": ""},
        {},
        CHAT,
    ),
    (
        "sharegpt",
        {
            "conversations": [
                {"from": "Alice", "value": "f?", "train": True},
                {"from": "function_call", "value": '{"name": "f", "arguments": {}}', "train": False},
                {"from": "observation", "value": "3"},
                {"from": "gpt", "value": "It is 3.", "train": True},
            ],
            "tools": [TOOL],
        },
        {"roles": {"Alice": "user"}},
        {
            "messages": [
                says("user", "f?"),
                {
                    "role": "assistant",
                    "content": None,
                    "learn": False,
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
                },
                says("tool", "3"),
                says("assistant", "It is 3."),
            ],
            "tools": [TOOL],
        },
    ),
    ("alpaca", {"instruction": "hi", "input": "", "output": "hello"}, {}, CHAT),
    (
        "alpaca",
        {"instruction": "add", "input": "1 2", "output": 3},
        {},
        [says("user", "add\n\n1 2"), says("assistant", "3")],
    ),
    ("alpaca", {"instruction": "hi", "output": "hello", "history": [["hi", "hello"]]}, {}, [*CHAT, *CHAT]),
    ("prompt-response", {"prompt": "hi", "response": "hello"}, {}, CHAT),
    ("prompt-response", {"prompt": CHAT[:1], "completion": CHAT[1:]}, {}, CHAT),
    (
        "prompt-response",
        {"prompt": [*CHAT, CHAT[0]], "completion": "hello"},
        {},
        [CHAT[0], says("assistant", "hello", learn=False), *CHAT],
    ),
    ("prompt-response", {"inputs": "hi", "targets": "hello", "task": "t"}, {}, CHAT),
    ("dialog", {"dialog": ["hi", "hello", "hi", "hello", "x"], "act": [1]}, {}, [*CHAT, *CHAT, says("user", "x")]),
    ("dialog", {"utterances": '["hi", "hello"]'}, {}, CHAT),
    ("dialog", {"conversations": ["{hi}", "hello"], "source": "s"}, {}, [says("user", "{hi}"), CHAT[1]]),
    ("dialog", {"id": "0", "data": ["hi", "hello"]}, {"columns": {"dialog": "data"}}, CHAT),
    ("question-answer", {"question": "hi", "answer": "hello", "id": 3}, {}, CHAT),
    ("question-answer", {"q": "hi", "a": "hello"}, {"columns": {"question": "q", "answer": "a"}}, CHAT),
]


def stored(row: Row, **options: Any) -> Any:
    """What is stored of the messages of a row."""
    return json.loads(mapped(row, **options)["messages"])


def mapped(row: Row, **options: Any) -> Sample:
    return find_mapper([row], SchemaOptions(**options))(row, None)


def round_trip(
    rows: Sequence[Mapping[str, Any]], folder: Path, *, options: SchemaOptions, media_folder: str | None = None
) -> list[Sample]:
    """The rows, mapped, written as shards and read again."""
    mapper = pickle.loads(pickle.dumps(find_mapper(rows, options)))
    with MDSWriter(columns=mapper.columns, out=str(folder), size_limit=1 << 12) as writer:
        for row in rows:
            writer.write(mapper(row, media_folder))
    return list(PackedStreamingDataset(folder)[:])


def assert_measured_as_processed(processor: Processor, samples: Sequence[Sample]) -> None:
    for sample in samples:
        assert processor.measure(sample) == len(processor.process(sample)["input_ids"])


@pytest.mark.parametrize(("kind", "row", "options", "expected"), CHATS)
def test_a_conversation_is_stored_as_its_messages(kind: str, row: Row, options: Row, expected: Any) -> None:
    mapper = find_mapper([row], SchemaOptions(**options))
    assert (mapper.kind.name, mapper.schema) == (kind, "messages")
    sample = mapper(row, None)
    assert json.loads(sample["messages"]) == expected
    assert sample["media"] == b""
    assert stored(row, **options, kind=kind) == expected


def test_conversations_come_back_from_shards(tmp_path: Path, chat_processor: ChatProcessor) -> None:
    for number, (_, row, options, expected) in enumerate(CHATS):
        rows = [row] * 3
        samples = round_trip(rows, tmp_path / str(number), options=SchemaOptions(**options))
        assert [json.loads(sample["messages"]) for sample in samples] == [expected] * 3
        assert_measured_as_processed(chat_processor, samples)


def test_plain_conversations_are_stored_as_they_were_before() -> None:
    row = {
        "messages": [{"content": "hi", "role": "user"}, says("assistant", [{"type": "text", "text": "a"}], name="n")]
    }
    expected = '[{"content":"hi","role":"user"},{"role":"assistant","content":[{"type":"text","text":"a"}],"name":"n"}]'
    assert mapped(row)["messages"] == expected


@pytest.mark.parametrize("as_text", [False, True])
def test_integers_of_more_than_64_bits_are_stored_as_they_are(as_text: bool) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"id": 10**30, "text": "ü"}}}
    messages = [says("user", "f?"), says("assistant", None, tool_calls=[call])]
    assert stored({"messages": json.dumps(messages) if as_text else messages}) == messages


@pytest.mark.parametrize(
    ("row", "options", "reason"),
    [
        ({"messages": [*CHAT, says("user", "x", a=[1 << 80, "\ud800"])]}, {}, "the messages hold what JSON cannot"),
        ({"messages": "[1"}, {}, "column 'messages' holds text that is not JSON"),
        ({"messages": [says("user", "hi")]}, {}, "messages holds prompts without answers, .*: complete the rows"),
        ({"messages": [says("user", "hi")]}, {"kind": "messages"}, r"no assistant message .* \(roles: user\)"),
        ({"messages": [says("customer", "hi"), says("bot2", "x")]}, {}, r"\(roles: bot2, customer\).*--roles NAME="),
        ({"messages": [*CHAT[:1], says("assistant", "x", weight=0)]}, {}, "the loss leaves out every message"),
        ({"messages": [*CHAT[:1], says("assistant", "x", weight=0.5)]}, {}, "weight 0.5, expected 0, 1, false or true"),
        ({"messages": [*CHAT[:1], says("assistant", "x", train="no")]}, {}, "train 'no', expected 0, 1, false or true"),
        ({"messages": []}, {}, "expected a list of messages in column 'messages', found an empty list: correct"),
        ({"messages": ['{"role": "user"}']}, {}, "a message must be an object with a role, found"),
        ({"conversation": [{"in": "a", "out": "b"}]}, {}, "or name a question and its answer `input`"),
        ({"messages": 3}, {}, "expected a list of messages in column 'messages', found int"),
        ({"messages": [*CHAT, says("user", {"a": 1})]}, {}, "must be a string or a list of parts, found dict"),
        ({"messages": [*CHAT, says("user", "\ud800")]}, {}, "the messages hold what JSON cannot"),
        ({"messages": CHAT, "tools": [3]}, {}, "a tool must be an object, its JSON schema, found '3'"),
        ({"messages": CHAT, "tools": {"a": 1}}, {}, "expected a list of tools in column 'tools', found dict"),
        ({"messages": CHAT, "system": [1]}, {}, "column 'system' must hold text, found list"),
        ({"conversations": [{"from": "Bob", "value": "x"}]}, {}, "from 'Bob', expected one of .*--roles Bob=user"),
        ({"conversations": [{"from": "gpt", "value": "x"}, {"value": "x"}]}, {}, "must be an object with 'from'"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, {}, "holds text that is not JSON"),
        ({"conversations": [{"from": "function_call", "value": "[1]"}]}, {}, "function call must be an object"),
        ({"instruction": "a", "output": "b", "history": [["x"]]}, {}, "history must be a list of pairs of texts"),
        ({"dialog": ["a", None]}, {}, "turn 2 in column 'dialog' must be text, found NoneType: correct it"),
        ({"dialog": ["a"]}, {}, r"no assistant message with content \(roles: user\)"),
        ({"question": "a", "answer": {"text": ["b"]}}, {}, "'answer' must hold text, found dict"),
        ({"question": "a", "answer": ""}, {}, "no assistant message with content"),
        ({"texts": [{"user": "a", "assistant": 3}]}, {}, "an exchange must hold text in 'assistant', found '3'"),
        ({"texts": [{"user": "a", "assistant": "b"}, {"user": "a"}]}, {}, "an exchange must be an object with one of"),
        ({"texts": [{"instruction": "a", "query": "c", "response": "b"}]}, {}, "has 'instruction' as well as 'query'"),
        ({"texts": [{"user": "a", "gpt": "b", "output": "c"}]}, {}, "has 'output' as well as 'user', 'gpt'"),
        ({"texts": [{"user": "a", "gpt": "b", "content": "c"}]}, {}, "has 'content' as well as .*: keep one key"),
        ({"texts": [{"user": "a", "gpt": "b", "system": ["c"]}]}, {}, r"must hold text in 'system', found \"\['c'\]\""),
        (
            {"messages": [says("user", "<image><image>", image=b"x"), CHAT[1]]},
            {},
            r"a message has 1 media in image and 2 slots for them \(<image>\): write a slot",
        ),
        ({"messages": [says("user", "a", image=b"x", images=[b"x"]), CHAT[1]]}, {}, "media in images and in image"),
        (
            {"messages": [says("user", [{"type": "image", "image": "a.png"}], images=["b.png"]), CHAT[1]]},
            {},
            "a message has 1 media in images and 1 others in parts of type image: keep one of the two, or write",
        ),
        (
            {"messages": [says("user", "a", images=[b"x"]), CHAT[1]], "images": [b"y"]},
            {},
            r"0 slots for media of kind image .* and 1 images \(messages hold 1 others\): correct the row",
        ),
        (
            {"messages": [says("system", "s"), *CHAT], "system": "t"},
            {},
            "column 'system' holds a system prompt, and a message holds another: keep.* --columns system= to leave",
        ),
        (
            {"messages": [says("system", [{"type": "text", "text": "s"}]), *CHAT], "system": "t"},
            {},
            "column 'system' holds a system prompt, and a message holds another",
        ),
        ({"query": "a", "response": "b", "history": ["x"]}, {}, "history must .*, or pass --columns history= to leave"),
        (
            {"messages": [says("user", [{"type": "thinking", "thinking": "t"}]), CHAT[1]]},
            {},
            "a part of type 'thinking' must hold text of the assistant, .* of 'user'",
        ),
        (
            {"messages": [CHAT[0], says("assistant", [{"type": "reasoning", "text": "t"}], reasoning_content="u")]},
            {},
            "a message has reasoning_content and parts of type 'reasoning': keep one of them",
        ),
        ({"messages": CHAT, "label": True, "prompt": "b"}, {"kind": "kto"}, "column 'prompt' says 'b', which is not"),
        ({"text": ""}, {}, "column 'text' is empty, so nothing would be learnt"),
        ({"text": "\ud800"}, {}, "column 'text' holds text that UTF-8 cannot"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_is_refused_with_the_reason(row: Row, options: Row, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        mapped(row, **options)


@pytest.mark.parametrize(
    ("row", "suggestion"),
    [
        ({"instructon": "a", "output": "b"}, "pass --columns prompt=instructon response=output, or"),
        ({"Conversation": CHAT, "id": 1}, r"pass --columns messages=Conversation \(leaves out id\), or"),
        ({"prompt": "a", "answer_text": "b"}, "pass --columns prompt=prompt response=answer_text, or"),
        ({"file_name": "a.png", "labels": "cat"}, "pass --columns label=labels, or"),
        ({"captions": "a cat", "image": "a.png"}, "pass --columns text=captions, or make .*'<image>', .* 'a cat'"),
        ({"dialog": [{"who": "a"}]}, "make other rows with --map"),
        ({"question": "a", "answer": None}, "column question holds prompts without answers, .*: make other rows"),
        ({"task": "a", "answer": "b"}, "pass --columns prompt=task response=answer, or"),
        (
            {"problem": "a", "hint": "c", "answer": "b"},
            r"pass --columns prompt=problem response=answer \(leaves out hint\), or",
        ),
        ({"question": "a", "schema": "c", "SQL": "b"}, "pass --kind alpaca .*=question input=schema output=SQL, or"),
        (
            {"prompt": "a", "canonical_solution": "b", "instruction": "c d", "test": "e"},
            "pass .* response=canonical_sol",
        ),
        ({"prompt": CHAT[:1], "reward_model": {}, "target": 98}, "column prompt holds prompts without answers"),
        (
            {"input_text": "a", "expected_output": {"b": 1}},
            r"pass .* response=expected_output \(objects become JSON text\)",
        ),
        ({"anchor": "a", "positive": "b", "negative": "c"}, "name columns by their roles"),
        ({"token_ids": [1], "input_id": [1]}, r"pass --columns input_ids=input_id \(leaves out token_ids\), or"),
        ({"one": 1, "two": 2}, "name columns by their roles with --columns .*, make other rows with --map .* --keep$"),
    ],
)
def test_columns_of_no_kind_are_told_the_options_that_read_them(row: Row, suggestion: str) -> None:
    with pytest.raises(DataError, match=f"fit no kind of rows: {suggestion}") as raised:
        find_mapper([row], SchemaOptions())
    assert len(str(raised.value).partition("; the first gives")[0]) < 300


@pytest.mark.parametrize(("asked", "answered"), [("Question", "Answer"), ("problem", "answer"), ("src", "tgt")])
def test_two_columns_whose_names_have_one_meaning_are_read(asked: str, answered: str) -> None:
    mapper = find_mapper([{asked: "a", answered: "b", "id": 3}], SchemaOptions())
    assert mapper.description == f"prompt-response; reads {asked} as prompt, {answered} as response; leaves out id"


def test_labels_of_an_imagefolders_metadata_are_those_of_its_files(tmp_path: Path) -> None:
    image = image_bytes()
    (tmp_path / "1.png").write_bytes(image)
    mapper = find_mapper([{"file_name": "1.png", "label": "cat"}], SchemaOptions())
    assert mapper.kind.name == "image-label"
    assert mapper({"file_name": "1.png", "label": 3}, str(tmp_path)) == {"image": image, "label": "3"}
    with pytest.raises(DataError, match="expected text in column 'label', found null"):
        mapper({"file_name": "1.png", "label": None}, str(tmp_path))
    with pytest.raises(DataError, match="fit no kind of rows: pass --columns text=label"):
        find_mapper([{"file_name": "a.wav", "label": "cat"}], SchemaOptions())


def test_frames_of_a_video_are_refused_by_name() -> None:
    frames = {"messages": [says("user", "<video>?"), CHAT[1]], "videos": [[image_bytes(), image_bytes()]]}
    in_a_part = [says("user", [{"type": "video", "video": ["a.png", "b.png"]}]), CHAT[1]]
    for row in (frames, {"messages": in_a_part}):
        message = "a video is given as a list of 2 frames, but.*: write the frames as a video file, or as separate"
        with pytest.raises(DataError, match=message):
            mapped(row)


def test_what_a_kept_column_holds_after_the_first_rows_is_taken_or_told_how_to_keep() -> None:
    rows = [{"text": "x", "score": number} for number in range(100)]
    mapper = find_mapper(rows, SchemaOptions(keep=("score",)))
    for value in (None, "1.50", 1.5):
        with pytest.raises(DataError, match=r"'score' holds \w+ here and int in the first rows: .* as score:json"):
            mapper({"text": "x", "score": value}, None)
    as_json = find_mapper(rows, SchemaOptions(keep=("score:json",)))
    for value in (None, "1.50", 1.5):
        assert as_json({"text": "x", "score": value}, None)["score"] == value


def test_a_later_row_without_the_columns_of_the_first_is_refused() -> None:
    mapper = find_mapper([{"instruction": "a", "output": "b"}], SchemaOptions())
    with pytest.raises(
        DataError, match="expected text in column 'output', found columns instruction: complete the row"
    ):
        mapper({"instruction": "a"}, None)
    with pytest.raises(DataError, match="expected text in column 'output', found null"):
        mapper({"instruction": "a", "output": None}, None)
    with pytest.raises(DataError, match="expected a list of messages in column 'messages', found columns text"):
        find_mapper([{"messages": CHAT}], SchemaOptions())({"text": "x"}, None)


def test_the_kind_of_rows_is_found_and_said() -> None:
    rows = [{"id": 1, "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "x"}], "url": "u"}]
    mapper = find_mapper(rows, SchemaOptions(keep=("id",)))
    assert mapper.description == "sharegpt; reads conversations as messages; keeps id (int); leaves out url"
    assert mapper.columns == {"messages": "str", "media": "bytes", "id": "int"}
    assert mapper(rows[0], None)["id"] == 1


def test_a_column_of_media_that_the_first_rows_lack_is_read_all_the_same() -> None:
    mapper = find_mapper([{"messages": CHAT}, {"messages": CHAT, "images": []}], SchemaOptions())
    later = {"conversations": [says("user", "<image>"), CHAT[1]], "image": SMALL["image"][0]}
    assert mapper(later, None)["media"] == SMALL["image"][0]
    with pytest.raises(DataError, match=r"1 slots for media of kind image .* and 0 images"):
        mapper({"messages": later["conversations"]}, None)
    assert find_mapper([{"messages": CHAT}], SchemaOptions())(later, None)["media"] == SMALL["image"][0]


def test_a_broken_row_among_the_first_is_refused_where_it_is_mapped() -> None:
    mapper = find_mapper([{"messages": "{"}, {"messages": CHAT}], SchemaOptions())
    with pytest.raises(DataError, match="column 'messages' holds text that is not JSON"):
        mapper({"messages": "{"}, None)


def test_rows_that_fit_nothing_are_passed_over_beside_others_that_do() -> None:
    mapper = find_mapper([{"messages": None, "other": 1}, {"messages": CHAT}], SchemaOptions())
    assert mapper.kind.name == "messages"
    with pytest.raises(DataError, match="expected a list of messages in column 'messages', found null"):
        mapper({"messages": None, "other": 1}, None)


PAIRS: list[Row] = [
    {"prompt": "hi", "chosen": "hello", "rejected": "no"},
    {"prompt": "hi", "messages": CHAT, "chosen": CHAT, "rejected": CHAT, "score": 1},
    {"chosen": "Human: hi Assistant: hello", "rejected": "Human: hi"},
    {"text": "x", "chosen": "hello", "rejected": "no"},
]


@pytest.mark.parametrize("row", PAIRS)
def test_of_a_chosen_and_a_rejected_answer_the_chosen_alone_is_learnt_where_that_is_said(row: Row) -> None:
    assert mapped(row, kind="columns", keep=True) == row
    if row["chosen"] == CHAT:
        with pytest.raises(DataError, match=r"columns chosen and rejected hold a good and a bad .*messages=chosen"):
            mapped(row, kind="messages")
        assert stored(row, columns={"messages": "chosen"}) == CHAT
    elif "prompt" in row:
        assert stored(row, columns={"response": "chosen"}) == CHAT


def test_answers_that_are_said_to_be_bad_are_not_learnt() -> None:
    exchange: Row = {"prompt": "hi", "completion": "hello"}
    for name, good, bad in ("label", True, False), ("kto_tag", True, False), ("label", "True", "False"):
        rows: list[Row] = [{**exchange, name: good}, {**exchange, name: bad}]
        assert find_mapper(rows, SchemaOptions()).kind.name == "kto"
        captions = [{"image": SMALL["image"][0], "text": "a cat", name: good}]
        with pytest.raises(DataError, match=rf"'{name}' marks .* --kind caption --on-error skip to leave out"):
            find_mapper(captions, SchemaOptions())
        for mapper in (
            find_mapper(rows, SchemaOptions(kind="prompt-response")),
            find_mapper([exchange], SchemaOptions()),
        ):
            assert json.loads(mapper(rows[0], None)["messages"]) == CHAT
            with pytest.raises(DataError, match=rf"column '{name}' is False, so its answer is marked as bad"):
                mapper(rows[1], None)
    with pytest.raises(DataError, match="column 'label' is False"):
        find_mapper([{"messages": CHAT}], SchemaOptions())({"messages": CHAT, "label": False}, None)
    assert stored({**exchange, "label": "greeting"}) == CHAT
    assert mapped({"text": "a", "label": False}) == {"text": "a"}


def test_media_and_their_text_become_a_conversation(tmp_path: Path) -> None:
    image, audio = SMALL["image"][0], SMALL["audio"][0]
    write(tmp_path / "cats" / "1.png", image)
    rows: list[tuple[Row, str, bytes]] = [
        ({"image": image, "text": "a cat"}, "image", image),
        ({"images": [image], "caption": "a cat", "url": "u"}, "image", image),
        ({"audio": {"bytes": audio, "path": None}, "text": "a cat"}, "audio", audio),
        ({"file_name": "cats/1.png", "text": "a cat"}, "image", image),  # as in the metadata.jsonl of an imagefolder
    ]
    for row, kind, data in rows:
        mapper = find_mapper([row], SchemaOptions())
        sample = mapper(row, str(tmp_path))
        user, assistant = json.loads(sample["messages"])
        assert (mapper.kind.name, sample["media"]) == ("caption", data)
        assert (user["role"], [part["type"] for part in user["content"]]) == ("user", [kind])
        assert assistant == says("assistant", "a cat")
    mapper = find_mapper([rows[0][0]], SchemaOptions())
    with pytest.raises(DataError, match="the row has a caption and no media: add the media, or convert"):
        mapper({"image": None, "text": "x"}, None)
    with pytest.raises(DataError, match="the text has <image>, which a caption cannot have: write the row as"):
        mapper({"image": image, "text": "a <image> b"}, None)


def test_parts_as_other_providers_write_them_are_read() -> None:
    image = SMALL["image"][0]
    encoded = base64.b64encode(image).decode()
    parts = [
        {"type": "text", "value": "what is this?"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}},
    ]
    sample = mapped({"messages": [says("user", parts), CHAT[1]]})
    text, part = json.loads(sample["messages"])[0]["content"]
    assert (text, sample["media"]) == ({"type": "text", "text": "what is this?"}, image)
    assert part.keys() == {"type", "mime", "span", "width", "height"}
    slot = {"type": "image", "source": "coco"}
    assert mapped({"messages": [says("user", [slot]), CHAT[1]], "images": [image]})["media"] == image
    with pytest.raises(DataError, match="is on the web, and conversions do not download media"):
        mapped(
            {"messages": [says("user", [{"type": "image", "source": {"type": "url", "url": "https://x/a"}}]), CHAT[1]]}
        )


def test_a_nan_is_no_value_and_is_not_stored() -> None:
    assert stored({"messages": CHAT, "system": math.nan, "tools": math.nan, "score": math.nan}) == CHAT
    assert mapped({"text": "x", "image": math.nan}) == {"text": "x"}
    with pytest.raises(DataError, match="fit no kind of rows"):
        mapped({"question": "x", "answer": math.nan})
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": [math.nan]}}}
    with pytest.raises(DataError, match="the messages hold NaN or Infinity, which JSON has not: correct or remove"):
        mapped({"messages": [*CHAT, says("assistant", None, tool_calls=[call])]})


def test_texts_whose_columns_of_media_are_empty_stay_texts() -> None:
    for row in (
        {"text": "x", "image": None}, {"text": "x", "images": []}, {"text": "x", "file_name": "a.py"},
    ):  # fmt: skip
        assert find_mapper([row], SchemaOptions())(row, None) == {"text": "x"}
    assert mapped({"text": "x", "image": b"y"}, columns={"images": ""}) == {"text": "x"}
    assert mapped({"text": "x", "image": b"y"}, kind="text") == {"text": "x"}


@pytest.mark.parametrize(
    "chat", [[{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], ["hi", "hello"]]
)
def test_rows_of_which_nothing_is_filled_are_of_the_kind_of_the_others(chat: list[Any]) -> None:
    empty: Row = {"conversations": []}
    mapper = find_mapper([empty, {"conversations": chat}], SchemaOptions())
    assert json.loads(mapper({"conversations": chat}, None)["messages"]) == CHAT
    with pytest.raises(DataError, match="found an empty list: correct or remove the row"):
        mapper(empty, None)


def test_rows_of_several_kinds_are_refused_unless_one_is_insisted_on() -> None:
    rows: list[Row] = [{"text": "a"}, {"text": "b"}, {"messages": CHAT}]
    with pytest.raises(DataError, match=r"several kinds in one source: text \(row 1\), messages \(row 3\): .*--kind"):
        find_mapper(rows, SchemaOptions())
    assert find_mapper(rows, SchemaOptions(kind="text")).kind.name == "text"
    with pytest.raises(
        DataError, match=r"no row fits --kind alpaca, which needs columns instruction and output/response; found"
    ):
        find_mapper(rows, SchemaOptions(kind="alpaca"))


def test_options_that_name_what_is_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="kind 'smell' is not known: choose one of tokens, preference, kto, messages"):
        SchemaOptions(kind="smell")
    with pytest.raises(ConfigError, match="no column has the role smell: choose of input_ids, labels"):
        SchemaOptions(columns={"smell": "x"})
    with pytest.raises(ConfigError, match="learn must be 'assistant', 'last' or 'each', got 'all'"):
        SchemaOptions(learn="all")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_image_pixels must be at least 1, got 0"):
        SchemaOptions(max_image_pixels=0)
    with pytest.raises(DataError, match=r"no column q \(question\), found question, answer: correct --columns"):
        mapped({"question": "a", "answer": "b"}, columns={"question": "q"})
    with pytest.raises(DataError, match="--keep x: no such column in the first rows, found text"):
        mapped({"text": "a"}, keep=("x",))
    with pytest.raises(
        DataError, match="--keep media: rows of kind messages already store a column of this name: rename"
    ):
        mapped({"messages": CHAT, "media": b"x"}, keep=("media",))


def test_the_fingerprint_text_changes_with_what_is_stored() -> None:
    def text(**options: Any) -> str:
        row = {"messages": CHAT, "id": 1}
        return find_mapper([row], SchemaOptions(**options)).fingerprint_text

    changes: list[Row] = [
        {}, {"system": "x"}, {"learn": "last"}, {"learn": "each"}, {"roles": {"a": "user"}}, {"keep": ("id",)},
        {"max_image_pixels": 9}, {"media_root": "/m"}, {"columns": {"images": ""}},
    ]  # fmt: skip
    assert len({text(**options) for options in changes}) == len(changes)
    assert text() == text(keep=(), kind="messages")


def test_the_names_by_which_conversions_are_resumed_and_samples_known_stay() -> None:
    """What lies in work folders and caches of earlier versions must fit this one."""
    options = SchemaOptions(kind="messages", keep=("id",), roles={"a": "user"})
    assert options.identity == {
        "schema": "messages", "columns": {}, "keep": ("id",), "system": None, "roles": {"a": "user"},
        "learn": "assistant", "media_root": None, "max_image_pixels": None, "check_media": "header",
    }  # fmt: skip
    assert find_mapper([{"messages": CHAT, "id": 1}], options).fingerprint_text == json.dumps(
        {
            "columns": {}, "format": "messages", "found": {"messages": "messages"}, "kept": {"id": "int"},
            "learn": "assistant", "max_image_pixels": None, "media_root": None, "pillow": None, "roles": {"a": "user"},
            "system": None, "version": 12,
        }
    )  # fmt: skip


def test_texts_come_back_and_are_learnt_whole(tmp_path: Path, tokenizer: Path) -> None:
    rows = [{"text": text, "id": number} for number, text in enumerate(["def f(): ...", "ü\n" * 50, "x"])]
    samples = round_trip(rows, tmp_path, options=SchemaOptions(keep=True))
    assert samples == rows
    processor = TextProcessor.from_pretrained(str(tokenizer))
    assert_measured_as_processed(processor, samples)
    for sample in samples:
        processed = processor.process(sample)
        assert processor.tokenizer.decode(processed["input_ids"]) == sample["text"] + "<|end|>"
        assert np.array_equal(processed["labels"], processed["input_ids"])


KEPT: list[tuple[str, list[Any]]] = [
    ("str", ["a", "ü", ""]),
    ("bytes", [b"a", b"", b"\xff" * 9]),
    ("int", [1, -(1 << 63), (1 << 63) - 1]),
    ("float64", [0.5, 1e300, -0.0]),
    ("json", [None, "a", 3]),
    ("json", [True, False, True]),
    ("json", [[1, 2], [], [3]]),
    ("json", [{"a": [1, None]}, None, {"ü": "x"}]),
    ("ndarray:float32", [np.ones((2, 3), np.float32), np.zeros(1, np.float32), np.ones((300, 1), np.float32)]),
    ("ndarray:int64", [np.arange(3), np.arange(1), np.arange(300)]),
]


@pytest.mark.parametrize(("encoding", "values"), KEPT)
def test_kept_columns_come_back_as_they_were(encoding: str, values: list[Any], tmp_path: Path) -> None:
    rows = [{"x": value} for value in values]
    mapper = find_mapper(rows, SchemaOptions(keep=True))
    assert (mapper.kind.name, mapper.columns) == ("columns", {"x": encoding})
    samples = round_trip(rows, tmp_path, options=SchemaOptions(keep=True))
    for sample, value in zip(samples, values, strict=True):
        assert isinstance(sample["x"], type(value))
        assert np.array_equal(sample["x"], value) if isinstance(value, np.ndarray) else sample["x"] == value


def test_integers_among_floats_and_numpy_scalars_are_numbers(tmp_path: Path) -> None:
    rows: list[Row] = [{"x": 0.5, "y": np.int64(3)}, {"x": 2, "y": 4}]
    assert round_trip(rows, tmp_path, options=SchemaOptions(kind="columns")) == rows


@pytest.mark.parametrize(
    ("first", "later", "reason"),
    [
        ([1], "a", "column 'x' holds str here and int in the first rows: write it with one type"),
        ([1], 0.5, "column 'x' holds float64 here and int"),
        ([0.5], (1 << 53) + 1, "column 'x' holds int here and float64"),
        (["a"], None, "column 'x' holds null here and str"),
        (["a"], "\ud800", "column 'x' holds text that UTF-8 cannot"),
        ([1], 1 << 63, "column 'x' holds 9223372036854775808, which has more than 64 bits"),
        ([[1]], b"a", "column 'x' holds bytes here and json"),
        ([[1]], [b"a"], "column 'x' holds a value that JSON cannot"),
        ([np.arange(2)], np.arange(2.0), "column 'x' holds ndarray:float64 here and ndarray:int64"),
        ([np.arange(2)], np.arange(0), r"column 'x' holds an array of shape \(0,\), which MDS cannot"),
        ([np.arange(2)], np.array(["a"]), "column 'x' holds an array of <U1, expected one of uint8"),
        ([1], Decimal(1), "column 'x' holds Decimal, a type that MDS does not support: write it as text"),
        ([b"a", "a"], "a", "column 'x' holds bytes and str, and a column has values of one type: drop it from --keep"),
    ],
)  # fmt: skip
def test_a_kept_value_of_another_type_is_refused(first: list[Any], later: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        find_mapper([{"x": value} for value in first], SchemaOptions(keep=("x",)))({"x": later}, None)


@pytest.mark.parametrize(
    ("encoding", "value", "reason"),
    [
        ("int32", 1.5, r"1.5 would become 1"),
        ("int32", 1 << 31, "out of bounds"),
        ("uint8", -1, "out of bounds"),
        ("float16", 70000, "70000 would become inf"),
        ("ndarray:int32", [1, 2.5], "2.5 would become 2"),
        ("ndarray:float32:2", [1e300, 1], r"1e\+300 would become inf"),
        ("ndarray:int8", [[1], [2, 3]], "inhomogeneous"),
        ("str_int", 1.5, "'1.5', which is no str_int: correct the row"),
        ("str_int", float("inf"), "'inf', which is no str_int"),
        ("str_float", (1 << 53) + 1, "'9007199254740993', which is no str_float"),
    ],
)
def test_a_number_that_a_named_type_would_change_is_refused(encoding: str, value: Any, reason: str) -> None:
    with pytest.raises(DataError, match=rf"column 'x' holds .*{reason}"):
        mapped({"text": "a", "x": value}, keep=(f"x:{encoding}",))


def test_numbers_that_a_named_type_holds_are_kept_in_it() -> None:
    kept = {"int32": 2.0, "float32": 0.1, "ndarray:float16": [0.1, float("inf")], "str_float": float("nan")}
    found = [mapped({"text": "a", "x": value}, keep=(f"x:{encoding}",))["x"] for encoding, value in kept.items()]
    assert found[:2] == [np.int32(2), np.float32(0.1)]
    assert found[2].tolist() == [float(np.float16(0.1)), float("inf")]
    assert found[3] != found[3]


def test_a_column_kept_as_json_takes_nulls_and_other_types_after_the_first_rows(tmp_path: Path) -> None:
    rows: list[Row] = [{"text": "a", "x": "b"}] * 101 + [{"text": "a", "x": None}, {"text": "a"}, {"text": "a", "x": 3}]
    mapper = find_mapper(rows[:100], SchemaOptions(keep=("x",)))
    with pytest.raises(
        DataError, match=r"'x' holds null here and str .*: write .* type, keep it as x:json, or leave it"
    ):
        mapper(rows[101], None)
    mapper = find_mapper(rows[:100], SchemaOptions(keep=("x:json",)))
    assert mapper.description == "text; reads text; keeps x (json)"
    assert [mapper(row, None)["x"] for row in rows[100:]] == ["b", None, None, 3]
    assert round_trip(rows, tmp_path, options=SchemaOptions(keep=("x:json",)))[-1] == rows[-1]
    assert mapped({"text": "a", "x:json": 3}, keep=("x:json",)) == {"text": "a", "x:json": 3}
    later = find_mapper(rows, SchemaOptions(keep=("y:json",)))
    assert later.description == "text; reads text; keeps y (json, in none of the first rows); leaves out x"


def test_token_rows_come_back_with_what_is_learnt_of_them(tmp_path: Path) -> None:
    ids, wanted = [5, 6, 7, 8], [[1, 2], [3, 4]]
    kinds: list[Row] = [
        {"labels": [-100, 6, -100, 8]}, {"loss_mask": [0, 1, 0, 1]}, {"loss_mask": [False, True, False, True]},
        {"completion_mask": [0, 1, 0, 1]}, {"assistant_masks": [0, 1, 0, 1]},
        {"loss_spans": wanted}, {"loss_spans": np.array(wanted), "labels": None, "attention_mask": [1, 1, 1, 1]},
    ]  # fmt: skip
    for number, kind in enumerate(kinds):
        rows = [{"input_ids": ids, **kind}, {"input_ids": np.array(ids, np.uint16), **kind}]
        samples = round_trip(rows, tmp_path / str(number), options=SchemaOptions())
        assert_measured_as_processed(TokensProcessor(), samples)
        for sample in samples:
            assert sample["input_ids"].dtype == sample["loss_spans"].dtype == np.int32
            assert TokensProcessor().process(sample)["labels"].tolist() == [-100, 6, -100, 8]
    whole = mapped({"input_ids": ids})
    assert TokensProcessor().process(whole)["labels"].tolist() == ids


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [1, -2]}, f"column 'input_ids' holds -2, a token id is 0 to {(1 << 31) - 1}"),
        ({"input_ids": [1 << 31]}, "column 'input_ids' holds 2147483648"),
        ({"input_ids": [1 << 64]}, "column 'input_ids' must hold integers of up to 64 bits, found"),
        ({"input_ids": np.array([1 << 63], np.uint64)}, "column 'input_ids' must hold integers of up to 64 bits"),
        ({"input_ids": [0.5]}, "column 'input_ids' must hold integers"),
        ({"input_ids": ["a"]}, "column 'input_ids' must hold integers"),
        ({"input_ids": [[1], [2, 3]]}, "column 'input_ids' must hold integers"),
        ({"input_ids": "12"}, "column 'input_ids' must hold integers"),
        ({"input_ids": [[1, 2]]}, r"column 'input_ids' has the shape \(1, 2\), expected a list of ids"),
        ({"input_ids": []}, r"column 'input_ids' has the shape \(0,\)"),
        ({"input_ids": [1, 2], "labels": [1]}, "column 'labels' has 1 values for 2 tokens"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, r"column 'labels' holds 2 at 0, where 'input_ids' holds 1.*not"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "no token would be learnt"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "column 'loss_mask' must hold 0 and 1 alone"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1], "labels": [1, 2]}, "columns labels and loss_mask all mark the"),
        ({"input_ids": [1, 2], "completion_mask": [1, 1], "labels": [1, 2]}, "columns labels and completion_mask all"),
        ({"input_ids": [1, 2], "loss_spans": [[0, 3]]}, r"loss span \[0, 3\) lies outside the row's 2 tokens"),
        ({"input_ids": [1, 2], "loss_spans": [[1, 2], [0, 1]]}, r"loss span \[0, 1\) .* does not ascend"),
        ({"input_ids": [1, 2], "loss_spans": []}, "column 'loss_spans' is empty"),
        ({"input_ids": [1, 2], "loss_spans": [0, 1]}, r"column 'loss_spans' has the shape \(2,\), expected pairs"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "column 'attention_mask' holds 0, so the row is padded"),
    ],
)  # fmt: skip
def test_token_rows_that_no_model_could_learn_are_refused(row: Row, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        mapped(row)


def test_any_processor_makes_tokens_unless_they_are_not_all_it_makes(
    chat_processor: ChatProcessor, tokenizer: Path
) -> None:
    texts = TextProcessor.from_pretrained(str(tokenizer))
    for processor, row in ((chat_processor, {"messages": CHAT}), (texts, {"text": "some text"})):
        sample = mapped(row)
        (made,) = to_tokens([sample], processor)
        assert not isinstance(made, DataError)
        tokens = TokensProcessor().process(made)
        for name, values in processor.process(sample).items():
            assert np.array_equal(tokens[name], values)

    class Seeing(TextProcessor):
        def process(self, sample: Sample) -> Sample:
            return {**super().process(sample), "pixel_values": np.zeros(3)}

    (error,) = to_tokens([mapped({"text": "x"})], Seeing(texts.tokenizer))
    assert "a sample of tokens cannot hold pixel_values: convert without --tokenize" in str(error)


def test_a_sample_that_has_no_tokens_to_learn_takes_nothing_from_those_beside_it(chat_processor: ChatProcessor) -> None:
    unanswered = {"messages": json.dumps([{"role": "user", "content": "so?"}])}
    refused = {"messages": json.dumps([{"role": "user", "content": [{"type": "image"}]}])}
    samples = [mapped({"messages": CHAT}), unanswered, refused, mapped({"messages": CHAT})]
    first, second, third, last = to_tokens(samples, chat_processor)
    assert not isinstance(first, DataError)
    assert not isinstance(last, DataError)
    assert all(np.array_equal(last[name], first[name]) for name in ("input_ids", "loss_spans"))
    assert "no token would be learnt" in str(second)
    assert "a message holds image, which the chat processor does not read" in str(third)


SMALL = {"image": [image_bytes(color=n) for n in range(6)], "audio": [wav_bytes(value=n) for n in range(6)]}
FRAGMENTS = ["<image>", "<audio>", "<video>", "<imag", "e>", "<", "\n", "a", " ü "]


@examples(300)
@given(contents=st.lists(st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join), min_size=1, max_size=4))
def test_every_placeholder_is_replaced_by_the_next_medium(contents: list[str]) -> None:
    turns = [says(("user", "assistant")[number % 2], text) for number, text in enumerate([*contents, "the end", "."])]
    turns.append(says("assistant", "last"))
    counts = {kind: sum(text.count(f"<{kind}>") for text in contents) for kind in SMALL}
    row: Row = {"messages": turns, **{f"{kind}s": (SMALL[kind] * 4)[:count] for kind, count in counts.items()}}
    sample = mapped(row)
    texts, found = [], {"image": 0, "audio": 0}
    for turn in json.loads(sample["messages"]):
        content = turn["content"]
        parts: list[Row] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            if part["type"] != "text":
                offset, size = part["span"]
                assert sample["media"][offset : offset + size] == row[f"{part['type']}s"][found[part["type"]]]
                found[part["type"]] += 1
        texts.append("".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in parts))
    assert texts == [turn["content"] for turn in turns]
    assert found == counts


@examples(60)
@given(num_slots=st.integers(0, 4), num_images=st.integers(0, 4))
def test_another_number_of_media_than_of_slots_is_refused(num_slots: int, num_images: int) -> None:
    row: Row = {"messages": [says("user", "x<image>" * num_slots), CHAT[1]], "images": SMALL["image"][:num_images]}
    if num_slots == num_images:
        assert len(mapped(row)["media"]) == sum(map(len, row["images"]))
        return
    with pytest.raises(
        DataError, match=rf"{num_slots} slots for media of kind image .* and {num_images} images: .*images="
    ):
        mapped(row)
    assert stored(row, columns={"images": ""}) == row["messages"]


def test_media_come_before_the_text_of_a_question_that_names_no_slot(tmp_path: Path) -> None:
    image, sound = SMALL["image"][0], SMALL["audio"][0]
    rows: list[Row] = [
        {"question": "What?", "answer": "A cat.", "image": image, "audio": sound},
        {"question": "No <image> here", "answer": "So.", "image": image, "audio": None},
        {"question": "None?", "answer": "None.", "image": None, "audio": None},
    ]
    samples = round_trip(rows, tmp_path, options=SchemaOptions())
    first, second, third = (json.loads(sample["messages"])[0]["content"] for sample in samples)
    seen = {"type": "image", "mime": "image/png", "span": [0, len(image)], "width": 4, "height": 3}
    heard = {"type": "audio", "mime": "audio/wav", "samples": 8, "rate": 16000}
    assert [part["type"] for part in first] == ["audio", "image", "text"]
    assert first[0] == {**heard, "span": [0, len(sound)]}
    assert first[1] == {**seen, "span": [len(sound), len(image)]}
    assert samples[0]["media"] == sound + image
    assert second == [{"type": "text", "text": "No "}, seen, {"type": "text", "text": " here"}]
    assert third == "None?"


def test_an_image_with_a_label_is_kept_or_asked_about(tmp_path: Path) -> None:
    rows = [{"image": {"bytes": SMALL["image"][n], "path": None}, "label": label} for n, label in enumerate([3, "cat"])]
    samples = round_trip(rows, tmp_path / "columns", options=SchemaOptions())
    assert samples == [{"image": SMALL["image"][n], "label": label} for n, label in enumerate(["3", "cat"])]
    options = SchemaOptions(columns={"images": "image", "answer": "label"})
    sample = round_trip(rows, tmp_path / "asked", options=options)[1]
    part = {"type": "image", "mime": "image/png", "span": [0, len(SMALL["image"][1])], "width": 4, "height": 3}
    assert json.loads(sample["messages"]) == [says("user", [part]), says("assistant", "cat")]
    assert sample["media"] == SMALL["image"][1]
    with pytest.raises(DataError, match="2 images in column 'image', expected one"):
        mapped({"image": SMALL["image"][:2], "label": "x"})


def test_every_form_of_a_part_is_stored_with_its_span(tmp_path: Path) -> None:
    from base64 import b64encode

    image, sound = SMALL["image"][0], SMALL["audio"][0]
    (tmp_path / "a.png").write_bytes(image)
    (tmp_path / "a.mp4").write_bytes(CLIP)
    encoded = b64encode(image).decode()
    parts: list[Row] = [
        {"type": "text", "text": "<image> is text here"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}", "detail": "low"}, "text": None},
        {"type": "image_url", "image_url": "a.png"},
        {"type": "image", "image": encoded},
        {"type": "image", "url": "./a.png", "max_pixels": 99},
        {"type": "image", "base64": encoded},
        {"type": "image", "image": {"bytes": None, "path": "a.png"}},
        {"type": "input_audio", "input_audio": {"data": b64encode(sound).decode(), "format": "wav"}},
        {"type": "audio", "audio": sound},
        {"type": "video_url", "video_url": {"url": (tmp_path / "a.mp4").as_uri()}},
        {"type": "video", "video": "a.mp4", "fps": 2.0},
        {"type": "audio", "path": "a.mp4"},
        {"type": "image", "image": "a.png", "url": "https://x.org/a.png", "image_url": {"url": "a.png"}},
        {"type": "image", "base64": encoded, "path": "a.png"},
        {"type": "image", "image": {"bytes": None, "path": "a.png"}, "path": "/elsewhere/a.png"},
        {"type": "image", "image": "a.png", "url": "s3://bucket/b.png"},
    ]
    row = {"messages": [says("user", parts), CHAT[1]]}
    sample = round_trip([row], tmp_path / "out", options=SchemaOptions(), media_folder=str(tmp_path))[0]
    content = json.loads(sample["messages"])[0]["content"]
    assert content[0] == parts[0]
    media = [sample["media"][part["span"][0] : sum(part["span"])] for part in content[1:]]
    assert media == [image] * 6 + [sound] * 2 + [CLIP] * 3 + [image] * 4
    assert b"".join(media) == sample["media"]
    assert [part["mime"] for part in content[1:]] == ["image/png"] * 6 + ["audio/wav"] * 2 + ["video/mp4"] * 2 + [
        "audio/mp4"
    ] + ["image/png"] * 4
    assert set(content[1]) == {"type", "mime", "span", "width", "height"}
    assert (content[4]["max_pixels"], content[10]["said_fps"]) == (99, 2.0)  # fps is a fact about the video
    assert content[9].items() >= CLIP_FACTS.items() <= content[10].items()
    assert content[11].items() >= CLIP_SOUND_FACTS.items()


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (
            [{"type": "image"}],
            "a part of type 'image' has no source, and the row no column of images: .*--columns images=",
        ),
        ([{"type": "video", "video": ["a.png", "b.png"]}], r"a video is given as a list of 2 frames, .*: write the"),
        ([{"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}], "is on the web, .*: download it first"),
        (
            [{"type": "image", "image": "a.png", "url": "b.png"}],
            "has two references, image: 'a.png' and url: 'b.png', and one would be lost: keep one, or make each a part",
        ),
        ([{"type": "image", "image_url": {"url": "a.png"}, "path": "b.png"}], "has two references, image_url: "),
        ([{"type": "image", "image": SMALL["image"][0], "value": "b.png"}], "two references, image: of .* and value: "),
        ([{"type": "image", "image": "x/a.png", "path": "y/a.png"}], "two references, image: 'x/a.png' and path: 'y/"),
        ([{"type": "image", "image": "s3://b/a.png", "url": "s3://b/b.png"}], "two references, image: 's3://b/a.png'"),
        ([{"type": "image", "image": "a.png", "path": {"bytes": None, "path": "b.png"}}], "two references, image: 'a."),
        ([{"type": ["text"]}], r"content parts of type \['text'\] are not supported"),
        (["hi"], "content parts of type 'hi' are not supported: expected"),
    ],
)
def test_parts_that_lead_nowhere_are_refused(parts: list[Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        mapped({"messages": [says("user", parts), CHAT[1]]})


def test_media_that_two_places_of_a_row_hold_are_stored_once(tmp_path: Path) -> None:
    first, second = SMALL["image"][:2]
    (tmp_path / "a.png").write_bytes(first)
    (tmp_path / "b.png").write_bytes(second)
    part, text = {"type": "image", "image": "a.png"}, {"type": "text", "text": "q"}
    path = {"bytes": None, "path": "/elsewhere/a.png"}
    asked = says("user", "<image>q", images=["a.png"])
    rows: list[tuple[Row, bytes]] = [
        ({"messages": [says("user", [part, text], images=["a.png"]), CHAT[1]]}, first),
        ({"messages": [says("user", [part, text], image={"url": "a.png"}), CHAT[1]]}, first),
        ({"messages": [says("user", [part, text], images=[path]), CHAT[1]]}, first),
        ({"messages": [asked, CHAT[1]], "images": ["a.png"]}, first),
        (
            {"messages": [asked, CHAT[1], says("user", "q", image="b.png")], "images": ["a.png", "b.png"]},
            first + second,
        ),
        ({"messages": [asked, CHAT[1], says("user", "<image>")], "images": ["a.png"]}, first * 2),
        ({"conversation": [{"user": "q", "assistant": "a", "image": "a.png"}], "images": ["a.png"]}, first),
        ({"conversation": [{"user": "q", "assistant": "a", "image": "a.png"}], "images": ["b.png"]}, second + first),
    ]
    for row, media in rows:
        unread: set[str] = set()
        assert find_mapper([row], SchemaOptions())(row, str(tmp_path), unread)["media"] == media
        assert not unread


@pytest.mark.parametrize(
    ("others", "left", "unread"),
    [
        ({"image": False}, {"image": False}, {"image"}),
        ({"audio": {"id": "audio_abc"}}, {"audio": {"id": "audio_abc"}}, {"audio"}),
        ({"images": [1, 2]}, {"images": [1, 2]}, {"images"}),
        ({"images": [], "image": "", "video": {}, "audios": "[]"}, {}, set()),
        ({"note": [], "mood": ""}, {"note": [], "mood": ""}, set()),
        ({"note": [], "mood": "good"}, {"note": [], "mood": "good"}, {"mood"}),
    ],
)
def test_keys_of_messages_that_hold_no_media_are_counted_if_they_hold_something(
    others: Row, left: Row, unread: set[str]
) -> None:
    row = {"messages": [CHAT[0], says("assistant", "hello", **others)]}
    noted: set[str] = set()
    sample = find_mapper([row], SchemaOptions())(row, None, noted)
    assert json.loads(sample["messages"]) == [CHAT[0], {**CHAT[1], **left}]
    assert (noted, sample["media"]) == (unread, b"")


def test_bare_parts_take_the_media_of_the_row_in_order() -> None:
    parts = [{"type": "image", "text": None, "index": 0}, {"type": "text", "text": "and <image>"}]
    row = {"messages": [says("user", parts), CHAT[1]], "images": SMALL["image"][:2]}
    sample = mapped(row)
    first, second = SMALL["image"][:2]
    assert sample["media"] == first + second
    assert [part["type"] for part in json.loads(sample["messages"])[0]["content"]] == ["image", "text", "image"]


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "human"]), "content": st.text(max_size=20)},
        optional={"weight": st.sampled_from([0, 1]), "name": st.text(max_size=3)},
    ),
    min_size=1,
    max_size=5,
)


@examples(300)
@given(messages=MESSAGES, others=st.sampled_from([{}, {"id": 3}, {"system": "s"}, {"images": []}, {"tools": None}]))
def test_plain_chats_are_stored_as_the_others_are(messages: list[Row], others: Row) -> None:
    row = {"messages": messages} | others
    mapper = find_mapper([{"messages": [{"role": "assistant", "content": "hi"}]}], SchemaOptions())
    slow = replace(mapper, found={**mapper.found, "videos": ""})  # says nothing, and is not plain

    def outcome(mapper: Mapper) -> Sample | str:
        try:
            return mapper(row, None)
        except DataError as error:
            return str(error)

    assert outcome(mapper) == outcome(slow)


ORDINARY = [
    {"messages": [{"role": "user", "content": "Who wrote Emma?"}, {"role": "assistant", "content": "Jane Austen."}]},
    {"text": "Emma is a novel."},
]
CONTENT = st.sampled_from(
    ["", " ", "hi", "<image>", "a < b", "Who wrote Emma, and when? In 1815.", "\ud800", None, 5, ["a"]]
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "bot", None, 5, ["user"]]), "content": CONTENT},
    optional={"weight": st.sampled_from([0, 1]), "name": st.just("ada")},
)
ODD = st.sampled_from([None, "", [], "hi", 5, {"role": "user"}, [["role", "content"]]])
OTHERS = {"id": st.integers(), "system": CONTENT, "tools": ODD, "label": st.sampled_from([True, False, "good"])}


@examples(300)
@given(
    row=st.fixed_dictionaries({"messages": st.lists(MESSAGE, max_size=3) | ODD, "text": CONTENT}, optional=OTHERS),
    ordinary=st.sampled_from(ORDINARY),
    names=st.sets(st.sampled_from([*OTHERS])),
    system=st.sampled_from([None, "Be brief."]),
)
def test_the_reader_of_the_most_frequent_rows_agrees_with_the_general_reader(
    row: dict[str, Any], ordinary: dict[str, Any], names: set[str], system: str | None
) -> None:
    """names: columns of the first rows besides their own."""
    mapper = find_mapper([ordinary], SchemaOptions(system=system if "messages" in ordinary else None))
    mapper = replace(mapper, names=mapper.names | names)
    general = replace(mapper, synonyms={"text": ("text", "text")})
    assert general.read_simple is None
    row = {name: value for name, value in row.items() if name in ordinary or name in OTHERS}
    results = [or_error(reader, row, None) for reader in (mapper, general)]
    assert [str(result) for result in results[:1]] == [str(result) for result in results[1:]]
