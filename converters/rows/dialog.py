"""Rows that hold a conversation as a list of texts, which the user and the assistant say by turns. Pure."""

from __future__ import annotations

from ...errors import DataError
from .chat import Roles, chat_kind
from .content import Turn
from .fields import Fields, unpacked

_SPEAKERS = ("user", "assistant")


def _read_dialog(fields: Fields, roles: Roles) -> list[Turn]:
    """The user says the first text, the assistant the second, and so on."""
    texts = fields.items("dialog", "texts")
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            name = fields.column("dialog")
            raise DataError(f"turn {number} in column {name!r} must be text, found {type(text).__name__}: correct it")
    return [{"role": _SPEAKERS[number % 2], "content": text} for number, text in enumerate(texts)]


def begins_with_text(fields: Fields, role: str = "dialog") -> bool:
    """A list of texts, and not of messages, which may be JSON text."""
    value = unpacked(fields.get(role))
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        return False
    return not isinstance(unpacked(f"[{value[0]}]"), list) or not value[0].startswith("{")


DIALOG = chat_kind(
    "dialog",
    _read_dialog,
    needs={"dialog": ("dialog", "dialogue", "utterances", "conversations", "conversation")},
    accepts=begins_with_text,
    needs_text="dialog (or dialogue, utterances, conversations, conversation), a list of texts",
)
