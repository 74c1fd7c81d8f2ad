"""Rows that hold a conversation as a list of exchanges: objects with what the user says and what the assistant says.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import DataError
from .chat import Roles, chat_kind, exchange
from .content import Turn
from .fields import Fields, unpacked

_ASKED = ("user", "human", "query", "question", "prompt", "instruction")
_ANSWERED = ("assistant", "gpt", "bot", "response", "answer", "output")


def _read_exchanges(fields: Fields, roles: Roles) -> list[Turn]:
    """The turns of each exchange; a system prompt that one has comes before them, other keys stay with the answer."""
    turns: list[Turn] = []
    for value in fields.items("messages", "exchanges"):
        keys = _keys(value)
        if keys is None:
            raise DataError(
                f"an exchange must be an object with one of {', '.join(_ASKED)} and one of {', '.join(_ANSWERED)}, "
                f"found {str(value)[:80]!r}: correct the row"
            )
        wrong = next((key for key in keys if not isinstance(value[key], str)), None)
        if wrong is not None:
            raise DataError(f"an exchange must hold text in {wrong!r}, found {str(value[wrong])[:80]!r}: correct it")
        if isinstance(value.get("system"), str) and value["system"]:
            turns.append({"role": "system", "content": value["system"]})
        asked, answered = exchange(value[keys[0]], value[keys[1]])
        others = {key: each for key, each in value.items() if key not in (*keys, "system") and each is not None}
        turns += [asked, {**others, **answered}]
    return turns


def _keys(value: Any) -> tuple[str, str] | None:
    """The keys of the question and of the answer of an exchange; None for an object that is none."""
    if not isinstance(value, Mapping) or {"role", "from"} & value.keys():
        return None
    asked, answered = ([name for name in names if name in value] for names in (_ASKED, _ANSWERED))
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
    needs_text="messages (or conversations, conversation, texts), a list of {user, assistant} or {human, assistant}",
    media_in_front=True,
)
