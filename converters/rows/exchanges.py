"""Rows that hold a conversation as a list of exchanges: objects with what the user says and what the assistant says.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import DataError
from .alpaca import with_input
from .chat import MEDIA_COLUMNS, Roles, chat_kind, turn_of
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
