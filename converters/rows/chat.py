"""Chats of any row format: turns -> stored messages; parts that all kinds of chats share.

A turn (see content.py) keeps the other keys of its message (name, tool_calls, …); `learn` is False if the data excludes
the message from the loss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from ...errors import DataError
from ...processors.chat_template import REASONING_KEYS
from ...types import Sample
from . import schemas
from .content import MEDIA_ROLES, Turn, notes_of, store_content, text_of, tool_calls
from .fields import Columns, Fields, is_filled, parse_json, unpacked
from .references import SampleMedia
from .row_kind import ReadOptions, ReadSimple, RowKind, always, no_simple
from .speakers import CALLERS, ROLES, SPEAKER, USUAL_ROLES, readings_of, readings_said, role_of
from .vendors import usual_tools

Roles = Mapping[str, str]  # a dataset's name of a speaker -> system, user, assistant or tool

# Keys of an assistant message that specify whether it is trained on: of OpenAI (weight), ms-swift (loss, loss_scale),
# axolotl (train, training), XTuner (output_with_loss) and others. Axolotl's DETAILS name parts of a message.
LOSS_FIELDS = (
    "learn", "loss", "loss_mask", "loss_scale", "loss_weight", "train", "trainable", "training", "weight",
    "output_with_loss",
)  # fmt: skip
DETAILS = ("train_detail", "training_detail")
CALLS = ("tool_calls", "function_call")
READ_KEYS = {"role", "content", "learn", "name", "tool_call_id", *CALLS, *REASONING_KEYS}
SYSTEM_ROLES = ("system", "developer")
MEDIA_COLUMNS: Columns = {"images": ("images", "image"), "audios": ("audios", "audio"), "videos": ("videos", "video")}
# Media next to one text or label are also members of WebDataset, whose columns are named by extensions.
MEMBER_IMAGES: Columns = {"images": (*MEDIA_COLUMNS["images"], "jpg", "jpeg", "png", "webp")}
MEMBER_MEDIA: Columns = {
    **MEMBER_IMAGES,
    "audios": (*MEDIA_COLUMNS["audios"], "wav", "flac", "mp3", "ogg", "opus", "m4a"),
    "videos": (*MEDIA_COLUMNS["videos"], "mp4", "webm"),
}
# Columns that any chat may have.
CHAT_EXTRAS: Columns = {
    "system": ("system", "system_prompt"),
    "tools": ("tools", "functions"),
    **MEDIA_COLUMNS,
}


def chat_kind(
    name: str,
    read_turns: Callable[[Fields, Roles], list[Turn]],
    *,
    needs: Columns,
    may: Columns | None = None,
    accepts: Callable[[Fields], bool] = always,
    needs_text: str = "",
    media_in_front: bool = False,
    simple: Callable[[Mapping[str, str], ReadOptions], ReadSimple | None] = no_simple,
) -> RowKind:
    """Return a kind of rows for chats; the arguments are fields of RowKind.

    read_turns: returns the turns of a row, without the system prompt in a column. media_in_front: media without a slot
    in a text come before the first text of the user; otherwise they are an error.
    """
    return RowKind(
        name=name,
        needs=needs,
        may={**(may or {}), **CHAT_EXTRAS, **(may or {})},
        accepts=accepts,
        needs_text=needs_text,
        schema=schemas.MESSAGES,
        read=partial(_read_chat, read_turns=read_turns, media_in_front=media_in_front),
        simple=simple,
    )


def _read_chat(
    fields: Fields,
    options: ReadOptions,
    media: SampleMedia,
    *,
    read_turns: Callable[[Fields, Roles], list[Turn]],
    media_in_front: bool,
) -> Sample:
    """Return the stored messages of a row and its media: a list of messages in JSON, or {"messages", "tools"}.

    Messages outside of the loss have "learn": false; media parts have {"type", "mime", "span": [offset, size]} and
    facts (see media/types.py).
    """
    turns = add_system(read_turns(fields, {**USUAL_ROLES, **options.roles}), fields, options.system)
    waiting = {kind: fields.references(role) for kind, role in MEDIA_ROLES.items() if fields.column(role)}
    stored: Any = store_content(turns, waiting, media, in_front=media_in_front)
    _check_learnt(stored, fields, last_only=options.learn == "last")
    note_unread(stored, fields)
    tools = read_tools(fields)
    text = json_of({"messages": stored, "tools": tools} if tools else stored)
    return {"messages": text, "media": media.data}


def json_of(stored: Any) -> str:
    try:
        if _holds_nan(stored):
            raise DataError("the messages hold NaN or Infinity, which JSON has not: correct or remove the row")
        return orjson.dumps(stored).decode()
    except (TypeError, RecursionError) as reason:
        try:  # integers of more than 64 bits, which orjson rejects
            text = json.dumps(stored, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            return text.encode().decode()
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"the messages hold what JSON cannot ({reason}): correct or remove the row") from error


def _holds_nan(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_nan, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_nan, value))
    return isinstance(value, float) and not math.isfinite(value)


def exchange(asked: str, answered: str) -> list[Turn]:
    """Return a question of the user and its answer."""
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


def note_unread(turns: Sequence[Turn], fields: Fields) -> None:
    """Record filled keys that neither this module nor most chat templates read, unknown speakers, and notes_of."""
    fields.unread.update(notes_of(turns))
    fields.unread.update(f"{SPEAKER}{turn['role']}" for turn in turns if turn["role"] not in ROLES)
    fields.unread.update(key for turn in turns for key in turn if key not in READ_KEYS and is_filled(turn[key]))


def turn_of(message: Any, roles: Roles) -> Turn:
    """Return the turn of a message of OpenAI (`role`, `content`) or ShareGPT (`from`, `value`).

    Null fields are left out, except `content`, which keeps its position. The content of a speaker of function calls
    becomes tool_calls. Unknown roles of OpenAI's messages stay: a chat template may know them.
    """
    speaker, names = message.get("role") if isinstance(message, dict) else None, dict[str, str]()
    if speaker is None and isinstance(message, dict) and ("from" in message or "value" in message):
        speaker, names = message.get("from"), {"from": "role", "value": "content"}
    if not isinstance(speaker, str):
        what = "'from'" if names else "a role"
        is_pair = isinstance(message, dict) and not names and "role" not in message
        also = ", or name a question and its answer `input` and `output`" if is_pair else ""
        raise DataError(f"a message must be an object with {what}, found {str(message)[:80]!r}: correct the row{also}")
    named = ((names.get(key, key), value) for key, value in message.items())
    turn = {key: value for key, value in named if value is not None or key == "content"}
    turn = with_calls(turn | {"role": role_of(speaker, roles), "content": turn.get("content")})
    if names and turn["role"] not in ROLES:
        raise DataError(
            f"a message is from {turn['role']!r}, expected one of {', '.join([*USUAL_ROLES, *ROLES])}: map this role "
            f"with --roles {turn['role']}=user or {turn['role']}=assistant"
        )
    if detail := next((key for key in DETAILS if key in turn), None):
        raise DataError(
            f"a message has {detail!r}, which names parts to train on, but a message is trained on as a whole: make "
            "each part a message, with train true or false, or remove the field"
        )
    said = {key: turn.pop(key) for key in LOSS_FIELDS if key in turn}
    wrong = next((key for key, value in said.items() if not isinstance(value, (int, float)) or value not in (0, 1)), "")
    if wrong:
        raise DataError(
            f"a message has {wrong} {said[wrong]!r}, expected 0, 1, false or true, because a message is trained on or "
            "not: round the value, with --map for many values, or remove the field"
        )
    if turn["role"] == "assistant" and not all(said.values()):
        turn["learn"] = False
    if speaker.lower() in CALLERS and turn["role"] == "assistant" and "tool_calls" not in turn:
        calls = tool_calls(turn["content"], "value" if names else "content")
        return {**turn, "content": None, "tool_calls": calls}
    return turn


def with_calls(message: Turn) -> Turn:
    """Return a message with function calls in objects; tables of texts hold calls in JSON text.

    DataError for tool_calls that are not a list of objects, and for invalid JSON.
    """
    for key in CALLS:
        called = message.get(key)
        if isinstance(called, str):
            called = parse_json(called, key) if called else None
            read = {**message, key: called}
            message = {name: value for name, value in read.items() if name != key or called is not None}
        are_calls = isinstance(called, list) and all(isinstance(call, Mapping) for call in called)
        if key == "tool_calls" and called is not None and not are_calls:
            raise DataError(f"a message has tool_calls {str(called)[:80]!r}: write a list of objects, or remove them")
    if message.get("function_call") and not message.get("tool_calls"):  # OpenAI's former key
        call = {"type": "function", "function": message["function_call"]}
        message = {key: value for key, value in message.items() if key != "function_call"} | {"tool_calls": [call]}
    if message.get("tool_calls"):
        message = {**message, "tool_calls": [_filled_call(call) for call in message["tool_calls"]]}
    return message


def _filled_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call without null keys of tables of structs, but with its function and arguments."""
    filled = {key: value for key, value in call.items() if value is not None or key in ("function", "arguments")}
    function = filled.get("function")
    return {**filled, "function": _filled_call(function)} if isinstance(function, Mapping) else filled


