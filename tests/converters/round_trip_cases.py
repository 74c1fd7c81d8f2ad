"""Rows as datasets of texts have them, and beside each what must come back: written down, not computed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]

LONG = "Ein langer Satz über Füße, 日本語 und 🦊; " * 2000
ODD = 'quotes " and \' and , and \\ and\ttabs\r\n\n  é 👩‍👧‍👦 العربية \u2028 </s> {"no": [json]} <image'
ON_A_LINE = " \t" + ODD.replace("\r\n\n", " ") + " "
JSON, TABLES, CSV, TAR, TEXTS, LINES, IMAGES = "json", "tables", "csv", "tar", "texts", "lines", "images"


def says(role: str, content: Any, **others: Any) -> Row:
    return {"role": role, "content": content, **others}


def text(text: str) -> Row:
    return {"type": "text", "text": text}


@dataclass(frozen=True, kw_only=True)
class Case:
    """carried_by: kinds of sources that can hold the rows. wanted_of_texts: of sources whose values are all text."""

    name: str
    rows: list[Row]
    wanted: list[Row]
    carried_by: tuple[str, ...] = (JSON, TABLES, CSV, TAR)
    options: Row = field(default_factory=dict)
    wanted_of_texts: list[Row] | None = None

    def wanted_from(self, kind: str) -> list[Row]:
        return self.wanted_of_texts if kind == CSV and self.wanted_of_texts else self.wanted


def chats(*wanted: Any) -> list[Row]:
    return [{"messages": chat} for chat in wanted]


HELLO = [says("user", "hi"), says("assistant", "hello")]
TALK = [
    says("system", "Sei höflich. 🙂"),
    says("user", ODD),
    says("assistant", LONG),
    says("user", "?"),
    says("assistant", ODD),
]
PARTS = [says("user", [text(ODD), text("and")]), says("assistant", [text("héllo"), text("")])]
WEATHER = {
    "type": "function",
    "function": {
        "name": "wetter",
        "description": 'In "°C" ☂',
        "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}, "required": ["ort"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "wetter", "arguments": '{"ort": "Zürich"}'}}
CALLING = [
    says("user", "Regnet es?"),
    says("assistant", None, tool_calls=[CALL, CALL | {"id": "c2"}]),
    says("tool", "12 °C", tool_call_id="c1"),
    says("assistant", "Nein."),
]

TEXT_CASES = [
    Case(
        name="messages",
        rows=[
            {"messages": TALK, "system": None},
            {"messages": HELLO, "system": ""},
            {"messages": HELLO, "system": "S"},
        ],
        wanted=chats(TALK, HELLO, [says("system", "S"), *HELLO]),
    ),
    Case(name="messages-in-parts", rows=chats(PARTS, PARTS[:1] + PARTS), wanted=chats(PARTS, PARTS[:1] + PARTS)),
    Case(
        name="messages-of-both-kinds",
        rows=chats([HELLO[0], PARTS[1]], TALK),
        wanted=chats([HELLO[0], PARTS[1]], TALK),
        carried_by=(JSON, CSV, TAR),
    ),
    Case(
        name="tool-calls",
        rows=[{"messages": CALLING, "tools": json.dumps([WEATHER])}, {"messages": HELLO, "tools": ""}],
        wanted=chats({"messages": CALLING, "tools": [WEATHER]}, HELLO),
    ),
    Case(
        name="tools-as-objects",
        rows=[{"messages": CALLING, "tools": [WEATHER, WEATHER]}, {"messages": HELLO, "tools": None}],
        wanted=chats({"messages": CALLING, "tools": [WEATHER, WEATHER]}, HELLO),
    ),
    Case(
        name="messages-not-all-learnt",
        rows=chats([*HELLO, says("user", "?"), says("assistant", "no", weight=0)], [*HELLO, *HELLO]),
        wanted=chats([*HELLO, says("user", "?"), says("assistant", "no", learn=False)], [*HELLO, *HELLO]),
    ),
    Case(
        name="sharegpt",
        rows=[
            {
                "conversations": [{"from": "human", "value": ODD}, {"from": "gpt", "value": LONG}],
                "system": "",
                "id": "é",
            },
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "system": "S"},
        ],
        wanted=chats([says("user", ODD), says("assistant", LONG)], [says("system", "S"), *HELLO]),
    ),
    Case(
        name="sharegpt-calls",
        rows=[
            {
                "conversations": [
                    {"from": "human", "value": "Regnet es?"},
                    {"from": "function_call", "value": '{"name": "wetter", "arguments": {"ort": "Zürich"}}'},
                    {"from": "observation", "value": "12 °C"},
                    {"from": "gpt", "value": "Nein."},
                ],
                "tools": json.dumps([WEATHER]),
            }
        ]
        * 2,
        wanted=chats(
            {
                "messages": [
                    says("user", "Regnet es?"),
                    says(
                        "assistant",
                        None,
                        tool_calls=[
                            {"type": "function", "function": {"name": "wetter", "arguments": {"ort": "Zürich"}}}
                        ],
                    ),
                    says("tool", "12 °C"),
                    says("assistant", "Nein."),
                ],
                "tools": [WEATHER],
            }
        )
        * 2,
    ),
    Case(
        name="alpaca",
        rows=[
            {"instruction": "add", "input": "1\n2", "output": "3", "history": []},
            {"instruction": ODD, "input": "", "output": LONG, "history": [["hi", "hello"], ["a 🐈", "b"]]},
        ],
        wanted=chats(
            [says("user", "add\n\n1\n2"), says("assistant", "3")],
            [*HELLO, says("user", "a 🐈"), says("assistant", "b"), says("user", ODD), says("assistant", LONG)],
        ),
    ),
    Case(
        name="prompt-response",
        rows=[{"prompt": ODD, "response": LONG, "system": None}, {"prompt": "hi", "response": "hello", "system": "S"}],
        wanted=chats([says("user", ODD), says("assistant", LONG)], [says("system", "S"), *HELLO]),
    ),
    Case(
        name="prompt-of-messages",
        rows=[{"prompt": [*HELLO, HELLO[0]], "completion": [says("assistant", ODD)]}] * 2,
        wanted=chats([HELLO[0], says("assistant", "hello", learn=False), HELLO[0], says("assistant", ODD)]) * 2,
        carried_by=(JSON, TABLES, TAR),
    ),
    Case(
        name="question-answer",
        rows=[{"question": ODD, "answer": LONG}, {"question": "hi", "answer": "hello"}],
        wanted=chats([says("user", ODD), says("assistant", LONG)], HELLO),
    ),
    Case(
        name="dialog",
        rows=[{"dialog": [ODD, LONG, "?", ODD], "system": None}, {"dialog": ["hi", "hello"], "system": "S"}],
        wanted=chats(
            [says("user", ODD), says("assistant", LONG), says("user", "?"), says("assistant", ODD)],
            [says("system", "S"), *HELLO],
        ),
    ),
    Case(
        name="text-on-a-line",
        rows=[{"text": ON_A_LINE}, {"text": LONG}],
        wanted=[{"text": ON_A_LINE}, {"text": LONG}],
        carried_by=(LINES,),
    ),
    Case(
        name="text",
        rows=[{"text": ODD}, {"text": LONG}],
        wanted=[{"text": ODD}, {"text": LONG}],
        carried_by=(JSON, TABLES, CSV, TAR, TEXTS),
    ),
    Case(
        name="tokens",
        rows=[
            {"input_ids": [3, 1, 4, 1], "labels": [-100, 1, -100, 1]},
            {"input_ids": [2**31 - 1], "labels": [2**31 - 1]},
        ],
        wanted=[
            {"input_ids": [3, 1, 4, 1], "loss_spans": [[1, 2], [3, 4]]},
            {"input_ids": [2**31 - 1], "loss_spans": [[0, 1]]},
        ],
    ),
    Case(
        name="tokens-with-a-mask",
        rows=[
            {"input_ids": list(range(3000)), "loss_mask": [0] * 2999 + [1]},
            {"input_ids": [7, 8], "loss_mask": [1, 1]},
        ],
        wanted=[
            {"input_ids": list(range(3000)), "loss_spans": [[2999, 3000]]},
            {"input_ids": [7, 8], "loss_spans": [[0, 2]]},
        ],
    ),
    Case(
        name="tokens-with-spans",
        rows=[{"input_ids": [5, 6, 7], "loss_spans": [[0, 1], [2, 3]]}, {"input_ids": [5], "loss_spans": [[0, 1]]}],
        wanted=[{"input_ids": [5, 6, 7], "loss_spans": [[0, 1], [2, 3]]}, {"input_ids": [5], "loss_spans": [[0, 1]]}],
    ),
    Case(
        name="kept-columns",
        rows=[
            {"text": "a", "n": 2**62, "x": 0.1, "ok": True, "about": {"k": ["é", None]}, "tags": ["a"], "id": "ü"},
            {"text": "b", "n": -1, "x": -2.5e300, "ok": False, "about": {"k": []}, "tags": [], "id": ""},
        ],
        wanted=[
            {"text": "a", "n": 2**62, "x": 0.1, "ok": True, "about": {"k": ["é", None]}, "tags": ["a"], "id": "ü"},
            {"text": "b", "n": -1, "x": -2.5e300, "ok": False, "about": {"k": []}, "tags": [], "id": ""},
        ],
        wanted_of_texts=[
            {
                "text": "a",
                "n": str(2**62),
                "x": "0.1",
                "ok": "true",
                "about": '{"k": ["\\u00e9", null]}',
                "tags": '["a"]',
                "id": "ü",
            },
            {"text": "b", "n": "-1", "x": "-2.5e+300", "ok": "false", "about": '{"k": []}', "tags": "[]", "id": ""},
        ],
        carried_by=(JSON, TABLES, CSV),
        options={"keep": True},
    ),
    Case(
        name="chats-with-kept-columns",
        rows=[{"messages": HELLO, "score": 1, "lang": "de"}, {"messages": TALK, "score": 2, "lang": "日本"}],
        wanted=[{"messages": HELLO, "score": 1, "lang": "de"}, {"messages": TALK, "score": 2, "lang": "日本"}],
        wanted_of_texts=[
            {"messages": HELLO, "score": "1", "lang": "de"},
            {"messages": TALK, "score": "2", "lang": "日本"},
        ],
        carried_by=(JSON, TABLES, CSV),
        options={"keep": ("score", "lang")},
    ),
]
