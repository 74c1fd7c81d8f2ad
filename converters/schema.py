"""A row -> a sample of one of the two shard schemas. Pure.

messages: `messages` (JSON text) and `media` (bytes); what the chat processor reads.
tokens: `input_ids` int32[T] and `loss_spans` int32[k, 2]; made of messages by a processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from ..errors import DataError
from ..processors.base import IGNORED_LABEL, Processor
from ..types import Sample

COLUMNS: dict[str, dict[str, str]] = {
    "messages": {"messages": "str", "media": "bytes"},
    "tokens": {"input_ids": "ndarray:int32", "loss_spans": "ndarray:int32"},
}


def to_messages(row: Mapping[str, Any]) -> Sample:
    """A row with OpenAI `messages` (content: a string or a list of text parts) as a messages sample.

    DataError when messages are missing or malformed, and when the assistant says nothing.
    """
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"expected a list of messages in column 'messages', found columns {', '.join(row)}")
    stored = [_message(message) for message in messages]
    if not any(message["role"] == "assistant" and message["content"] for message in stored):
        raise DataError("no assistant message with content, so nothing would be learnt: complete or remove the row")
    return {"messages": orjson.dumps(stored).decode(), "media": b""}


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"a message must be an object with a role, found {str(message)[:80]!r}")
    content = message.get("content")
    if isinstance(content, list):
        content = [_part(part) for part in content]
    elif content is not None and not isinstance(content, str):
        raise DataError(f"content must be a string or a list of parts, found {type(content).__name__}")
    others = {key: value for key, value in message.items() if value is not None}
    return others | {"role": message["role"], "content": content}


def _part(part: Any) -> dict[str, str]:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise DataError(f"content parts of type {kind!r} are not supported: expected {{'type': 'text', 'text': …}}")
    return {"type": "text", "text": part["text"]}


def to_tokens(sample: Sample, processor: Processor) -> Sample:
    """A sample that `processor` reads as a tokens sample; DataError when no token would be learnt."""
    processed = processor.process(sample)
    learnt = np.concatenate([[False], processed["labels"] != IGNORED_LABEL, [False]])
    edges = np.flatnonzero(learnt[1:] != learnt[:-1])
    if not len(edges):
        raise DataError("no token would be learnt: does the chat template mark what the assistant says?")
    return {
        "input_ids": processed["input_ids"].astype(np.int32),
        "loss_spans": edges.reshape(-1, 2).astype(np.int32),
    }
