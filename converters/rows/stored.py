"""Samples of a stored dataset, which are stored again as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import DataError
from ...types import Sample
from ..media.references import SampleMedia
from .fields import Fields
from .kinds import column_roles
from .mapper import Mapper
from .options import SchemaOptions
from .row_kind import ReadOptions, RowKind
from .schemas import Schema

STORED = "stored samples"
_ROLES = {  # of a stored schema, the roles of the columns that its rows have (see sources/mds.py)
    "messages": ("messages", "tools"),
    "preference": ("prompt", "chosen", "rejected", "response", "label", "tools"),
    "image": ("images", "label"),
    "text": ("text",),
    "tokens": ("input_ids", "loss_spans"),
}


def stored_mapper(schema: str, columns: Mapping[str, str]) -> Mapper:
    """The mapper of a dataset's samples. schema: as its description calls it. columns: name -> MDS encoding."""
    kind = RowKind(name=STORED, schema=Schema(schema, dict(columns)), read=_never, read_simple=_as_it_is)
    shown = ", ".join(f"{name} ({encoding})" for name, encoding in columns.items())
    return Mapper(
        kind=kind,
        options=SchemaOptions(),
        found={},
        kept={},
        names=frozenset(columns),
        description=f"{STORED} of schema {schema}: {shown}",
    )


def is_stored(mapper: Mapper) -> bool:
    """Whether it is a stored_mapper: samples may be moved without being decoded."""
    return mapper.kind.name == STORED


def _as_it_is(values: Mapping[str, Any], found: Mapping[str, str], options: ReadOptions) -> Sample:
    return values


def _never(fields: Fields, options: ReadOptions, media: SampleMedia) -> Sample:
    raise DataError("a stored sample is not mapped again")


def stored_options(options: SchemaOptions, schema: str | None) -> SchemaOptions:
    """Return options by which the rows of a stored dataset are read from what its samples were made of.

    Kept columns of other roles (system, label) are not read, but for those that the user names.
    """
    if schema not in _ROLES:
        return options
    kept = {role: "" for role in column_roles() if role not in _ROLES[schema]}
    return replace(options, columns={**kept, **options.columns})
