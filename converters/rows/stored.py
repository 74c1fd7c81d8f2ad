"""Samples of a stored dataset, which are stored again as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import DataError
from ...types import Sample
from ..media.references import SampleMedia
from .fields import Fields
from .mapper import Mapper
from .options import SchemaOptions
from .row_kind import ReadOptions, RowKind
from .schemas import Schema

STORED = "stored samples"


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
