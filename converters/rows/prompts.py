"""Rows of what is asked and what is answered: `prompt` and `response`, `question` and `answer`, media and their `text`.
Pure.
"""

from __future__ import annotations

from typing import Any

from ...errors import DataError
from .chat import MEDIA_COLUMNS, MEMBER_IMAGES, Roles, chat_kind, exchange
from .content import MEDIA_ROLES, Turn, file_kind, tool_calls
from .exchanges import exchanges
from .fields import QUESTIONS, Fields, named_alike, unpacked
from .messages import are_messages, message_turn


def _read_prompt(fields: Fields, roles: Roles) -> list[Turn]:
    """The history's pairs, the prompt and the response, which are texts or lists of messages; the prompt is not trained
    on.
    """
    prompt = _said_by(fields, "prompt", "user", roles)
    for turn in prompt:
        if turn["role"] == "assistant":
            turn["learn"] = False
    return [*exchanges(fields.get("history")), *prompt, *_said_by(fields, "response", "assistant", roles)]


def _said_by(fields: Fields, role: str, speaker: str, roles: Roles) -> list[Turn]:
    value = fields.get(role)
    if speaker == "assistant" and _are_calls(unpacked(value)) and fields.get("tools"):
        return [
            {"role": speaker, "content": None, "tool_calls": tool_calls(unpacked(value), fields.column(role) or role)}
        ]
    if isinstance(value, list) or are_messages(unpacked(value)):
        return [message_turn(message, roles) for message in fields.items(role, "messages")]
    return [{"role": speaker, "content": fields.text(role)}]


def _are_calls(value: Any) -> bool:
    """Whether a value is a list of calls of functions (xLAM's), and not of messages."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(each, dict) and {"name", "arguments"} <= each.keys() and "role" not in each for each in value
        )
    )


def _read_question(fields: Fields, roles: Roles) -> list[Turn]:
    """The history's pairs, question and answer; the question may be left out where media ask it."""
    asked = "" if fields.column("question") is None else fields.text("question")
    return [*exchanges(fields.get("history")), *exchange(asked, fields.text("answer"))]


def _asks(fields: Fields) -> bool:
    """Whether there is a question, or media and nothing else that may be one."""
    if fields.get("question") is not None:
        return True
    others = () if "question" in fields.columns else QUESTIONS
    return _has_media(fields) and not any(isinstance(fields.values.get(name), (str, list)) for name in others)


def _read_caption(fields: Fields, roles: Roles) -> list[Turn]:
    """The media of the row, which the user shows, and their text, which the assistant says of them."""
    text = fields.text("text")
    if not _shows(fields):
        raise DataError("the row has a text and no media that it is of: complete it, or convert texts with --kind text")
    slot = next(
        (f"<{kind}>" for kind, role in MEDIA_ROLES.items() if fields.references(role) and f"<{kind}>" in text), ""
    )
    if slot:
        raise DataError(
            f"the text has {slot} in it, so that it is no caption: write the row as messages, or pass --kind text"
        )
    turns = exchange("", text)
    kind = file_kind(fields.get("file_name"))
    if kind and not _has_media(fields):
        turns[0]["content"] = [{"type": kind, "path": fields.get("file_name")}]
    return turns


def _shows(fields: Fields) -> bool:
    return _has_media(fields) or file_kind(fields.get("file_name")) is not None


def _has_media(fields: Fields) -> bool:
    return any(fields.references(role) for role in MEDIA_COLUMNS)


PROMPT_RESPONSE = chat_kind(
    "prompt-response",
    _read_prompt,
    needs={"prompt": ("prompt", "inputs", "query"), "response": ("response", "completion", "targets")},
    may=named_alike("history"),
    media_in_front=True,
)
QUESTION_ANSWER = chat_kind(
    "question-answer",
    _read_question,
    needs={"answer": ("answer", "response")},
    may=named_alike("question", "history"),
    accepts=_asks,
    needs_text="question or media, and answer (or response)",
    media_in_front=True,
)
CAPTION = chat_kind(
    "caption",
    _read_caption,
    needs={"text": ("text", "caption", "txt")},
    may={**named_alike("file_name"), **MEMBER_IMAGES},
    accepts=_shows,
    needs_text="media and text",
    media_in_front=True,
)
