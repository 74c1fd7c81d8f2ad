"""Rows of each kind that LLaMA-Factory's data/README.md describes, by entries of dataset_info.json as it has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from lmms_stream import PackedStreamingDataset
from lmms_stream.converters.convert import Progress, convert
from lmms_stream.converters.rows.kinds import KINDS
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.doors.llama_factory import dataset_info
from lmms_stream.errors import DataError, LmmsStreamError

from ..converters.media_files import image_bytes
from ..converters.sources.source_rows import write

Entry = dict[str, Any]
OPENAI_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
ODD_TAGS = {
    "role_tag": "who", "content_tag": "says", "user_tag": "H", "assistant_tag": "B", "observation_tag": "result",
    "function_tag": "call", "system_tag": "sys",
}  # fmt: skip
CALL = {"name": "add", "arguments": {"x": 1}}
TOOL = {"name": "add", "description": "adds", "parameters": {}}


def user(text: Any) -> Entry:
    return {"role": "user", "content": text}


def assistant(text: Any, **more: Any) -> Entry:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "be short"}
CALLS = [{"type": "function", "function": CALL}]

# Entry, row, and what its row becomes, which kinds of rows read.
CASES: dict[str, tuple[Entry, Entry, Entry]] = {
    "alpaca by default": (
        {},
        {"instruction": "add", "input": "1 2", "output": "3", "system": "not named", "history": [["a", "b"]]},
        {"messages": [user("add\n1 2"), assistant("3")]},
    ),
    "alpaca with a system prompt and a history": (
        {"columns": {"prompt": "q", "response": "a", "system": "s", "history": "h"}},
        {"q": "add", "input": "not named, so not read", "a": "3", "s": "be short", "h": [["one", "1"], ["two", "2"]]},
        {"messages": [SYSTEM, user("one"), assistant("1"), user("two"), assistant("2"), user("add"), assistant("3")]},
    ),
    "alpaca of a query alone": (
        {"columns": {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}},
        {"instruction": "", "input": "why", "output": "so", "system": None},
        {"messages": [user("why"), assistant("so")]},
    ),
    "documents": ({"columns": {"prompt": "text"}}, {"text": "a document", "id": 3}, {"text": "a document"}),
    "sharegpt by default": (
        {"formatting": "sharegpt"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"messages": [user("q"), assistant("a")]},
    ),
    "sharegpt with a system column that its first message overrides": (
        {"formatting": "sharegpt", "columns": {"messages": "conversations", "system": "prompt"}},
        {
            "conversations": [
                {"from": "system", "value": "be short"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"},
            ],
            "prompt": "be long",
        },
        {"messages": [SYSTEM, user("q"), assistant("a")]},
    ),
    "sharegpt with tags and tools": (
        {"formatting": "sharegpt", "columns": {"messages": "turns", "tools": "functions"}, "tags": ODD_TAGS},
        {
            "turns": [
                {"who": "sys", "says": "be short"}, {"who": "H", "says": "1+1"},
                {"who": "call", "says": json.dumps(CALL)}, {"who": "result", "says": "2"}, {"who": "B", "says": "two"},
            ],
            "functions": json.dumps([TOOL]),
        },
        {
            "messages": [
                SYSTEM, user("1+1"), assistant(None, tool_calls=CALLS), {"role": "tool", "content": "2"},
                assistant("two"),
            ],
            "tools": json.dumps([TOOL]),
        },
    ),
    "openai, two results of one turn": (
        {"formatting": "openai", "columns": {"messages": "messages", "tools": "tools"}},
        {
            "messages": [
                SYSTEM, user("1+1"), assistant("", tool_calls=CALLS), {"role": "tool", "content": "2"},
                {"role": "tool", "content": "3"}, assistant("two"),
            ],
            "tools": [TOOL],
        },
        {
            "messages": [
                SYSTEM, user("1+1"), assistant("", tool_calls=CALLS), {"role": "tool", "content": "2"},
                {"role": "tool", "content": "3"}, assistant("two"),
            ],
            "tools": [TOOL],
        },
    ),
    "multimodal": (
        {"formatting": "sharegpt", "columns": {"messages": "messages", "images": "pictures"}, "tags": OPENAI_TAGS},
        {"messages": [user("<image>what?"), assistant("red")], "pictures": ["red.png"]},
        {"messages": [user("<image>what?"), assistant("red")], "images": ["red.png"]},
    ),
    "alpaca ranking": (
        {"ranking": True, "columns": {"prompt": "instruction", "query": "input", "chosen": "good", "rejected": "bad"}},
        {"instruction": "add", "input": "1 2", "good": "3", "bad": "4"},
        {"prompt": [user("add\n1 2")], "chosen": [assistant("3")], "rejected": [assistant("4")]},
    ),
    "sharegpt ranking": (
        {
            "formatting": "sharegpt", "ranking": True,
            "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected", "system": "system"},
        },
        {
            "conversations": [
                {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"},
            ],
            "chosen": {"from": "gpt", "value": "good"}, "rejected": {"from": "gpt", "value": "bad"},
            "system": "be short",
        },
        {
            "prompt": [SYSTEM, user("a"), assistant("b"), user("c")],
            "chosen": [assistant("good")], "rejected": [assistant("bad")],
        },
    ),
    "alpaca kto": (
        {"columns": {"prompt": "instruction", "query": "input", "response": "output", "kto_tag": "kto_tag"}},
        {"instruction": "add", "input": "1 2", "output": "4", "kto_tag": False},
        {"prompt": [user("add\n1 2")], "completion": [assistant("4")], "label": False},
    ),
    "openai kto": (
        {"formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"}, "tags": OPENAI_TAGS},
        {"messages": [user("q"), assistant("a"), user("r"), assistant("b")], "label": True},
        {"prompt": [user("q"), assistant("a"), user("r")], "completion": [assistant("b")], "label": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_kind_of_row_is_read_as_llama_factory_reads_it(case: str) -> None:
    entry, row, wanted = CASES[case]
    assert dataset_info(entry, where="").align(row) == wanted


def described(folder: Path, name: str, entry: Entry, rows: list[Entry]) -> str:
    """A folder of a file of rows and dataset_info.json, and the spec of its entry."""
    write(folder / "rows.json", orjson.dumps(rows))
    info = {"other": {"ms_hub_url": "a/b"}, name: {"file_name": "rows.json", **entry}}
    return f"{write(folder / 'dataset_info.json', orjson.dumps(info))}#{name}"


@pytest.mark.parametrize("case", CASES)
def test_rows_are_stored_as_rows_of_the_kind_that_says_the_same(case: str, tmp_path: Path) -> None:
    """Of the aligned rows as if they had been given so, with the default columns."""
    entry, row, wanted = CASES[case]
    kind = dataset_info(entry, where="").kind
    if kind not in KINDS:
        pytest.skip(f"rows of kind {kind} are not stored yet")
    write(tmp_path / "red.png", image_bytes())
    spec = described(tmp_path, "mine", entry, [row])
    convert([spec], str(tmp_path / "out"), num_workers=1)
    write(tmp_path / "plain.json", orjson.dumps([wanted]))
    convert([tmp_path / "plain.json"], str(tmp_path / "plain"), num_workers=1, schema=SchemaOptions(kind=kind))
    found, plain = (PackedStreamingDataset(tmp_path / name)[0] for name in ("out", "plain"))
    assert found == plain


CHAT: Entry = {"formatting": "sharegpt", "columns": {"messages": "m"}, "tags": ODD_TAGS}
RANKED = {**CHAT, "ranking": True, "columns": {"messages": "m", "chosen": "c", "rejected": "r"}}


def said(*texts: str) -> list[Entry]:
    return [{"who": text, "says": "x"} for text in texts]


@pytest.mark.parametrize(
    ("entry", "row", "message"),
    [
        (CHAT, {"m": said("B", "H")}, "turn 1 of 2 is of assistant_tag, and user_tag or observation_tag is due there"),
        (CHAT, {"m": said("H", "H")}, "turn 2 of 2 is of user_tag, and assistant_tag or function_tag is due there"),
        (CHAT, {"m": said("H", "human")}, "turn 2 of 2 is of nobody whom a tag names, .*correct the row or its tags"),
        (CHAT, {"m": said("H", "B", "H")}, "the conversation has 3 turns and is to end with an answer: correct"),
        (CHAT, {"m": said("H", "call", "result", "result")}, "turn 4 of 4 is of observation_tag"),
        (CHAT, {"m": said("sys")}, "the conversation has 0 turns and is to end with an answer"),
        (CHAT, {"m": []}, r"expected a list of messages in column 'm', found '\[\]'"),
        (CHAT, {"m": [{"from": "H"}]}, "a message must be an object with 'who'"),
        (CHAT, {"m": [*said("H"), {"who": "call", "says": "no JSON"}]}, "column 'says' holds text that is not JSON"),
        (RANKED, {"m": said("H", "B")}, "the conversation has 2 turns and is to end with a question, which chosen and"),
        (RANKED, {"m": said("H"), "c": said("H")[0]}, "chosen is from 'H', who gives no answers: correct the row"),
        (RANKED, {"m": said("H"), "c": "text"}, "a message must be an object with 'who', found 'text'"),
        ({}, {"instruction": "a", "output": None}, r"no text in column 'output' \(response\): complete or"),
        ({}, {"instruction": 3, "output": "x"}, r"column 'instruction' \(prompt\) holds '3': expected text"),
        (
            {"columns": {"prompt": "p", "response": "r", "kto_tag": "t"}},
            {"p": "a", "r": "b", "t": "yes"},
            r"column 't' \(kto_tag\) is 'yes': expected true or false",
        ),
        (
            {"columns": {"prompt": "p", "response": "r", "history": "h"}},
            {"p": "a", "r": "b", "h": [["a"]]},
            "history must be a list of pairs of texts",
        ),
    ],
)  # fmt: skip
def test_rows_that_llama_factory_passes_over_are_errors(entry: Entry, row: Entry, message: str) -> None:
    with pytest.raises(DataError, match=message):
        dataset_info(entry, where="").align(row)


def test_what_is_left_out_is_said_and_columns_that_are_not_there_are_named(tmp_path: Path) -> None:
    entry, rows = {"columns": {"prompt": "q", "response": "a"}}, [{"q": "x", "a": "y", "id": 7}]
    told: list[str] = []
    convert([described(tmp_path, "mine", entry, rows)], str(tmp_path / "out"), progress=Progress(say=told.append))
    assert told == [
        f"{tmp_path}/rows.json: messages, as LLaMA-Factory describes them (alpaca); reads q as prompt, a as "
        "response; leaves out id"
    ]
    spec = described(tmp_path, "mine", {"columns": {"prompt": "q", "response": "b"}}, rows)
    with pytest.raises(LmmsStreamError, match=r"no column b \(response\), found q, a, id: correct columns of its"):
        convert([spec], str(tmp_path / "more"), num_workers=1)


def test_columns_are_kept_beside_what_the_entry_describes(tmp_path: Path) -> None:
    spec = described(tmp_path, "mine", {}, [{"instruction": "x", "input": "", "output": "y", "id": 7}])
    convert([spec], str(tmp_path / "out"), num_workers=1, schema=SchemaOptions(keep=("id",)))
    assert PackedStreamingDataset(tmp_path / "out")[0]["id"] == 7


def test_rows_out_of_turn_are_left_out_and_counted_where_that_is_asked(tmp_path: Path) -> None:
    rows = [{"m": said("H", "B")}, {"m": said("B")}, {"m": said("H", "B", "H", "B")}]
    report = convert([described(tmp_path, "mine", CHAT, rows)], str(tmp_path / "out"), num_workers=1, on_error="skip")
    assert (report.num_rows, report.num_rejected) == (2, 1)


# Rows and YAML files of LLaMA-Factory v1: parts hold their text, path or call in `value`.


def part(kind: str, value: str) -> Entry:
    return {"type": kind, "value": value}


def v1(role: str, *parts: Entry, **more: Any) -> Entry:
    return {"role": role, "content": list(parts), **more}


TEXT = [{"type": "text", "text": "a"}]
ASKED = v1("user", part("text", "q"), loss_weight=0.0)
THINKS = v1("assistant", part("reasoning", "hm"), part("tool_call", json.dumps(CALL)), part("reasoning", ", so"))
CALLED = {"role": "assistant", "content": None, "reasoning_content": "hm, so", "tool_calls": CALLS}
V1_ROWS: dict[str, tuple[Entry, Any]] = {
    "messages of texts, one of which is not trained on": (
        {"messages": [ASKED, v1("assistant", part("text", "no"), loss_weight=0.0), ASKED,
                      v1("assistant", part("text", "a"), loss_weight=1.0)]},
        [user([{"type": "text", "text": "q"}]), assistant([{"type": "text", "text": "no"}], learn=False),
         user([{"type": "text", "text": "q"}]), assistant(TEXT)],
    ),
    "reasoning, a call, its result, and tools as JSON text": (
        {"messages": [ASKED, THINKS, v1("tool", part("text", "2")), v1("assistant", part("text", "a"))],
         "tools": json.dumps([TOOL])},
        {"messages": [user([{"type": "text", "text": "q"}]), CALLED,
                      {"role": "tool", "content": [{"type": "text", "text": "2"}]}, assistant(TEXT)],
         "tools": [TOOL]},
    ),
    "preferences": (
        {"chosen_messages": [ASKED, v1("assistant", part("text", "a"), loss_weight=1.0)],
         "rejected_messages": [ASKED, v1("assistant", part("tool_call", json.dumps(CALL)), loss_weight=1.0)]},
        {"prompt": [user([{"type": "text", "text": "q"}])], "chosen": [assistant(TEXT)],
         "rejected": [assistant(None, tool_calls=CALLS)]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", V1_ROWS)
def test_rows_of_v1_are_stored_as_openais(case: str, tmp_path: Path) -> None:
    row, wanted = V1_ROWS[case]
    convert([write(tmp_path / "rows.json", orjson.dumps([row]))], str(tmp_path / "out"), num_workers=1)
    assert json.loads(PackedStreamingDataset(tmp_path / "out")[0]["messages"]) == wanted


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (v1("user", part("tool_call", json.dumps(CALL))), "a part of type 'tool_call' must hold text of the assistant"),
        (v1("assistant", part("tool_call", json.dumps(CALL)), tool_calls=CALLS), "in a message without tool_calls"),
        (v1("assistant", part("tool_call", "no JSON")), "of type 'tool_call'.* holds text that is not JSON"),
        (v1("assistant", part("tool_call", '{"arguments": {}}')), "a function call must be an object with a name"),
        (v1("assistant", part("text", "a"), loss_weight=0.5), "loss_weight 0.5, expected 0, 1"),
    ],
)  # fmt: skip
def test_messages_of_v1_that_cannot_be_trained_on_are_named(message: Entry, error: str, tmp_path: Path) -> None:
    row = {"messages": [ASKED, message, ASKED, v1("assistant", part("text", "a"))]}
    source = write(tmp_path / "rows.json", orjson.dumps([row]))
    with pytest.raises(DataError, match=error):
        convert([source], str(tmp_path / "out"), num_workers=1)


def test_the_datasets_of_a_v1_yaml_file_are_read_by_their_converters(tmp_path: Path) -> None:
    """Paths of data and media start above the file's folder, as in LLaMA-Factory's repository."""
    write(tmp_path / "data" / "red.png", image_bytes())
    shown = part("image_url", "data/red.png")
    sources: dict[str, tuple[Entry, list[Entry]]] = {
        "shown": ({}, [{"messages": [v1("user", shown, part("text", "q")), v1("assistant", part("text", "a"))]}]),
        "asked": (
            {"converter": "alpaca", "size": 1},
            [{"instruction": "q", "input": "!", "output": "a", "system": "s", "history": [["not", "read"]]}] * 2,
        ),
        "turns": (
            {"converter": "sharegpt", "weight": 1, "streaming": False},
            [{"conversations": [
                {"from": "human", "value": "<image>q"}, {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "2"}, {"from": "gpt", "value": "a"},
            ], "images": ["data/red.png"], "tools": json.dumps([TOOL])}],
        ),
        "pairs": (
            {"converter": "pair", "split": "train"},
            [{"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")], "prompt": "an id"}],
        ),
    }  # fmt: skip
    for name, (_, rows) in sources.items():
        write(tmp_path / "data" / f"{name}.json", orjson.dumps(rows))
    entries = {name: {"path": f"data/{name}.json", "source": "local", **entry} for name, (entry, _) in sources.items()}
    yaml = write(tmp_path / "data" / "v1.yaml", orjson.dumps(entries))
    stored = {}
    for name in sources:
        convert([f"{yaml}#{name}"], str(tmp_path / name), num_workers=1)
        stored[name] = [json.loads(sample["messages"]) for sample in PackedStreamingDataset(tmp_path / name)]
    assert stored["asked"] == [[{"role": "system", "content": "s"}, user("q!"), assistant("a")]]
    assert stored["pairs"] == [{"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]}]
    (turns,), (chat,) = stored["turns"], stored["shown"]
    kinds = [[each["type"] for each in messages[0]["content"]] for messages in (turns["messages"], chat)]
    assert kinds == [["image", "text"], ["image", "text"]]
    assert turns["messages"][1:] == [
        assistant(None, tool_calls=CALLS), {"role": "tool", "content": "2"}, assistant("a")
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"pairs\.json gives samples of preference and .*shown\.json of messages: conv"):
        convert([yaml], str(tmp_path / "all"), num_workers=1)
