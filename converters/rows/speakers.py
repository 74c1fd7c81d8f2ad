"""Unusual keys and speakers of messages -> tags (see --tags). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

from ...errors import DataError
from .content import tool_calls
from .fields import unpacked

USUAL_ROLES: dict[str, str] = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "bot": "assistant", "function_call": "assistant", "observation": "tool",
    "function": "tool", "function_response": "tool", "tool_call": "assistant", "tool_response": "tool",
}  # fmt: skip
CALLERS = ("function_call", "tool_call")  # speakers with a function call in their content: ShareGPT's, ms-swift's
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SPEAKER = "role "  # before the name of an unknown speaker in a note
_SPEAKER_KEYS = ("role", "from", "speaker", "name", "who", "author", "sender")
_CONTENT_KEYS = ("content", "text", "value", "what", "says", "message", "utterance")
_MOST_SPEAKERS = 4
_USUAL_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}

Readings = Sequence[Mapping[str, str]]  # tags of messages, for each possible reading


def usual_role(speaker: str) -> str:
    """Return the role of a speaker's name, or the name in lower case.

    >>> usual_role("GPT"), usual_role("Narrator")
    ('assistant', 'narrator')
    """
    return USUAL_ROLES.get(speaker.lower(), speaker.lower())


def role_of(speaker: str, roles: Mapping[str, str]) -> str:
    """Return the role of a speaker, ignoring case for known names; other names unchanged.

    roles: a dataset's name of a speaker -> role.

    >>> role_of("GPT", USUAL_ROLES), role_of("User", USUAL_ROLES), role_of("Critic", USUAL_ROLES)
    ('assistant', 'user', 'Critic')
    """
    lower = speaker.lower()
    return roles.get(speaker, roles.get(lower, lower if lower in ROLES else speaker))


def readings_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the tags of messages; two readings if either of two speakers may be the assistant, [] for none."""
    keys = _keys(messages)
    if keys is None:
        return []
    names = dict.fromkeys(each[keys[0]] for each in messages)
    known = {name: usual_role(name) for name in names}
    users = [name for name in names if known[name] == "user"]
    assistants = [name for name in names if known[name] == "assistant" and name not in CALLERS]
    others = [name for name in names if known[name] not in ROLES]
    if users or assistants:
        other = others if len(others) == 1 else []
        pairs = [*zip((users or other)[:1], (assistants or other)[:1], strict=False)]
    else:
        pairs = [(others[0], others[1]), (others[1], others[0])] if len(others) == 2 else []
    tags = {"role_tag": keys[0], "content_tag": keys[1]}
    more = {"function_tag": "function_call"} if "function_call" in names else {}
    for tag, role in (("system_tag", "system"), ("observation_tag", "tool")):
        own = [name for name in names if known[name] == role and name not in (*ROLES, *USUAL_ROLES)]
        more |= {tag: own[0]} if own else {}
    readings = [{**tags, "user_tag": user, "assistant_tag": assistant, **more} for user, assistant in pairs]
    return [{tag: name for tag, name in each.items() if name != _USUAL_TAGS.get(tag)} for each in readings]


def readings_said(readings: Readings) -> str:
    """Return the options that set these tags; for two readings, with the condition of each."""
    options = [f"--tags {' '.join(quote(f'{tag}={name}') for tag, name in each.items())}" for each in readings]
    if len(options) < 2:
        return "".join(options)
    assistants = [each["assistant_tag"] for each in readings]
    return " or ".join(f"{options[n]} (if {name} is the assistant)" for n, name in enumerate(assistants))


def _keys(messages: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """Return the keys of the speaker and of the content of messages; None if unknown.

    The speaker's key has known roles, else a usual name, else few values that repeat.
    """
    keys = [
        key for key in (messages[0] if messages else ()) if all(isinstance(each.get(key), str) for each in messages)
    ]
    values = {key: {each[key] for each in messages} for key in keys}
    few = [
        key
        for key in keys
        if 2 <= len(values[key]) <= _MOST_SPEAKERS
        and key.lower() not in _CONTENT_KEYS
        and not all(name.isdigit() for name in values[key])
    ]
    speakers = (
        [key for key in few if {*USUAL_ROLES, *ROLES} & {name.lower() for name in values[key]}]
        or [key for key in keys if key.lower() in _SPEAKER_KEYS]
        or [key for key in few if len(values[key]) < len(messages)]
    )
    contents = [key for key in keys if key not in speakers[:1]]
    if len(contents) > 1:
        contents = [key for key in contents if key.lower() in _CONTENT_KEYS]
    return (speakers[0], contents[0]) if speakers and len(contents) == 1 else None


# Tagged messages -> messages in OpenAI's format.
#
# Detection and reading of kinds come afterwards: a row of tagged messages is treated like other rows.

Tags = Mapping[str, str]
TAGGED_ROLES = {
    "user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "function_tag": "assistant",
    "system_tag": "system",
}  # fmt: skip


def untagged(values: Mapping[str, Any], tags: Tags) -> dict[str, Any]:
    """Return a row in which messages, and lists of messages, in any column have `role` and `content`."""
    role_key, row = tags.get("role_tag", "role"), dict(values)
    for name, value in values.items():
        listed = unpacked(value)
        messages = listed if isinstance(listed, list) else [listed]
        wrong = [one for one in messages if not isinstance(one, dict) or role_key not in one]
        if len(wrong) == len(messages):
            continue
        if wrong:
            what = f"a message must be an object with {role_key!r}, found {str(wrong[0])[:80]!r}"
            raise DataError(f"{what}: correct the row")
        made = [untagged_message(one, tags) for one in messages]
        row[name] = made if isinstance(listed, list) else made[0]
    return row


def untagged_message(message: Mapping[str, Any], tags: Tags) -> dict[str, Any]:
    """Return a message with `role` and `content`; the content of a function tag's speaker becomes tool_calls.

    Speakers without a tag keep their names.
    """
    role_key, content_key = tags.get("role_tag", "role"), tags.get("content_tag", "content")
    speaker, content = message.get(role_key), message.get(content_key)
    rest = {key: value for key, value in message.items() if key not in (role_key, content_key)}
    tag = tag_of(speaker, tags)
    if tag == "function_tag":
        return {**rest, "role": "assistant", "content": None, "tool_calls": tool_calls(content, content_key)}
    return {**rest, "role": TAGGED_ROLES[tag] if tag else speaker, "content": content}


def tag_of(speaker: Any, tags: Tags) -> str | None:
    """Return the tag of a speaker; None without a tag."""
    return next((tag for tag in TAGGED_ROLES if tag in tags and tags[tag] == speaker), None)