def check_tags(messages: Sequence[Mapping[str, Any]], what: str) -> None:
    """Raise DataError, with the tags to pass, if messages without a role or content hold them under other keys."""
    if readings := readings_of(messages):
        raise DataError(
            f"messages have no {what} (but {', '.join(map(str, messages[0]))}), so nothing would be trained on: pass "
            f"{readings_said(readings)} for keys with other names"
        )


def add_system(turns: list[Turn], fields: Fields, default: str | None) -> list[Turn]:
    """Return the turns, with a system prompt from the row's column or the default if the turns have none.

    DataError if the turns have system prompts and the column's prompt is not among them; outer white space is ignored.
    """
    own = fields.get("system") or None
    if isinstance(own, list) and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in own):
        own = "\n".join(part["text"] for part in own)  # blocks of Anthropic and Bedrock
    own = fields.text("system") if own is not None and not isinstance(own, str) else own
    said = [text_of(turn["content"]).strip() for turn in turns if turn["role"] in SYSTEM_ROLES]
    if said and own is not None and own.strip() not in said:
        raise DataError(
            f"column {fields.column('system')!r} holds a system prompt, and a message holds another: keep one of them, "
            "or pass --columns system= to leave the column out"
        )
    prompt = None if said else own or default
    return [{"role": "system", "content": prompt}, *turns] if prompt else turns


