"""Rows that look like others and say something else: what they say is read, refused or counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.cli.console_datasets import unread_lines
from lmms_stream.converters.convert import convert
from lmms_stream.converters.rows.mapper import find_mapper
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.errors import ConfigError, DataError
from PIL import Image

ASKED = {"role": "user", "content": "q"}
SAID = {"role": "assistant", "content": "a"}
CHAT = [ASKED, SAID]
_USUAL = SchemaOptions()


def stored(row: dict[str, Any]) -> Any:
    return json.loads(find_mapper([row], _USUAL)(row, None)["messages"])


def refusal(row: dict[str, Any], options: SchemaOptions = _USUAL) -> str:
    with pytest.raises((DataError, ConfigError)) as caught:
        find_mapper([row], options)(row, None)
    return str(caught.value)


@pytest.mark.parametrize("answer", ["a", [SAID], json.dumps([SAID])])
@pytest.mark.parametrize("prompt", [[ASKED], json.dumps([ASKED]), json.dumps([{"from": "human", "value": "q"}])])
def test_messages_as_json_text_are_messages_of_a_prompt_and_its_response(prompt: Any, answer: Any) -> None:
    assert stored({"prompt": prompt, "response": answer}) == CHAT


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ({"prompt": str([ASKED]), "response": "a"}, "column prompt holds lists of messages in Python's notation"),
        ({"prompt": "q", "chosen": str(CHAT), "rejected": str([ASKED])}, "ast.literal_eval, with --map"),
        ({"question": json.dumps([ASKED]), "answer": "a"}, "--columns response=answer prompt=question"),
        ({"instruction": "q", "output": json.dumps([SAID])}, "--columns prompt=instruction response=output"),
    ],
)
def test_messages_that_would_be_read_as_a_text_are_refused(row: dict[str, Any], remedy: str) -> None:
    assert remedy in refusal(row)


def test_the_remedy_for_messages_in_a_question_reads_them() -> None:
    row = {"question": json.dumps([ASKED]), "answer": "a"}
    options = SchemaOptions(columns={"prompt": "question", "response": "answer"})
    assert json.loads(find_mapper([row], options)(row, None)["messages"]) == CHAT


CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def test_tool_calls_as_json_text_are_calls() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": CALLS}
    assert stored({"messages": [ASKED, {**called, "tool_calls": json.dumps(CALLS)}]})[1] == called
    assert stored({"messages": [ASKED, {**SAID, "tool_calls": ""}]}) == CHAT
    assert "write a list of objects" in refusal({"messages": [ASKED, {**called, "tool_calls": ["f"]}]})


@pytest.mark.parametrize(
    ("name", "role"), [("User", "user"), ("Human", "user"), ("GPT", "assistant"), ("SYSTEM", "system")]
)
def test_the_case_of_a_known_speaker_does_not_matter(name: str, role: str) -> None:
    said, told = {"role": name, "content": "x"}, {"from": name, "value": "x"}
    assert stored({"messages": [*CHAT, said]})[2] == {"role": role, "content": "x"}
    assert stored({"conversations": [told, {"from": "gpt", "value": "a"}]})[0] == {"role": role, "content": "x"}


def test_what_a_column_of_zeros_asks_is_asked() -> None:
    row = {"instruction": "Is it even?", "input": 0, "output": "yes"}
    assert stored(row)[0]["content"] == "Is it even?\n\n0"


@pytest.mark.parametrize(
    "option",
    [
        {"system": "s"},
        {"learn": "last"},
        {"roles": {"x": "user"}},
        {"tags": {"role_tag": "r"}},
        {"max_image_pixels": 9},
    ],
)
@pytest.mark.parametrize("row", [{"text": "t"}, {"input_ids": [1, 2]}])
def test_options_that_rows_of_a_kind_do_not_hear_are_refused(row: dict[str, Any], option: dict[str, Any]) -> None:
    said = refusal(row, SchemaOptions(**option))
    assert said.startswith(f"--{next(iter(option)).replace('_', '-')} has no effect on rows of kind ")


@pytest.mark.parametrize(
    ("bounds", "is_pack"),
    [
        ({"seq_lengths": [2, 2]}, True), ({"seq_lengths": [4]}, False),
        ({"position_ids": [0, 1, 0, 1]}, True), ({"position_ids": [0, 1, 2, 3]}, False),
        ({"cu_seqlens": [0, 2, 4]}, True), ({"cu_seqlens": [0, 4]}, False),
        ({"segment_ids": "[1, 1, 2, 2]"}, True), ({"segment_ids": [1, 1, 1, 1]}, False),
        ({"seq_start_id": [0, 2]}, True), ({"seq_start_id": [0]}, False),
        ({"attention_mask": [1, 1, 2, 2]}, True), ({"attention_mask": [1, 1, 1, 1]}, False),
    ],
)  # fmt: skip
def test_packs_of_several_samples_are_no_sample(bounds: dict[str, Any], is_pack: bool) -> None:
    row = {"input_ids": [1, 2, 3, 4], **bounds}
    if is_pack:
        assert "which would be read as a single sample" in refusal(row)
    else:
        assert find_mapper([row], _USUAL)(row, None)["input_ids"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("usual", "late", "said"),
    [
        (
            {"input_ids": [1, 2], "position_ids": [0, 1]},
            {"input_ids": [1, 2], "position_ids": [0, 0]},
            "read as a single sample",
        ),
        ({"input_ids": [1, 2]}, {"input_ids": [1, 2], "cu_seqlens": [0, 1, 2]}, "read as a single sample"),
        (
            {"messages": CHAT, "chat_template_kwargs": {"tools": None}},
            {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}},
            "settings of the chat template",
        ),
    ],
)
def test_what_a_column_says_of_its_row_is_looked_for_in_every_row(
    usual: dict[str, Any], late: dict[str, Any], said: str
) -> None:
    mapper = find_mapper([usual], _USUAL)
    assert mapper(usual, None)
    with pytest.raises(DataError, match=said):
        mapper(late, None)
    for options in (SchemaOptions(kind=mapper.kind.name), SchemaOptions(keep=tuple(late.keys() - mapper.kind.columns))):
        assert find_mapper([usual, late], options)(late, None)


@pytest.mark.parametrize("more", [{"problem": "Or this?"}, {"correct": "A"}])
def test_choices_with_several_questions_or_answers_are_refused(more: dict[str, Any]) -> None:
    row = {**_CHOSEN, "A": "red", "B": "blue", "C": "green"}
    assert stored(row)[1]["content"] == "B. blue"
    assert "what the answer is chosen from" in refusal({**row, **more})


_CHOSEN: dict[str, Any] = {"question": "Which is it?", "answer": "B"}


@pytest.mark.parametrize(
    "choices",
    [
        {"option_a": "red", "option_b": "blue"}, {"optionA": "red", "optionB": "blue"}, {"A": "1", "B": "2", "C": "3"},
        {"Choice 1": "red", "Choice 2": "blue"}, {"opa": "red", "opb": "blue"}, {"answer_options": ["red", "blue"]},
        {"candidates": ["red", "blue"]},
    ],
)  # fmt: skip
@pytest.mark.parametrize("names", [("question", "answer"), ("prompt", "response"), ("instruction", "output")])
def test_an_answer_is_not_trained_on_without_what_it_is_chosen_from(
    choices: dict[str, Any], names: tuple[str, str]
) -> None:
    row = dict(zip(names, _CHOSEN.values(), strict=True))
    if names[0] == "question" and not {"Choice 1", "answer_options", "candidates"} & choices.keys():
        assert [each["content"] for each in stored({**row, **choices})] == [
            "\n".join(
                [
                    "Which is it?",
                    "",
                    *(f"{letter}. {text}" for letter, text in zip("ABC", choices.values(), strict=False)),
                ]
            ),
            f"B. {[*choices.values()][1]}",
        ]
    else:
        assert "what the answer is chosen from" in refusal({**row, **choices})
    asked = "Which is it? " + " ".join(each if isinstance(each, str) else " ".join(each) for each in choices.values())
    assert stored({**row, names[0]: asked, **choices})[0]["content"] == asked


def test_an_answer_that_repeats_its_context_does_not_ask_about_it() -> None:
    row = {"prompt": "q", "context": "a long story", "chosen": "as a long story says", "rejected": "b"}
    assert "column context holds what prompt is about" in refusal(row)


@pytest.mark.parametrize("answer", [{"gold_summary": {"a": "b"}}, {"entities": [{"start": 1}]}, {"correct_name": "b"}])
def test_texts_next_to_what_answers_them_are_no_documents(answer: dict[str, Any]) -> None:
    assert "may answer text, and text alone would be trained on" in refusal({"text": "q", **answer})


def test_options_that_some_rows_do_not_fit_are_offered_with_the_number_of_these_rows() -> None:
    rows = [{"problem": "q", "hint": f"a {each}", "answer": each} for each in ("a", "b", "", "c")]
    with pytest.raises(
        DataError, match=r"response=answer --on-error skip \(leaves out hint and 1 of the first 4 rows\)"
    ):
        find_mapper(rows, _USUAL)
    pairs = [{"text_code": f"s {each}", "summary": each} for each in ("a b", "c d", "", "e f")]
    with pytest.raises(DataError, match=r"--on-error skip \(leaves out 1 of the first 4 rows\)"):
        find_mapper(pairs, _USUAL)


def test_columns_of_one_letter_or_number_are_no_choices() -> None:
    for others in ({"a": "x", "b": "y", "c": "z"}, {"option_a": "x"}, {"A": "x", "B": "y"}, {"op": "x", "opt": "y"}):
        assert stored({**_CHOSEN, **others})[1]["content"] == "B"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "responses": ["x", "y"], "chosen": 0, "rejected": 1},
        {"question": "q", "answers": '["x", "y"]', "answer": "2"},
    ],
)
def test_the_number_of_an_answer_is_no_answer(row: dict[str, Any]) -> None:
    assert "holds numbers, which are those of texts in column" in refusal(row)
    others = {name: 41 if value in (0, "2") else value for name, value in row.items()}
    assert find_mapper([others], _USUAL)(others, None)


@pytest.mark.parametrize("name", ["code", "transcript", "lecture", "sql_context"])
def test_a_text_that_a_question_is_about_is_not_left_out(name: str) -> None:
    row = {"question": "What is it?", "answer": "a", name: "A longer text that the question is about."}
    assert f"column {name} holds what question is about" in refusal(row)


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ({"messages": CHAT, "rejected_response": "x"}, "write the two answers into columns chosen and rejected"),
        (
            {"messages": CHAT, "rejected_messages": [ASKED, {"role": "assistant", "content": "x"}]},
            "--columns chosen=messages rejected=rejected_messages",
        ),
        ({"query": "q", "response": "a", "rejected_response": "x"}, "prompt=query chosen=response rejected=rejected_"),
    ],
)
def test_worse_answers_next_to_answers_are_not_passed_over(row: dict[str, Any], remedy: str) -> None:
    assert remedy in refusal(row)
    others = {name: 0.5 if "rejected" in name else value for name, value in row.items()}
    assert find_mapper([others], _USUAL)(others, None)


def test_what_messages_hold_and_nothing_reads_is_counted(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "pages.tiff", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "one.tiff")
    texts = ["<img>a.png</img>q", "find <bbox>", "<img src='a.png'> <ref-object>", "q"]
    rows = [{"messages": [{**ASKED, "content": text}, {"role": "critic", "content": "c"}, SAID]} for text in texts]
    rows[2]["messages"][0]["image"], rows[3]["messages"][0]["image"] = "pages.tiff", "one.tiff"
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = convert(tmp_path / "a.jsonl", tmp_path / "out", num_workers=1)
    counts = {name.removeprefix("messages[]."): unread.num_rows for name, unread in report.unread.items()}
    assert counts == {"<img>": 1, "<bbox>": 1, "<ref-object>": 1, "<frames after the first>": 1, "role critic": 4}
    told = "\n".join(line for _, line in unread_lines(report.unread))
    assert "images of several frames or pages in 1 row" in told
    assert "--roles critic=assistant" in told


def test_empty_messages_and_repeated_questions_are_counted(tmp_path: Path) -> None:
    asked, long = "Who wrote Emma, and when?", "Who wrote Emma, and when? Jane Austen, in 1815."
    chats: list[list[Any]] = [["", "a"], [" \n", "a"], [None, "a"], [[], "a"], ["q", "", "q", "a"]]
    chats += [[asked, long], ["a", "a b"], ["q", "a"]]
    rows = [
        {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]}
        for texts in chats
    ]
    rows += [{"messages": [{**ASKED, "name": "n"}, {**SAID, "content": "", "learn": False}, ASKED, SAID]}]
    found: dict[str, int] = {}
    for number, row in enumerate(rows):
        noted: set[str] = set()
        find_mapper([row], _USUAL)(row, None, noted)
        found |= {f"{number} {name}": 1 for name in noted if name != "name"}
    assert sorted(found) == [*(f"{n} empty user" for n in range(4)), "4 empty assistant", "5 repeated question"]
    pairs = {"prompt": asked, "chosen": long, "rejected": f"{asked} Poe."}
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [pairs, {**pairs, "prompt": ""}])))
    report = convert(tmp_path / "a.jsonl", tmp_path / "out", num_workers=1)
    lines = [(heading, line.partition(", first")[0]) for heading, line in unread_lines(report.unread)]
    assert lines == [
        ("trained on", "answers that begin with the whole text of their question in 1 row"),
        ("trained on", "questions without text or media in 1 row"),
    ]
