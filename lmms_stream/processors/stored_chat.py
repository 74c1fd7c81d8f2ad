"""A stored conversation, or answers to compare -> messages and tools, checked. JSON text in, values out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import orjson

from ..errors import DataError
from ..types import Role
from .answers import REASONING_KEYS
from .json_text import number, parsed

_AGAIN = "convert the dataset again"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class StoredChat(NamedTuple):
    """Messages, each with a `role`, and with `content` as text, parts, or None. tools: their JSON schemas, or None."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def read_chat(stored: str) -> StoredChat:
    """Read the conversation in a sample's `messages`: a list of messages, or {"messages": […], "tools": […]}.

    Spans of media are not checked. DataError for anything else.
    """
    parsed = _parse(stored, "messages are")
    messages, tools = (parsed.get("messages"), parsed.get("tools")) if isinstance(parsed, dict) else (parsed, None)
    if isinstance(parsed, dict) and "prompt" in parsed:
        raise DataError("it holds answers to compare, and is read as a chat: use the processor preference")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"its messages are not a list of messages: {_AGAIN}")
    _check_messages(messages)
    return StoredChat(messages, None if tools is None else _checked_tools(tools))


class StoredPreference(NamedTuple):
    """Answers to compare. prompt: messages. answers: `chosen` and `rejected`, or only `answer`, each messages; or all
    of them are texts, which no chat template changes. label: whether `answer` is good; None for a pair. tools: their
    JSON schemas, or None.
    """

    prompt: list[dict[str, Any]] | str
    answers: dict[str, list[dict[str, Any]] | str]
    label: bool | None
    tools: list[dict[str, Any]] | None

    @property
    def roles(self) -> list[Role]:
        """Role of each answer in the comparison."""
        return [Role.CHOSEN, Role.REJECTED] if self.label is None else [Role(self.label)]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Parts of the prompt and of the answers, in the order of their media; empty for texts."""
        parts = (self.prompt, *self.answers.values())
        return [message for part in parts if not isinstance(part, str) for message in part]


def read_preference(stored: str) -> StoredPreference:
    """Read the prompt and the answers of a sample of the schema `preference`; DataError for anything else."""
    parsed = _parse(stored, "preference is")
    label = parsed.get("label") if isinstance(parsed, dict) else None
    names = ("prompt", "chosen", "rejected") if label is None else ("prompt", "answer")
    kind = str if isinstance(parsed, dict) and isinstance(parsed.get("prompt"), str) else list
    if not isinstance(parsed, dict) or not all(isinstance(parsed.get(name), kind) and parsed[name] for name in names):
        raise DataError(
            f"it has no prompt with chosen and rejected, or with answer and label: {_AGAIN}, or use the processor for "
            "its kind of rows"
        )
    if label is not None and not isinstance(label, bool):
        raise DataError(f"its label is {label!r}, not true or false: {_AGAIN}")
    for name in names if kind is list else ():
        _check_messages(parsed[name])
    tools = _checked_tools(parsed.get("tools"))
    return StoredPreference(parsed["prompt"], {name: parsed[name] for name in names[1:]}, label, tools)


def _checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"its tools are not a list of objects ({str(tools)[:80]!r}): {_AGAIN}")
    return tools or None


def _parse(stored: str, what: str) -> Any:
    """Return the result of json.loads, in a fifth of the time; DataError, with `what`, for another text."""
    try:
        with suppress(ValueError, AttributeError):  # json reads halves of surrogate pairs, deep nesting and 309 digits
            return parsed(stored.encode())
        return json.loads(stored, parse_float=number)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"its {what} not JSON ({error}): {_AGAIN}") from error


def leave_out_nulls(message: dict[str, Any]) -> None:
    """Remove keys of null except the content, like a conversion: a template would write None."""
    for key in [key for key, value in message.items() if value is None and key != "content"]:
        del message[key]


def check_text(text: str) -> None:
    """Raise DataError for a text with half of a surrogate pair, without UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"its text has half of a surrogate pair ({error}): correct or remove the row") from error


def check_values(message: Mapping[str, Any]) -> None:
    """Raise DataError for a value of a message, in Python's notation in the text of templates, for example `None`.

    All keys known to templates are checked, except the content.
    """
    role, calls, function_call = message["role"], message.get("tool_calls"), message.get("function_call")
    _check_value("role", role, isinstance(role, str) and role.strip() and not _CONTROL.search(role), "a name")
    for key in {"name", "tool_call_id"} & message.keys():
        _check_value(key, message[key], _is_name(message[key]), "text")
    for key in message.keys() & {*REASONING_KEYS}:
        _check_value(key, message[key], isinstance(message[key], str), "text")
    are_calls = calls is None or (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls))
    _check_value("tool_calls", calls, are_calls, "a list of objects")
    for call in calls or ():
        _check_value("tool_calls.id", call.get("id"), call.get("id") is None or _is_name(call["id"]), "text")
        _check_function("tool_calls.function", call.get("function", call), is_named="function" in call)
    if function_call is not None:
        _check_function("function_call", function_call, is_named=True)
    _check_value("learn", message.get("learn"), isinstance(message.get("learn", True), bool), "true or false")


def _check_function(key: str, function: Any, *, is_named: bool) -> None:
    _check_value(key, function, isinstance(function, Mapping), "an object with name and arguments")
    name, arguments = function.get("name", None if is_named else ""), function.get("arguments")
    _check_value(f"{key}.name", name, isinstance(name, str) and (name.strip() or not is_named), "text")
    is_read = arguments is None or isinstance(arguments, str | Mapping | list)
    _check_value(f"{key}.arguments", arguments, is_read, "an object, or its JSON text")
    if isinstance(arguments, str):
        try:
            orjson.loads(arguments)
        except ValueError:
            _check_arguments(arguments)


def _check_arguments(text: str) -> None:
    """Raise DataError for a JSON text valid only in Python's reader; other texts reach templates unchanged."""
    try:
        value = json.loads(text)
    except ValueError:
        return
    except RecursionError as error:
        raise DataError(f"arguments of a call are nested too deep ({text[:60]!r}): remove the row") from error
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # halves of surrogate pairs have no UTF-8
    except ValueError as error:
        raise DataError(f"arguments of a call are not JSON ({error}): correct or remove the row") from error


def _is_name(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _check_value(key: str, value: Any, is_right: Any, expected: str) -> None:
    if not is_right:
        raise DataError(
            f"a message has {key} {str(value)[:80]!r} ({type(value).__name__}), which a chat template would write "
            f"unchanged: write {expected}, or remove the key"
        )


def _check_messages(messages: Sequence[Any]) -> None:
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"a message has no role ({str(message)[:80]!r}): {_AGAIN}")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise DataError(f"the content of a message is {type(content).__name__}, not text or parts: {_AGAIN}")
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(kind, str) or (kind == "text" and not isinstance(part.get("text"), str)):
                raise DataError(f"a part of a message is neither text nor media ({str(part)[:80]!r}): {_AGAIN}")