def read_tools(fields: Fields) -> list[dict[str, Any]]:
    """Return the assistant's tools: JSON schemas, from a list or JSON text; [] for none."""
    value = fields.get("tools")
    if value is None or value in ("", [], "[]"):
        return []
    tools = fields.items("tools", "tools")
    if wrong := [tool for tool in tools if not isinstance(tool, dict)]:
        raise DataError(f"a tool must be an object, its JSON schema, found {str(wrong[0])[:80]!r}: correct the row")
    return usual_tools(tools, column=fields.column("tools"))


def _check_learnt(turns: list[Turn], fields: Fields, *, last_only: bool) -> None:
    """Set `learn` to False for turns outside of the loss; DataError if no turn is left to train on."""
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    if last_only:
        for turn in answers[:-1]:
            turn["learn"] = False
    if not any((turn["content"] or turn.get("tool_calls")) and turn.get("learn", True) for turn in answers):
        if answers and any(not turn.get("learn", True) for turn in answers):
            raise DataError("the loss leaves out every message of the assistant: complete or remove the row")
        listed = unpacked(fields.get("messages")) if "messages" in fields.usual else None
        messages = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        if not any({"content", "value"} & each.keys() for each in messages):
            check_tags(messages, "content")
        roles = {turn["role"] for turn in turns}
        is_prompt = roles <= {"user", *SYSTEM_ROLES}
        other = "lmms_stream.rl reads rows of prompts" if is_prompt else "say with --roles NAME=assistant who that is"
        raise DataError(
            f"no assistant message with content (roles: {', '.join(sorted(roles))}), so nothing would be learnt: "
            f"complete or remove the row; {other}"
        )
