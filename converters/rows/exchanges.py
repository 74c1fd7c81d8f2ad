"""Rows that hold a conversation as a list of exchanges: objects with what the user says and what the assistant says.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import DataError
from .chat import MEDIA_COLUMNS, Roles, chat_kind, exchange, turn_of
from .content import Turn
from .fields import QUESTIONS, Fields, is_filled, unpacked

_ASKED = ("user", "human", *QUESTIONS)
_ANSWERED = ("assistant", "gpt", "bot", "response", "answer", "output")
_MEDIA = tuple(name for names in MEDIA_COLUMNS.values() for name in names)


def _read_exchanges(fields: Fields, roles: Roles) -> list[Turn]:
    """Return the turns of each exchange.

    A system prompt comes before its exchange. Media belong to the question, all other keys to the answer.
    """
    turns: list[Turn] = []
    for value in fields.items("messages", "exchanges"):
        keys = _keys(value)
        if keys is None:
            raise DataError(
                f"an exchange must be an object with one of {', '.join(_ASKED)} and one of {', '.join(_ANSWERED)}, "
                f"found {str(value)[:80]!r}: correct the row"
            )
        more = ["system", "input"] if keys[0] == "instruction" else ["system"]
        texts = [*keys, *(name for name in more if is_filled(value.get(name)))]
        _check(value, texts)
        if "system" in texts:
            turns.append({"role": "system", "content": value["system"]})
        asked = with_input(value[keys[0]], value["input"] if "input" in texts[2:] else "")
        shown = {key: value[key] for key in _MEDIA if is_filled(value.get(key))}
        empty = {name for name in (*_ASKED, *_ANSWERED) if not is_filled(value.get(name))}
        said = {*texts, *_MEDIA, "system", *empty}
        others = {key: each for key, each in value.items() if key not in said}
        answer = turn_of({**others, "role": "assistant", "content": value[keys[1]]}, {})
        turns += [{**shown, "role": "user", "content": asked}, answer]
    return turns


def _check(value: Mapping[str, Any], texts: Sequence[str]) -> None:
    """Raise DataError unless an exchange holds text in these keys, and no other question or answer."""
    wrong = next((key for key in texts if not isinstance(value[key], str)), None)
    if wrong is not None:
        raise DataError(f"an exchange must hold text in {wrong!r}, found {str(value[wrong])[:80]!r}: correct it")
    other = next(
        (key for key in (*_ASKED, *_ANSWERED, "content") if key not in texts and is_filled(value.get(key))), None
    )
    if other is not None:
        raise DataError(
            f"an exchange has {other!r} as well as {', '.join(map(repr, texts))}, and would lose it: leave one key for "
            "the question and one for the answer"
        )


def _keys(value: Any) -> tuple[str, str] | None:
    """Return the keys of the question and of the answer, filled ones first; None for an object without both."""
    if not isinstance(value, Mapping) or {"role", "from"} & value.keys():
        return None
    asked, answered = (
        sorted((name for name in names if name in value), key=lambda name: not is_filled(value[name]))
        for names in (_ASKED, _ANSWERED)
    )
    return (asked[0], answered[0]) if asked and answered else None


def holds_exchanges(fields: Fields) -> bool:
    """Whether the first thing in the list is an exchange, and not a message."""
    value = unpacked(fields.get("messages"))
    return isinstance(value, list) and bool(value) and _keys(value[0]) is not None


EXCHANGES = chat_kind(
    "exchanges",
    _read_exchanges,
    needs={"messages": ("messages", "conversations", "conversation", "texts")},
    accepts=holds_exchanges,
    needs_text="messages (or conversations, conversation, texts), a list of {user, assistant}, {human, assistant} or "
    "{input, output}",
    media_in_front=True,
)


# Rows of Alpaca: `instruction`, `input`, `output`, and `history` of exchanges before. Pure.


def exchanges(history: Any) -> list[Turn]:
    """Turns of a history of questions and answers: a list of pairs, also as JSON text; [] for none."""
    turns: list[Turn] = []
    pairs = unpacked(history) or []
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(
                f"history must be a list of pairs of texts, found {str(pair)[:80]!r}: correct the row, or pass "
                "--columns history= to leave the column out"
            )
        turns += exchange(*pair)
    return turns


def with_input(instruction: str, given: str) -> str:
    """Return the instruction, with the input below it if there is one."""
    return f"{instruction}\n\n{given}" if given else instruction


def _read_alpaca(fields: Fields, roles: Roles) -> list[Turn]:
    """The instruction, with the input below it where there is one, and the output; before them the history's pairs."""
    turns = exchanges(fields.get("history"))
    asked = with_input(fields.text("instruction"), fields.text("input") if is_filled(fields.get("input")) else "")
    return [*turns, *exchange(asked, fields.text("output"))]


def _asks_by_instruction(fields: Fields) -> bool:
    """Whether a response (Dolly's name of the output) is that of the instruction, and not of a prompt beside it."""
    others = set() if "instruction" in fields.columns else {"prompt", "inputs", "query"} & fields.values.keys()
    return fields.column("output") != "response" or not others


ALPACA = chat_kind(
    "alpaca",
    _read_alpaca,
    needs={"instruction": ("instruction",), "output": ("output", "response")},
    may={"input": ("input", "context"), "history": ("history",)},
    accepts=_asks_by_instruction,
    media_in_front=True,
)
