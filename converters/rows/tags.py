"""Messages whose keys and speakers have names of their own (LLaMA-Factory's tags) -> messages as OpenAI names them.

Pure. Kinds of rows are found, and rows read, after that: a row of tagged messages is like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import DataError
from .fields import unpacked
from .messages import tool_calls

Tags = Mapping[str, str]
SPEAKERS = {
    "user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "function_tag": "assistant",
    "system_tag": "system",
}  # fmt: skip


def untagged(values: Mapping[str, Any], tags: Tags) -> dict[str, Any]:
    """A row in which messages, and lists of them, whatever their column, have `role` and `content`."""
    return {name: _column(value, tags) for name, value in values.items()}


def untagged_message(message: Mapping[str, Any], tags: Tags) -> dict[str, Any]:
    """A message with `role` and `content`; what a function tag's speaker says becomes tool_calls.

    Speakers that no tag names stay as they are called.
    """
    role_key, content_key = tags.get("role_tag", "role"), tags.get("content_tag", "content")
    speaker, content = message.get(role_key), message.get(content_key)
    rest = {key: value for key, value in message.items() if key not in (role_key, content_key)}
    tag = tag_of(speaker, tags)
    role = SPEAKERS[tag] if tag else speaker
    if tag == "function_tag":
        return {**rest, "role": role, "content": None, "tool_calls": tool_calls(content, content_key)}
    return {**rest, "role": role, "content": content}


def tag_of(speaker: Any, tags: Tags) -> str | None:
    """The tag that names a speaker; None where none does."""
    return next((tag for tag in SPEAKERS if tag in tags and tags[tag] == speaker), None)


def _column(value: Any, tags: Tags) -> Any:
    role_key = tags.get("role_tag", "role")
    listed = unpacked(value)
    if isinstance(listed, dict) and role_key in listed:
        return untagged_message(listed, tags)
    if not isinstance(listed, list) or not any(isinstance(each, dict) and role_key in each for each in listed):
        return value
    for each in listed:
        if not isinstance(each, dict) or role_key not in each:
            raise DataError(f"a message must be an object with {role_key!r}, found {str(each)[:80]!r}: correct the row")
    return [untagged_message(each, tags) for each in listed]
