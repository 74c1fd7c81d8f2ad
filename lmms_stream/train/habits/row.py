"""A field of transformers' or TRL's arguments, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass
from typing import Any, Literal

Fate = Literal["honoured", "moot", "refused"]


@dataclass(frozen=True, slots=True)
class Row:
    """What becomes of a field.

    text: of an honoured field what it becomes, of a moot one why it cannot matter, of a refused one the reason and the
    remedy. same: whether a value says no more than the field's default, where that is not plain from the default
    itself (their classes replace some defaults by others when they are made).
    """

    name: str
    fate: Fate
    text: str
    same: Callable[[Any], bool] | None = None

    def is_given(self, value: Any, field: Field[Any]) -> bool:
        """Whether a value is other than the default."""
        if self.same is not None and self.same(value):
            return False
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        return bool(value != default)


def honoured(name: str, text: str) -> Row:
    return Row(name, "honoured", text)


def moot(name: str, text: str, same: Callable[[Any], bool] | None = None) -> Row:
    return Row(name, "moot", text, same)


def refused(name: str, text: str, same: Callable[[Any], bool] | None = None) -> Row:
    return Row(name, "refused", text, same)
