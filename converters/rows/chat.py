"""Rows of chat datasets -> turns: messages with `role` and `content`, as the row has them. Pure.

A turn keeps what else its message says (name, tool_calls, …); `learn` is False where the data says that the loss
leaves it out. Content is read by `parts`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from ...errors import DataError
from .fields import Fields, parse_json, unpacked

Turn = dict[str, Any]
Roles = Mapping[str, str]  # what a dataset calls a speaker -> system, user, assistant or tool

USUAL_ROLES: dict[str, str] = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "bot": "assistant", "function_call": "assistant", "observation": "tool",
    "function_response": "tool",
}  # fmt: skip
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
LOSS_FIELDS = ("learn", "loss", "train", "weight")  # of a message; they speak of the assistant's alone
PLAIN_ROLES = ("system", "user", "assistant")
SYSTEM_ROLES = ("system", "developer")


def read_messages(fields: Fields, roles: Roles) -> list[Turn]:
    """OpenAI messages: `role` and `content`. Roles that are not known stay: a chat template may know them."""
    return [_turn(message, {}, roles) for message in fields.items("messages", "messages")]


def plain_chat(messages: Any, roles: Roles) -> str | None:
    """The stored messages of a chat of texts alone, which are most; None where there is more to a row.

    They are what the other functions here make of it, in a fifth of the time.
    """
    if type(messages) is not list:
        return None
    is_learnt = False
    for message in messages:
        if type(message) is not dict or len(message) != 2:
            return None
        role, content = message.get("role"), message.get("content")
        if role not in PLAIN_ROLES or role in roles or type(content) is not str:
            return None
        is_learnt = is_learnt or (role == "assistant" and content != "")
    try:
        return orjson.dumps(messages).decode() if is_learnt else None
    except TypeError:  # text that is no UTF-8: the others say which
        return None


def read_sharegpt(fields: Fields, roles: Roles) -> list[Turn]:
    """ShareGPT conversations: `from` and `value`; what `function_call` says becomes tool_calls."""
    turns = []
    for message in fields.items("messages", "messages"):
        turn = _turn(message, {"from": "role", "value": "content"}, roles)
        if turn["role"] not in ROLES:
            raise DataError(
                f"a message is from {turn['role']!r}, expected one of {', '.join([*USUAL_ROLES, *ROLES])}: "
                f"say who that is with --roles {turn['role']}=user or {turn['role']}=assistant"
            )
        if message["from"] == "function_call":
            turn |= {"content": None, "tool_calls": _tool_calls(message.get("value"))}
        turns.append(turn)
    return turns


def read_alpaca(fields: Fields, roles: Roles) -> list[Turn]:
    """instruction, with input below it where there is one, and output; history: pairs of both from before."""
    turns: list[Turn] = []
    history = unpacked(fields.get("history")) or []
    for pair in history if isinstance(history, list) else [history]:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(f"history must be a list of pairs of texts, found {str(pair)[:80]!r}: correct the row")
        turns += _exchange(*pair)
    asked = fields.text("instruction")
    if fields.get("input"):
        asked += "\n\n" + fields.text("input")
    return [*turns, *_exchange(asked, fields.text("output"))]


def read_prompt(fields: Fields, roles: Roles) -> list[Turn]:
    """prompt and response, each a text or a list of messages; of the prompt nothing is learnt."""
    prompt = _said_by(fields, "prompt", "user", roles)
    for turn in prompt:
        if turn["role"] == "assistant":
            turn["learn"] = False
    return prompt + _said_by(fields, "response", "assistant", roles)


def read_question(fields: Fields, roles: Roles) -> list[Turn]:
    """question and answer; the question may be left out where media ask it."""
    asked = "" if fields.column("question") is None else fields.text("question")
    return _exchange(asked, fields.text("answer"))


READERS: dict[str, Callable[[Fields, Roles], list[Turn]]] = {
    "messages": read_messages,
    "sharegpt": read_sharegpt,
    "alpaca": read_alpaca,
    "prompt-response": read_prompt,
    "question-answer": read_question,
}


def add_system(turns: list[Turn], fields: Fields, default: str | None) -> list[Turn]:
    """Turns that begin with the system prompt of the row's own column, or the default one, unless they have one."""
    if any(turn["role"] in SYSTEM_ROLES for turn in turns):
        return turns
    prompt = fields.text("system") if fields.get("system") else default
    return [{"role": "system", "content": prompt}, *turns] if prompt else turns


def read_tools(fields: Fields) -> list[dict[str, Any]]:
    """The tools that the assistant may call: JSON schemas, as a list or as JSON text; [] for none."""
    value = fields.get("tools")
    if value is None or value in ("", [], "[]"):
        return []
    tools = fields.items("tools", "tools")
    for tool in tools:
        if not isinstance(tool, dict):
            raise DataError(f"a tool must be an object, its JSON schema, found {str(tool)[:80]!r}: correct the row")
    return tools


def check_learnt(turns: list[Turn], *, last_only: bool) -> None:
    """Mark what the loss leaves out with `learn` False; DataError where nothing is left to learn."""
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    if last_only:
        for turn in answers[:-1]:
            turn["learn"] = False
    if not any((turn["content"] or turn.get("tool_calls")) and turn.get("learn", True) for turn in answers):
        if answers and any(not turn.get("learn", True) for turn in answers):
            raise DataError("the loss leaves out every message of the assistant: complete or remove the row")
        roles = ", ".join(sorted({turn["role"] for turn in turns}))
        raise DataError(
            f"no assistant message with content (roles: {roles}), so nothing would be learnt: complete or remove the "
            "row, or say with --roles NAME=assistant who the assistant is"
        )


def _turn(message: Any, names: Mapping[str, str], roles: Roles) -> Turn:
    """A message with its role and content under those names; null fields are left out."""
    role_name = next((name for name, meant in names.items() if meant == "role"), "role")
    if not isinstance(message, dict) or not isinstance(message.get(role_name), str):
        what = "a role" if role_name == "role" else f"{role_name!r}"
        raise DataError(f"a message must be an object with {what}, found {str(message)[:80]!r}: correct the row")
    turn = {names.get(key, key): value for key, value in message.items() if value is not None}
    turn |= {"role": roles.get(turn["role"], turn["role"]), "content": turn.get("content")}
    said = [_is_learnt(key, turn.pop(key)) for key in LOSS_FIELDS if key in turn]
    if turn["role"] == "assistant" and not all(said):
        turn["learn"] = False
    return turn


def _is_learnt(key: str, value: Any) -> bool:
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        raise DataError(
            f"a message has {key} {value!r}, which must be 0 or 1, or false or true: round it, or remove the field"
        )
    return bool(value)


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    called = parse_json(value, "value") if isinstance(value, str) else value
    calls = called if isinstance(called, list) else [called]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise DataError(f"a function call must be an object with a name, found {json.dumps(call)[:80]}: correct it")
    return [{"type": "function", "function": call} for call in calls]


def _said_by(fields: Fields, role: str, speaker: str, roles: Roles) -> list[Turn]:
    value = fields.get(role)
    if isinstance(value, list):
        return [_turn(message, {}, roles) for message in fields.items(role, "messages")]
    return [{"role": speaker, "content": fields.text(role)}]


def _exchange(asked: str, answered: str) -> list[Turn]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
