"""A row's prompt, media and tools -> messages, as chat templates take them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from ..converters.rows.chat import with_calls
from ..converters.rows.fields import unpacked
from ..converters.rows.messages import IN_PYTHON, are_messages
from ..errors import ConfigError, DataError

KINDS = ("image", "video", "audio")
Messages = list[dict[str, Any]]


def check_multimodal_keys(keys: Mapping[str, str] | None) -> None:
    if keys is not None and not isinstance(keys, Mapping):
        raise ConfigError(f'multimodal_keys must be a kind of media -> column, got {keys!r}: write {{"image": COLUMN}}')
    for kind in keys or ():
        if kind not in KINDS:
            raise ConfigError(f"multimodal_keys names media of kind {kind!r}: expected {', '.join(KINDS)}")


def messages_of(prompt: str | list[Any], *, system_prompt: str | None) -> Messages:
    """The conversation of a prompt: a text is what the user says. DataError for what is none."""
    if isinstance(prompt, str):
        if are_messages(unpacked(prompt)) or IN_PYTHON.match(prompt):
            raise DataError(
                f"the prompt is a list of messages as text ({prompt[:60]!r}), which the user would say as it stands: "
                "write a list, or read it by custom_prompt_func (--custom-prompt-path), such as json.loads"
            )
        messages: Messages = [{"role": "user", "content": prompt}]
    else:
        for message in prompt:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise DataError(f"a message of the prompt has no role ({str(message)[:80]!r}): write role and content")
        messages = [
            with_calls({name: value for name, value in message.items() if value is not None or name == "content"})
            for message in prompt
        ]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def plain_parts(messages: Messages) -> Messages:
    """The messages with parts that name their medium by its kind, also where they have it as OpenAI's image_url.

    DataError for a part of another type: nothing would read it.
    """
    return [
        message | {"content": [_plain_part(part) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def _plain_part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", *KINDS):
        return dict(part)
    medium = str(kind).removesuffix("_url")
    if medium not in KINDS or medium == kind:
        raise DataError(
            f"a part of the prompt has the type {kind!r} ({str(part)[:80]}), which nothing reads: write text, "
            f"{', '.join(KINDS)}, or one of {', '.join(f'{each}_url' for each in KINDS)}"
        )
    value = part.get(kind)
    url = value.get("url") if isinstance(value, Mapping) else value
    if url is None:
        raise DataError(f'a part of type {kind!r} has no url ({str(part)[:80]}): write {{"{kind}": {{"url": …}}}}')
    return {"type": medium, medium: url}


def with_media(messages: Messages, row: Mapping[str, Any], keys: Mapping[str, str]) -> Messages:
    """The messages with a part for each medium: <image>, <video> and <audio> take the next of the row's lists.

    A part that says its kind alone takes one, too; one that has a medium of its own keeps it. DataError unless there
    are as many media as takers.
    """
    waiting = {kind: _media(row, kind, key) for kind, key in keys.items()}
    taken = dict.fromkeys(waiting, 0)

    def take(kind: str) -> dict[str, Any]:
        taken[kind] += 1
        if taken[kind] > len(waiting[kind]):
            raise DataError(
                f"the prompt has more slots for media of kind {kind} (<{kind}>) than the {len(waiting[kind])} in "
                f"{keys[kind]!r}: correct the row"
            )
        return {"type": kind, kind: waiting[kind][taken[kind] - 1]}

    pattern = re.compile("(" + "|".join(f"<{kind}>" for kind in waiting) + ")")

    def split(text: str) -> list[dict[str, Any]]:
        pieces = [piece for piece in pattern.split(text) if piece]
        return [take(piece[1:-1]) if pattern.fullmatch(piece) else {"type": "text", "text": piece} for piece in pieces]

    def parts(content: Any) -> Any:
        if isinstance(content, str):
            return split(content)
        if not isinstance(content, Sequence):
            return content
        made: list[dict[str, Any]] = []
        for part in content:
            kind = str(part.get("type")).removesuffix("_url")
            if kind == "text":
                made += split(part.get("text") or "")
            else:
                has_medium = kind not in waiting or any(
                    part.get(name) not in (None, {}) for name in part if name != "type"
                )
                made.append(part if has_medium else take(kind))
        return made

    made = [
        message | {"content": parts(message["content"])} if "content" in message else message for message in messages
    ]
    for kind, media in waiting.items():
        if taken[kind] != len(media):
            raise DataError(
                f"{len(media) - taken[kind]} of the {len(media)} media in {keys[kind]!r} have no <{kind}> in the "
                "prompt: correct the row"
            )
    return made


def _media(row: Mapping[str, Any], kind: str, key: str) -> list[Any]:
    value = row.get(key)
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping):
        return [value]
    if not isinstance(value, Sequence):
        raise DataError(f"{key!r} holds {type(value).__name__}, not media of kind {kind}: write a list of them")
    return list(value)


def tools_of(row: Mapping[str, Any], key: str | None) -> list[Any] | None:
    """A row's tools, a list or the JSON text of one; None where it has none."""
    value = row.get(key) if key is not None else None
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise DataError(f"{key!r} is not valid JSON ({error.msg}): write a list of tools, or its JSON") from error
    if not isinstance(value, list):
        raise DataError(f"{key!r} holds {type(value).__name__}, not a list of tools: write a list, or its JSON")
    return value
