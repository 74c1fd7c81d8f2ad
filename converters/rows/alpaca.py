"""Rows of Alpaca: `instruction`, `input`, `output`, and `history` of exchanges before. Pure."""

from __future__ import annotations

from typing import Any

from ...errors import DataError
from .chat import Roles, chat_kind, exchange
from .content import Turn
from .fields import Fields, is_filled, unpacked


def exchanges(history: Any) -> list[Turn]:
    """Turns of a history of questions and answers: a list of pairs, also as JSON text; [] for none."""
    turns: list[Turn] = []
    pairs = unpacked(history) or []
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(
                f"history must be a list of pairs of texts, found {str(pair)[:80]!r}: correct the row, or pass "
                "--columns history= to leave the column out"
            )
        turns += exchange(*pair)
    return turns


def with_input(instruction: str, given: str) -> str:
    """Return the instruction, with the input below it if there is one."""
    return f"{instruction}\n\n{given}" if given else instruction


def _read_alpaca(fields: Fields, roles: Roles) -> list[Turn]:
    """The instruction, with the input below it where there is one, and the output; before them the history's pairs."""
    turns = exchanges(fields.get("history"))
    asked = with_input(fields.text("instruction"), fields.text("input") if is_filled(fields.get("input")) else "")
    return [*turns, *exchange(asked, fields.text("output"))]


def _asks_by_instruction(fields: Fields) -> bool:
    """Whether a response (Dolly's name of the output) is that of the instruction, and not of a prompt beside it."""
    others = set() if "instruction" in fields.columns else {"prompt", "inputs", "query"} & fields.values.keys()
    return fields.column("output") != "response" or not others


ALPACA = chat_kind(
    "alpaca",
    _read_alpaca,
    needs={"instruction": ("instruction",), "output": ("output", "response")},
    may={"input": ("input", "context"), "history": ("history",)},
    accepts=_asks_by_instruction,
    media_in_front=True,
)
