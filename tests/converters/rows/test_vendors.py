"""Rows of vendors and data sets are read like the same rows in the usual form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.converters.rows.mapper import find_mapper
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.errors import DataError, EmptyRowError
from streaming import StreamingDataset

from ..media_files import image_bytes
from .test_layouts import printed

Row = dict[str, Any]
ASK, SAY = {"role": "user", "content": "Oslo?"}, {"role": "assistant", "content": "4 degrees"}
SPEC = {"name": "weather", "description": "now"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {**SPEC, "parameters": SCHEMA}}]
PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}


def stored(row: Row, **options: Any) -> Any:
    mapper = find_mapper([row], SchemaOptions(**options))
    return json.loads(mapper(row, None)["messages"])


def called(arguments: Any, **call: Any) -> list[Row]:
    function = {"name": "weather", "arguments": arguments}
    return [{"role": "assistant", "content": None, "tool_calls": [{**call, "type": "function", "function": function}]}]


CALLS: dict[str, tuple[Row, list[Row]]] = {
    "OpenAI's function_call": (
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
                {"role": "function", "name": "weather", "content": "4"},
                SAY,
            ],
            "functions": [{**SPEC, "parameters": SCHEMA}],
        },
        [*called("{}"), {"role": "tool", "name": "weather", "content": "4"}],
    ),
    "Anthropic": (
        {
            "messages": [
                ASK,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {"a": 1}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "4"}]},
                SAY,
            ],
            "tools": [{**SPEC, "input_schema": SCHEMA}],
        },
        [*called({"a": 1}, id="t"), {"role": "tool", "tool_call_id": "t", "content": "4"}],
    ),
    "Bedrock": (
        {
            "messages": [
                {"role": "user", "content": [{"text": "Oslo?"}]},
                {
                    "role": "assistant",
                    "content": [{"toolUse": {"toolUseId": "t", "name": "weather", "input": {"a": 1}}}],
                },
                {"role": "user", "content": [{"toolResult": {"toolUseId": "t", "content": [{"json": {"c": 4}}]}}]},
                {"role": "assistant", "content": [{"text": "4 degrees"}]},
            ],
            "tools": [{"toolSpec": {**SPEC, "inputSchema": {"json": SCHEMA}}}],
        },
        [*called({"a": 1}, id="t"), {"role": "tool", "tool_call_id": "t", "content": '{"c":4}'}],
    ),
    "Gemini": (
        {
            "contents": [
                {"parts": [{"text": "Oslo?"}]},
                {"role": "model", "parts": [{"functionCall": {"name": "weather", "args": {"a": 1}}}]},
                {"role": "user", "parts": [{"functionResponse": {"name": "weather", "response": {"c": 4}}}]},
                {"role": "model", "parts": [{"text": "4 degrees"}]},
            ],
            "tools": [{"functionDeclarations": [{**SPEC, "parameters": SCHEMA}]}],
        },
        [*called({"a": 1}), {"role": "tool", "name": "weather", "content": '{"c":4}'}],
    ),
    "OpenAI's Responses": (
        {
            "input": [ASK],
            "output": [
                {"type": "function_call", "call_id": "t", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "t", "output": "4"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4 degrees"}]},
            ],
            "tools": TOOLS,
        },
        [*called("{}", id="t"), {"role": "tool", "tool_call_id": "t", "content": "4"}],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_and_their_results_are_stored_like_openais(name: str) -> None:
    row, middle = CALLS[name]
    read = stored(row)
    assert read["tools"] == TOOLS
    *before, answer = read["messages"]
    assert before == [ASK, *middle]
    assert answer["content"] in ("4 degrees", [{"type": "text", "text": "4 degrees"}])


def test_calls_of_one_answer_stay_together_with_its_text_and_thoughts() -> None:
    parts = [
        {"type": "text", "text": "Both."},
        *({"type": "tool_use", "id": name, "name": name, "input": {}} for name in "ab"),
    ]
    results = [{"type": "tool_result", "tool_use_id": name, "content": []} for name in "ab"]
    after = {"role": "user", "content": [*results, {"type": "text", "text": "and now?"}]}
    messages = [ASK, {"role": "assistant", "content": parts}, after, SAY]
    row = {"messages": messages, "system": [{"type": "text", "text": "Be kind."}]}
    system, _, answer, *after = stored(row)
    assert system == {"role": "system", "content": "Be kind."}
    assert answer["content"] == "Both."
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["a", "b"]
    assert [turn["role"] for turn in after] == ["tool", "tool", "user", "assistant"]
    calls = [{"type": "function_call", "call_id": name, "name": name, "arguments": "{}"} for name in "ab"]
    items = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "look"}]}, *calls]
    _, answer = stored({"input": "Oslo?", "output": items})
    assert answer["reasoning_content"] == "look"
    assert len(answer["tool_calls"]) == 2


@pytest.mark.parametrize(
    "row",
    [
        {"input": {"messages": [ASK | {"content": "q"}]}, "preferred_output": [SAY | {"content": "good"}],
         "non_preferred_output": [SAY | {"content": "bad"}]},
        {"instruction": "q", "completions": [
            {"response": "bad", "overall_score": 1}, {"response": "so", "overall_score": 2.5},
            {"response": "good", "overall_score": 7.5}]},
        {"prompt": "q", "answers": [{"answer": "good", "rank": 1.0}, {"answer": "bad", "rank": 7.0}]},
        {"prompt": "q", "responses": ["bad", "good"], "scores": [-1, 0.5]},
        {"prompt": "q", "response_a": "good", "response_b": "bad", "preference": "A"},
        {"prompt": "q", "candidate_a": "good", "candidate_b": "bad", "winner": "a"},
        {"question": "q", "answer_1": "bad", "answer_2": "good", "better": "answer_2"},
        {"prompt": "q", "response_0": "bad", "response_1": "good", "better_response_id": 1},
        {"context": [ASK | {"content": "q"}], "response1": "bad", "response2": "good", "overall_preference": 2},
        {"question": "q", "response_j": "good", "response_k": "bad"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "chosen_gpt", "value": "good"},
                           {"from": "rejected_gpt", "value": "bad"}]},
        {"history": "q", "human_ref_A": "bad", "human_ref_B": "good", "labels": 0},
        {"winner": "model_b", "conversation_a": [ASK | {"content": "q"}, SAY | {"content": "bad"}],
         "conversation_b": [ASK | {"content": "q"}, SAY | {"content": "good"}]},
    ],
    ids=lambda row: " ".join(row),
)  # fmt: skip
def test_rankings_become_pairs_of_the_best_and_the_worst(row: Row) -> None:
    mapper = find_mapper([row], SchemaOptions())
    assert mapper.kind.name == "preference"
    read = json.loads(mapper(row, None)["messages"])
    assert {name: turns[0]["content"] for name, turns in read.items()} == PAIR


def test_equal_answers_are_no_pair_and_counted_as_rows_that_do_not_fit() -> None:
    rows = [{"prompt": "q", "responses": ["a", "b"], "scores": [2, number]} for number in (1, 2)]
    mapper = find_mapper(rows, SchemaOptions())
    assert "chosen and rejected are the best and the worst answer by scores" in mapper.description
    with pytest.raises(DataError, match="the answers are equally good, so there is none to prefer: leave the row out"):
        mapper(rows[1], None)
    tie = {"prompt": "q", "response_a": "a", "response_b": "b", "preference": "tie"}
    with pytest.raises(DataError, match="column preference is 'tie', so there is no answer to prefer"):
        find_mapper([tie], SchemaOptions())
    with pytest.raises(DataError, match="one of the answers to compare is missing: complete or remove the row"):
        find_mapper([{**tie, "preference": "a", "response_b": None}], SchemaOptions())


def test_a_conversation_may_name_its_speakers_by_role_and_by_from() -> None:
    asked, answer = {"from": "human", "value": "q"}, {"role": "assistant", "content": "a"}
    for chat, kind in (([asked, answer], "sharegpt"), ([answer, asked, answer], "messages")):
        mapper = find_mapper([{"messages": chat}], SchemaOptions())
        assert mapper.kind.name == kind
        turns = json.loads(mapper({"messages": chat}, None)["messages"])
        assert turns[-2:] == [{"role": "user", "content": "q"}, answer]


def test_members_of_objects_that_are_left_out_are_listed_in_the_order_of_the_rows() -> None:
    row = {number: {"question": "q", "answer": "a", "note": "n"} for number in "ba"}
    options = SchemaOptions(columns={"prompt": "b.question", "response": "a.answer"})
    assert list(find_mapper([row], options).left) == ["b.answer", "b.note", "a.question", "a.note"]


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"context": "c", "question": "q", "answers": {"text": ["a", "b"], "answer_start": [1, 2]}}, ["c\n\nq", "a"]),
        ({"definition": "d", "inputs": "i", "targets": "a"}, ["d\n\ni", "a"]),
        ({"question": "q", "choices": ["a", "b"], "answer": 1}, ["q\n\nA. a\nB. b", "B. b"]),
        ({"question": "q", "choices": ["a", "b"], "answer": "A"}, ["q\n\nA. a\nB. b", "A. a"]),
        ({"question": "q", "options": ["a", "b"], "answer": "b"}, ["q\n\nA. a\nB. b", "B. b"]),
        (
            {"question": "q", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"},
            ["q\n\n1. a\n2. b", "2. b"],
        ),
        ({"ctx": "q", "endings": ["a", "b"], "label": "0"}, ["q\n\nA. a\nB. b", "A. a"]),
        ({"question": "q", "options": {"A": "a", "B": "b"}, "correct_answer": "B"}, ["q\n\nA. a\nB. b", "B. b"]),
        ({"question": "q", "options": [{"A": "a"}, {"B": "b"}], "answer": "A"}, ["q\n\nA. a\nB. b", "A. a"]),
        ({"question": "is it a or b?", "options": ["a", "b"], "answer": "b"}, ["is it a or b?", "b"]),
        ({"video": None, "QA": [{"i": "i", "q": "q", "a": "a"}, {"q": "r", "a": "b"}]}, ["i\nq", "a", "r", "b"]),
        ({"context": "c", "question": "q", "ans0": "a", "ans1": "b", "label": 0}, ["c\n\nq\n\n0. a\n1. b", "0. a"]),
        ({"passages": [{"text": "c"}], "input": "q", "output": [{"answer": "a"}]}, ["c\n\nq", "a"]),
        ({"passage": "c", "question": "q", "answer": False}, ["c\n\nq", "no"]),
        ({"passage": "c", "question": "q", "answer": True}, ["c\n\nq", "yes"]),
        (
            {"question": "q", "choices": ["a", "b"], "answer": 1, "hint": "h", "solution": "because of it"},
            ["h\nq\n\nA. a\nB. b", "B. b"],
        ),
        ({"question": "q", "reasoning": "t", "answer": "a"}, ["q", "a"]),
        ({"question": "q", "thinking_trajectories": ["t", "u"], "attempt": "a", "solution": "s"}, ["q", "a"]),
    ],
)
def test_rows_of_known_data_sets_are_read(row: Row, turns: list[str]) -> None:
    read = stored(row)
    assert [turn["content"] for turn in read] == turns
    assert read[1].get("reasoning_content") == ("t" if {"reasoning", "thinking_trajectories"} & row.keys() else None)


def test_numbered_images_take_their_places() -> None:
    red, blue = image_bytes(color=1), image_bytes(color=9)
    text = "How do <image_01> and <image_00> differ?"
    row: Row = {"image": {"<image_00>": red, "<image_01>": blue}, "conversations": [{**ASK, "content": text}, SAY]}
    mapper = find_mapper([row], SchemaOptions())
    assert mapper(row, None)["media"] == blue + red
    row["image"]["<image_02>"] = red
    with pytest.raises(
        DataError, match=r"the messages have the places <image_01>, <image_00>, and image <image_00>, .*2>"
    ):
        find_mapper([row], SchemaOptions())


@pytest.mark.parametrize(
    "row",
    [
        {"images": [image_bytes(), None, None, None], "texts": [None, "a", None, "b"], "metadata": "[]"},
        {"text_list": ["a", "b"], "image_info": [{"image_name": image_bytes(), "matched_text_index": 0}]},
    ],
    ids=["OBELICS", "MMC4"],
)
def test_documents_of_texts_and_images_are_an_answer_with_images_at_their_places(row: Row) -> None:
    (answer,) = stored(row)
    assert answer["role"] == "assistant"
    assert [part.get("text", part["type"]) for part in answer["content"]] == ["image", "a b"]


def test_a_squad_question_without_an_answer_is_an_empty_row() -> None:
    row: Row = {"context": "c", "question": "q", "answers": {"text": ["a"], "answer_start": [1]}}
    mapper = find_mapper([row], SchemaOptions())
    with pytest.raises(EmptyRowError, match="answers has no text, so nothing would be learnt"):
        mapper(row | {"answers": {"text": [], "answer_start": []}}, None)


def test_tools_and_results_of_hermes_are_written_once() -> None:
    talk = [
        {"from": "system", "value": f"<tools>{json.dumps(TOOLS)}</tools>"},
        {"from": "human", "value": "Oslo?"},
        {"from": "gpt", "value": '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'},
        {"from": "tool", "value": '<tool_response>\n{"c": 4}\n</tool_response>'},
        {"from": "gpt", "value": "4 degrees"},
    ]
    row = {"conversations": talk, "tools": json.dumps(TOOLS)}
    mapper = find_mapper([row], SchemaOptions())
    assert mapper.description.endswith("tools are in the system prompt, too, and are read from it")
    read = json.loads(mapper(row, None)["messages"])
    assert [turn["content"] for turn in read] == [*(turn["value"] for turn in talk[:3]), '{"c": 4}', "4 degrees"]


@pytest.mark.parametrize("text", ['[{"city": "Seoul"}]', "[]", '[{"role": "user", "content": "a"}]', "[1, 2]", '["a"]'])
def test_an_answer_that_is_json_text_stays_text(text: str) -> None:
    for row in ({"prompt": "q", "response": text}, {"question": "q", "answer": text}, PAIR | {"chosen": text},
                {"prompt": "q", "completion": text, "label": True}):  # fmt: skip
        read = stored(row)
        turns = read["chosen"] if "chosen" in read else read["answer"] if "answer" in read else read[1:]
        assert turns == [{"role": "assistant", "content": text}]


def test_an_answer_of_messages_in_json_text_is_messages() -> None:
    for answer in ([SAY], [{"from": "gpt", "value": "4 degrees"}]):
        assert stored({"prompt": "Oslo?", "response": json.dumps(answer)}) == [ASK, SAY]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": [{"toolUse": "weather"}]},
        {"role": "assistant", "content": [{"reasoningContent": {}}]},
        {"role": "user", "parts": [{"inlineData": 3}]},
    ],
)
def test_parts_in_another_form_than_their_vendors_are_an_error_of_the_row(message: Row) -> None:
    with pytest.raises(DataError, match=r"a message has parts of another form, .*: correct the row"):
        stored({"messages": [ASK, message, SAY]}, kind="messages")


def test_columns_that_the_user_names_are_not_read_as_a_form() -> None:
    row = {"prompt": "q", "responses": ["a", "b"], "scores": [1, 0], "best": "a"}
    assert stored(row, columns={"response": "best"})[1]["content"] == "a"
    assert find_mapper([row], SchemaOptions(keep=("scores",))).kept == {"scores": "json"}


PAGE = Path(__file__).parents[3] / "docs" / "rows.md"
LINES = re.findall(r"^\| (.+?) \| `([{\[].*)` \| (.*?) ?\|$", PAGE.read_text(), re.MULTILINE)


def words(value: Any) -> Iterator[str]:
    """The question and the answers of an example."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from words(each)
    elif value in ("q", "a", "b"):
        yield value


@pytest.mark.parametrize(("data", "row", "options"), LINES, ids=[line[0] for line in LINES])
def test_each_line_of_the_page_reads_its_row(data: str, row: str, options: str, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(f"{row}\n" * 2)
    if options.startswith("refused"):
        with pytest.raises(DataError, match=r"which lmms_stream\.rl reads for reinforcement learning"):
            convert([source], str(tmp_path / "out"), num_workers=1)
        return
    (given,) = printed(f"pass {options.strip('`')}") if options else [SchemaOptions()]
    report = convert([source], str(tmp_path / "out"), num_workers=1, columns=given.columns)
    assert report.num_rows == 2
    sample = StreamingDataset(local=str(tmp_path / "out"), batch_size=1)[0]
    text = " ".join(value for value in sample.values() if isinstance(value, str)).replace(r"\n", " ")
    assert all(re.search(rf"\b{word}\b", text) for word in words(json.loads(row)))


def test_the_page_has_all_forms() -> None:
    assert len(LINES) > 25
