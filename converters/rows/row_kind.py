"""Kinds of rows: detection, columns to read, and stored schema; choices of the user between kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...errors import DataError
from ...types import Sample
from .fields import Columns, Fields
from .references import SampleMedia
from .schemas import Schema


class ReadOptions(Protocol):
    """Fields of SchemaOptions that decide how a row is read."""

    @property
    def system(self) -> str | None: ...
    @property
    def roles(self) -> Mapping[str, str]: ...
    @property
    def learn(self) -> str: ...


Read = Callable[[Fields, ReadOptions, SampleMedia], Sample]
ReadSimple = Callable[[Mapping[str, Any]], Sample | None]


def always(fields: Fields) -> bool:
    return True


def no_simple(found: Mapping[str, str], options: ReadOptions) -> ReadSimple | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKind:
    """One kind of rows. Can be pickled: its functions are module functions.

    name: for --kind. needs, may: required and optional roles of columns, each with the usual names of its column; a
    kind without required roles is never detected, only requested. accepts: whether a row with all required columns is
    of this kind. needs_text: requirements in words, if the names of columns are not enough. schema: of the samples.
    read: returns the sample of a row, and adds its media to SampleMedia; DataError for a row that does not fit.

    simple: returns a faster reader of the most frequent rows, from the found columns (role -> column); the reader gets
    rows without columns of other rules, and returns None for rows that it does not read.
    """

    name: str
    needs: Columns = field(default_factory=dict)
    may: Columns = field(default_factory=dict)
    accepts: Callable[[Fields], bool] = always
    needs_text: str = ""
    schema: Schema
    read: Read
    simple: Callable[[Mapping[str, str], ReadOptions], ReadSimple | None] = no_simple

    @property
    def columns(self) -> Columns:
        """All roles, with the usual names of their columns."""
        return {**self.needs, **self.may}

    @property
    def needed(self) -> str:
        """Requirements of a row, in words."""
        return self.needs_text or " and ".join("/".join(names) for names in self.needs.values())

    def fits(self, row: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
        """Return whether a row is of this kind, and the kind has all roles for which the user named columns."""
        if not self.needs or any(column and role not in self.columns for role, column in columns.items()):
            return False
        fields = Fields(row, self.columns, columns)
        return all(fields.get(role) is not None for role in self.needs) and self.accepts(fields)


# Choices of the user.


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Options to read rows with. why: the condition or the effect, for people; "" if the options tell."""

    columns: Mapping[str, str] = field(default_factory=dict)
    kind: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    why: str = ""


class UndecidedError(DataError):
    """The user must choose how to read rows. choices: the best first. rest: a remedy without a proof."""

    def __init__(self, what: str, choices: Sequence[Choice], rest: str = ""):
        super().__init__(what)
        self.choices, self.rest = choices, rest
