"""A stored chat -> a chat for each of its answers, which ends with that answer. Pure.

Chat templates that change earlier messages when others follow make each answer what it is when it is the last: so it
is trained as a sample of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ...types import Sample


def each_answer(sample: Sample) -> Iterator[Sample]:
    """Samples of the messages schema: what comes before each answer is read, and the answer alone is learnt.

    Answers that the loss leaves out, and empty ones, have no sample. Other columns are the same in all.
    """
    stored = json.loads(sample["messages"])
    messages = stored["messages"] if isinstance(stored, dict) else stored
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or not message.get("learn", True):
            continue
        if not (message.get("content") or message.get("tool_calls")):
            continue
        chat = [*(_unlearnt(each) for each in messages[:index]), message]
        made = {**stored, "messages": chat} if isinstance(stored, dict) else chat
        text = json.dumps(made, ensure_ascii=False, separators=(",", ":"))
        yield {**sample, "messages": text, "media": sample["media"][: _media_bytes(chat)]}


def _unlearnt(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "learn": False} if message["role"] == "assistant" else message


def _media_bytes(messages: list[Mapping[str, Any]]) -> int:
    """Where the media of these messages end in the bytes of all media of a sample."""
    ends = [
        sum(part["span"])
        for message in messages
        for part in (message["content"] if isinstance(message.get("content"), list) else ())
        if "span" in part
    ]
    return max(ends, default=0)
