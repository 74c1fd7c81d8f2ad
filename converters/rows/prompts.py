"""Rows of what is asked and what is answered: `prompt` and `response`, `question` and `answer`. Pure."""

from __future__ import annotations

from .chat import MEDIA_COLUMNS, Roles, chat_kind, exchange, turn_of
from .content import Turn
from .fields import Fields, named_alike


def _read_prompt(fields: Fields, roles: Roles) -> list[Turn]:
    """prompt and response, each a text or a list of messages; of the prompt nothing is learnt."""
    prompt = _said_by(fields, "prompt", "user", roles)
    for turn in prompt:
        if turn["role"] == "assistant":
            turn["learn"] = False
    return prompt + _said_by(fields, "response", "assistant", roles)


def _said_by(fields: Fields, role: str, speaker: str, roles: Roles) -> list[Turn]:
    value = fields.get(role)
    if isinstance(value, list):
        return [turn_of(message, roles) for message in fields.items(role, "messages")]
    return [{"role": speaker, "content": fields.text(role)}]


def _read_question(fields: Fields, roles: Roles) -> list[Turn]:
    """question and answer; the question may be left out where media ask it."""
    asked = "" if fields.column("question") is None else fields.text("question")
    return exchange(asked, fields.text("answer"))


def _asks(fields: Fields) -> bool:
    return any(fields.get(role) is not None for role in ("question", *MEDIA_COLUMNS))


PROMPT_RESPONSE = chat_kind(
    "prompt-response",
    _read_prompt,
    needs={"prompt": ("prompt",), "response": ("response", "completion")},
    media_in_front=True,
)
QUESTION_ANSWER = chat_kind(
    "question-answer",
    _read_question,
    needs=named_alike("answer"),
    may=named_alike("question"),
    accepts=_asks,
    needs_text="question or media, and answer",
    media_in_front=True,
)
