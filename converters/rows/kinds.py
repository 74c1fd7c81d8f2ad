"""The kinds of rows that are known, and which of them a row is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import DataError
from .fields import Fields, parse_json

_CHAT_EXTRAS = ("system", "tools", "images", "audios", "videos")


@dataclass(frozen=True, slots=True)
class Format:
    """needs, may: roles of columns that a row of it has, or may have. schema: what it is stored as."""

    name: str
    schema: str
    needs: tuple[str, ...]
    may: tuple[str, ...] = ()

    @property
    def roles(self) -> tuple[str, ...]:
        return self.needs + self.may


FORMATS: dict[str, Format] = {
    form.name: form
    for form in (  # the first that fits is taken
        Format("tokens", "tokens", ("input_ids",), ("labels", "loss_mask", "loss_spans", "attention_mask")),
        Format("messages", "messages", ("messages",), _CHAT_EXTRAS),
        Format("sharegpt", "messages", ("messages",), _CHAT_EXTRAS),
        Format("alpaca", "messages", ("instruction", "output"), ("input", "history", *_CHAT_EXTRAS)),
        Format("prompt-response", "messages", ("prompt", "response"), _CHAT_EXTRAS),
        Format("question-answer", "messages", ("answer",), ("question", *_CHAT_EXTRAS)),
        Format("text", "text", ("text",)),
        Format("image-label", "columns", ("images", "label")),
        Format("columns", "columns", ()),
    )
}
SINGLE_TURN = ("alpaca", "prompt-response", "question-answer")  # media that nothing points to come before the text

STORED_COLUMNS: dict[str, dict[str, str]] = {
    "messages": {"messages": "str", "media": "bytes"},
    "tokens": {"input_ids": "ndarray:int32", "loss_spans": "ndarray:int32"},
    "text": {"text": "str"},
    "image-label": {"image": "bytes", "label": "str"},
    "columns": {},
}


def formats_of(row: Mapping[str, Any], columns: Mapping[str, str]) -> list[str]:
    """Names of the formats that a row fits and that use all roles that the user named columns for, best first."""
    fields = Fields(row, columns)
    named = {role for role, column in columns.items() if column}
    return [name for name, form in FORMATS.items() if form.needs and named <= set(form.roles) and _fits(form, fields)]


def _fits(form: Format, fields: Fields) -> bool:
    if any(fields.get(role) is None for role in form.needs):
        return False
    if form.name in ("messages", "sharegpt"):
        return _says_from(fields) == (form.name == "sharegpt")
    if form.name == "question-answer":
        return any(fields.get(role) is not None for role in ("question", "images", "audios", "videos"))
    return True


def _says_from(fields: Fields) -> bool:
    """Whether the first message names its speaker by `from`."""
    value = fields.get("messages")
    if isinstance(value, str):
        try:
            value = parse_json(value, "messages")
        except DataError:
            return False  # said where the row is read
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and first.get("from") is not None and first.get("role") is None
