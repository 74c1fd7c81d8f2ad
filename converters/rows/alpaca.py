"""Rows of Alpaca: `instruction`, `input`, `output`, and `history` of exchanges before. Pure."""

from __future__ import annotations

from ...errors import DataError
from .chat import Roles, chat_kind, exchange
from .content import Turn
from .fields import Fields, named_alike, unpacked


def _read_alpaca(fields: Fields, roles: Roles) -> list[Turn]:
    """The instruction, with the input below it where there is one, and the output; before them the history's pairs."""
    turns: list[Turn] = []
    history = unpacked(fields.get("history")) or []
    for pair in history if isinstance(history, list) else [history]:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(f"history must be a list of pairs of texts, found {str(pair)[:80]!r}: correct the row")
        turns += exchange(*pair)
    asked = fields.text("instruction")
    if fields.get("input"):
        asked += "\n\n" + fields.text("input")
    return [*turns, *exchange(asked, fields.text("output"))]


ALPACA = chat_kind(
    "alpaca",
    _read_alpaca,
    needs=named_alike("instruction", "output"),
    may=named_alike("input", "history"),
    media_in_front=True,
)
