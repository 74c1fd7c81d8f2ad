"""What a kind of rows is: how one is recognized, which of its columns are read, and what is stored of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...types import Sample
from .fields import Columns, Fields
from .references import SampleMedia
from .schemas import Schema


class ReadOptions(Protocol):
    """What of SchemaOptions decides how a row is read."""

    @property
    def system(self) -> str | None: ...
    @property
    def roles(self) -> Mapping[str, str]: ...
    @property
    def learn(self) -> str: ...


Read = Callable[[Fields, ReadOptions, SampleMedia], Sample]
ReadSimple = Callable[[Mapping[str, Any], Mapping[str, str], ReadOptions], Sample | None]


def always(fields: Fields) -> bool:
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKind:
    """One kind of rows. Can be pickled, so its functions are those of modules.

    name: as --kind has it. needs, may: roles of the columns that a row of it has, or may have, each with the usual
    names of its column; a kind that needs none is never found, only asked for. accepts: whether a row that has all
    that is needed is of this kind. needs_text: what it needs, in words, where the columns' names do not say all.
    schema: what is stored. read: a row as a sample of that schema, its media put into SampleMedia; DataError for a row
    that does not fit.
    read_simple: the same for the most frequent rows in less time, from the row's values and the columns that were found
    (role -> column); None where there is more to a row.
    """

    name: str
    needs: Columns = field(default_factory=dict)
    may: Columns = field(default_factory=dict)
    accepts: Callable[[Fields], bool] = always
    needs_text: str = ""
    schema: Schema
    read: Read
    read_simple: ReadSimple | None = None

    @property
    def columns(self) -> Columns:
        """All its roles, with the usual names of their columns."""
        return {**self.needs, **self.may}

    @property
    def needed(self) -> str:
        """What a row of it needs, in words."""
        return self.needs_text or " and ".join("/".join(names) for names in self.needs.values())

    def fits(self, row: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
        """Whether a row is of this kind, and all roles that the user named columns for are its own."""
        if not self.needs or any(column and role not in self.columns for role, column in columns.items()):
            return False
        fields = Fields(row, self.columns, columns)
        return all(fields.get(role) is not None for role in self.needs) and self.accepts(fields)
