"""A stored conversation, or answers to compare -> messages and tools, checked. JSON text in, values out."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ..errors import DataError
from ..types import Role
from .json_text import parsed

_AGAIN = "convert the dataset again"


class StoredChat(NamedTuple):
    """Messages, each with a `role`, and with `content` as text, parts, or None. tools: their JSON schemas, or None."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def read_chat(stored: str) -> StoredChat:
    """Read the conversation in a sample's `messages`: a list of messages, or {"messages": […], "tools": […]}.

    Spans of media are not checked. DataError for anything else.
    """
    try:
        parsed = _parse(stored)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"its messages are not JSON ({error}): {_AGAIN}") from error
    messages, tools = (parsed.get("messages"), parsed.get("tools")) if isinstance(parsed, dict) else (parsed, None)
    if isinstance(parsed, dict) and "prompt" in parsed:
        raise DataError("it holds answers to compare, and is read as a chat: use the processor preference")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"its messages are not a list of messages: {_AGAIN}")
    for message in messages:
        _check_message(message)
    return StoredChat(messages, _checked_tools(tools))


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
    try:
        parsed = _parse(stored)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"its preference is not JSON ({error}): {_AGAIN}") from error
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
    for message in (message for name in names if kind is list for message in parsed[name]):
        _check_message(message)
    tools = _checked_tools(parsed.get("tools"))
    return StoredPreference(parsed["prompt"], {name: parsed[name] for name in names[1:]}, label, tools)


def _checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"its tools are not a list of objects ({str(tools)[:80]!r}): {_AGAIN}")
    return tools or None


def _parse(stored: str) -> Any:
    """Return the result of json.loads, in a fifth of the time."""
    try:
        return parsed(stored.encode())
    except (ValueError, AttributeError):  # halves of surrogate pairs, deep nesting and 309 digits: json reads these
        return json.loads(stored)


def _check_message(message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"a message has no role ({str(message)[:80]!r}): {_AGAIN}")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise DataError(f"the content of a message is {type(content).__name__}, not text or parts: {_AGAIN}")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or (kind == "text" and not isinstance(part.get("text"), str)):
            raise DataError(f"a part of a message is neither text nor media ({str(part)[:80]!r}): {_AGAIN}")
