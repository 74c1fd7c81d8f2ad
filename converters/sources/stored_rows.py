"""A sample of a stored dataset -> the row that gives it again when it is converted. Pure.

Chats become rows as OpenAI has them: `messages`, perhaps `tools`, and parts of media as {"type": "image_url",
"image_url": {"url": …}}. Keys keep their order, so that the stored text comes out the same, byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...processors.media.facts import FACT_TYPES, SOUND_OF_VIDEO
from ...processors.media.intervals import INTERVAL_KEYS
from ...processors.media.stored import MediaPart, media_part
from ...processors.stored_chat import read_chat, read_preference

Refer = Callable[[MediaPart], Any]  # media -> what the row refers to them by: bytes, a path, a data URL


def _as_bytes(part: MediaPart) -> Any:
    return part.data


def row_of(sample: Mapping[str, Any], schema: str | None, *, refer: Refer = _as_bytes) -> dict[str, Any]:
    """The row of a sample: of `messages` and `image` what they were made of, of other schemas the columns themselves.

    DataError for a chat that cannot be read.
    """
    if schema == "messages":
        others = {name: value for name, value in sample.items() if name not in ("messages", "media")}
        return {**_chat_row(sample, refer), **others}
    if schema == "preference":
        others = {name: value for name, value in sample.items() if name not in ("messages", "media")}
        return {**_preference_row(sample, refer), **others}
    if schema == "image":
        part = MediaPart(kind="image", mime="", data=sample["image"])
        return {name: value for name, value in sample.items() if name != "facts"} | {"image": refer(part)}
    return dict(sample)


def _chat_row(sample: Mapping[str, Any], refer: Refer) -> dict[str, Any]:
    chat = read_chat(sample["messages"])
    media = sample["media"]
    return {"messages": _messages(chat.messages, media, refer)} | ({"tools": chat.tools} if chat.tools else {})


def _preference_row(sample: Mapping[str, Any], refer: Refer) -> dict[str, Any]:
    found = read_preference(sample["messages"])
    if isinstance(found.prompt, str):  # texts have no column for what they begin with
        return {name: f"{found.prompt}{text}" for name, text in found.answers.items()}
    lists = {"prompt": found.prompt, **found.answers}
    row: dict[str, Any] = {
        "completion" if name == "answer" else name: _messages(messages, sample["media"], refer)
        for name, messages in lists.items()
    }
    said = {} if found.label is None else {"label": found.label}
    return row | said | ({"tools": found.tools} if found.tools else {})


def _messages(messages: Any, media: bytes, refer: Refer) -> list[dict[str, Any]]:
    return [
        message | {"content": [_part(part, media, refer) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _part(part: dict[str, Any], media: bytes, refer: Refer) -> dict[str, Any]:
    """A part of a row. What the row said of its media stands before `mime`; an interval behind it came with the URL."""
    if part["type"] == "text":
        return part
    found = media_part(part, media)
    names = list(part)
    behind = names[names.index("mime") :] if "mime" in names else []
    source = {"url": refer(found)} | {name: part[name] for name in INTERVAL_KEYS if name in behind}
    facts = FACT_TYPES[found.kind]._fields if found.kind in FACT_TYPES else ()
    ours = {"mime", "span", *facts, *SOUND_OF_VIDEO, *behind}
    said = {name: value for name, value in part.items() if name not in ours}
    key = f"{found.kind}_url"
    return said | {"type": key, key: source}
