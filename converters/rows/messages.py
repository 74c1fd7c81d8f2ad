"""Rows that hold a list of messages: OpenAI's (`role` and `content`) and ShareGPT's (`from` and `value`). Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from shlex import quote
from typing import Any

import orjson

from ...errors import DataError
from ...types import Sample
from .chat import CHAT_EXTRAS, Roles, chat_kind, check_speakers, turn_of
from .content import Turn, may_hold_slots, repeats, tool_calls
from .exchanges import holds_exchanges
from .fields import Columns, Fields, parse_json, unpacked
from .row_kind import ReadOptions
from .speakers import CALLERS, ROLES, USUAL_ROLES

_NEEDS: Columns = {"messages": ("messages", "conversations", "conversation")}
_EXTRA_COLUMNS = {name for names in CHAT_EXTRAS.values() for name in names}
_AS_PROMPT = {"question": "prompt", "instruction": "prompt", "answer": "response", "output": "response"}
_ASKED_OR_ANSWERED = ("prompt", "response", "chosen", "rejected", *_AS_PROMPT)  # roles of columns
IN_PYTHON = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'\s*:")  # a list of messages as Python shows it
_PLAIN_ROLES = ("system", "user", "assistant")


def _read_messages(fields: Fields, roles: Roles) -> list[Turn]:
    """OpenAI messages: `role` and `content`. Roles that are not known stay: a chat template may know them."""
    messages = fields.items("messages", "messages")
    check_speakers(messages)
    return [message_turn(message, roles) for message in messages]


def _read_sharegpt(fields: Fields, roles: Roles) -> list[Turn]:
    """ShareGPT conversations: `from` and `value`; what `function_call` says becomes tool_calls."""
    return [_sharegpt_turn(message, roles) for message in fields.items("messages", "messages")]


def _sharegpt_turn(message: Any, roles: Roles) -> Turn:
    turn = turn_of(message, roles, names={"from": "role", "value": "content"})
    if turn["role"] not in ROLES:
        raise DataError(
            f"a message is from {turn['role']!r}, expected one of {', '.join([*USUAL_ROLES, *ROLES])}: "
            f"say who that is with --roles {turn['role']}=user or {turn['role']}=assistant"
        )
    return _with_calls(turn, message["from"], "value")


def message_turn(message: Any, roles: Roles) -> Turn:
    """A message as a turn, whether it is OpenAI's or ShareGPT's."""
    if _names_speaker(message):
        return _sharegpt_turn(message, roles)
    turn = turn_of(message, roles)
    return _with_calls(turn, message["role"], "content")


def _with_calls(turn: Turn, speaker: str, name: str) -> Turn:
    """The turn; with tool_calls in place of its content, if that is what such a speaker says."""
    if speaker.lower() not in CALLERS or turn["role"] != "assistant" or "tool_calls" in turn:
        return turn
    return {**turn, "content": None, "tool_calls": tool_calls(turn["content"], name)}


def are_messages(value: Any) -> bool:
    """Return whether a value is a list of messages, OpenAI's or ShareGPT's."""
    keys = ({"role", "content"}, {"from", "value"})
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, dict) and any(pair <= each.keys() for pair in keys) for each in value)
    )


def check_texts(rows: Sequence[Mapping[str, Any]], found: Mapping[str, str]) -> None:
    """DataError if a column that is read as texts holds lists of messages as text. found: role -> column.

    A prompt and its response are read as messages from JSON text, but never from Python's notation.
    """
    for role in _ASKED_OR_ANSWERED:
        name = found.get(role, "")
        texts = [row[name] for row in rows if isinstance(row.get(name), str) and row[name]]
        if _mostly(IN_PYTHON.match, texts):
            raise DataError(
                f"column {name} holds lists of messages as Python shows them ({texts[0][:60]!r}), which pandas writes "
                "to CSV: write them as JSON or Parquet, or read them by ast.literal_eval, with --map FILE.py:FUNCTION"
            )
        if role in _AS_PROMPT and _mostly(lambda text: are_messages(unpacked(text)), texts):
            named = {_AS_PROMPT[each]: column for each, column in found.items() if each in _AS_PROMPT}
            said = " ".join(quote(f"{each}={column}") for each, column in named.items())
            raise DataError(
                f"column {name} holds lists of messages as JSON text, which is read as text there: pass --columns "
                f"{said} to read the messages"
            )


def _mostly(is_so: Callable[[str], Any], texts: Sequence[str]) -> bool:
    return bool(texts) and 2 * sum(map(bool, map(is_so, texts))) >= len(texts)


def _says_from(fields: Fields) -> bool:
    """Whether the first message names its speaker by `from`."""
    value = fields.get("messages")
    if isinstance(value, str):
        try:
            value = parse_json(value, "messages")
        except DataError:
            return False  # the error is raised where the row is read
    first = value[0] if isinstance(value, list) and value else None
    return _names_speaker(first)


def _names_speaker(message: Any) -> bool:
    return isinstance(message, dict) and message.get("from") is not None and message.get("role") is None


def _says_role(fields: Fields) -> bool:
    return not _says_from(fields) and not holds_exchanges(fields) and not begins_with_text(fields, "messages")


def _read_texts(values: Mapping[str, Any], found: Mapping[str, str], options: ReadOptions) -> Sample | None:
    """The sample of a chat of texts alone, which most chats are; the general way takes five times as long."""
    if (
        not found.keys() <= {"messages"}
        or options.system is not None
        or options.learn != "assistant"
        or not values.keys().isdisjoint(_EXTRA_COLUMNS)
    ):
        return None
    text = _plain_chat(values.get(found.get("messages", "messages")), options.roles)
    return None if text is None else {"messages": text, "media": b""}


def _plain_chat(messages: Any, roles: Roles) -> str | None:
    """The stored messages of a chat of texts alone; None where a message has more than a known role and a text."""
    if type(messages) is not list:
        return None
    is_learnt, asked = False, ""
    for message in messages:
        if type(message) is not dict or len(message) != 2:
            return None
        role, content = message.get("role"), message.get("content")
        if role not in _PLAIN_ROLES or role in roles or type(content) is not str or may_hold_slots(content):
            return None
        if not content.strip() or (role == "assistant" and repeats(asked, content)):  # which the general way counts
            return None
        is_learnt = is_learnt or role == "assistant"
        asked = content if role == "user" else ""
    try:
        return orjson.dumps(messages).decode() if is_learnt else None
    except TypeError:  # a text is not UTF-8: the general way says which one
        return None


MESSAGES = chat_kind("messages", _read_messages, needs=_NEEDS, accepts=_says_role, read_simple=_read_texts)
SHAREGPT = chat_kind("sharegpt", _read_sharegpt, needs=_NEEDS, accepts=_says_from)


# Rows that hold a conversation as a list of texts, which the user and the assistant say by turns. Pure.

_SPEAKERS = ("user", "assistant")


def _read_dialog(fields: Fields, roles: Roles) -> list[Turn]:
    """The user says the first text, the assistant the second, and so on."""
    texts = fields.items("dialog", "texts")
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            name = fields.column("dialog")
            raise DataError(f"turn {number} in column {name!r} must be text, found {type(text).__name__}: correct it")
    return [{"role": _SPEAKERS[number % 2], "content": text} for number, text in enumerate(texts)]


def begins_with_text(fields: Fields, role: str = "dialog") -> bool:
    """A list of texts, and not of messages, which may be JSON text."""
    value = unpacked(fields.get(role))
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        return False
    return not isinstance(unpacked(f"[{value[0]}]"), list) or not value[0].startswith("{")


DIALOG = chat_kind(
    "dialog",
    _read_dialog,
    needs={"dialog": ("dialog", "dialogue", "utterances", "conversations", "conversation")},
    accepts=begins_with_text,
    needs_text="dialog (or dialogue, utterances, conversations, conversation), a list of texts",
)
