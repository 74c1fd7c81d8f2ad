"""Schema and columns of stored rows, checked against the options. options + mapper of rows -> schema and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from ..errors import ConfigError, DataError
from ..processors.base import Processor
from .options import ConvertOptions
from .rows import schemas
from .rows.mapper import Mapper
from .sources.units import Source
from .writing.reading import Reading


def with_processor(options: ConvertOptions, sources: Sequence[Source]) -> ConvertOptions:
    """Return the options with a built processor; without a named type, the first rows of the sources decide."""
    choice = options.choice
    if choice is None:
        return options
    if choice.type is not None:
        return replace(options, processor=choice.build(), choice=None)
    with closing(Reading(sources, options.schema, say=lambda text: None)) as reading:
        processor = choice.build(reading.mapper.schema, has_media=reading.has_media)
        return replace(options, processor=processor, choice=None)


def check_processor(processor: Processor | None, mapper: Mapper) -> None:
    """Raise ConfigError for a processor that does not read the mapper's samples."""
    if processor is not None and processor.schema != mapper.schema:
        remedy = "leave --processor out, or say what the rows are with --kind and --columns"
        raise ConfigError(
            f"the rows are {mapper.schema!r}, and {type(processor).__name__} reads {processor.schema!r}: {remedy}"
        )


def stored_columns(options: ConvertOptions, mapper: Mapper) -> Mapping[str, str]:
    """Columns to store: name -> encoding. ConfigError for rows whose tokens cannot be concatenated."""
    if options.concat is None:
        return schemas.TOKENS.columns if options.tokenize else mapper.columns
    if options.processor is None and mapper.schema != schemas.TOKENS.name:
        raise ConfigError(
            f"--concat lays tokens end to end, and the rows are {mapper.schema!r}: pass --tokenizer PATH, and for "
            "texts --processor text"
        )
    if "document_starts" in mapper.columns:
        raise ConfigError("the rows are already samples of --concat: name the original rows as the source")
    others = sorted(mapper.columns.keys() - schemas.READ_SCHEMAS[mapper.schema].columns.keys())
    if others:
        raise ConfigError(
            f"the rows have {', '.join(others)}, which a sample of --concat, made of several rows, cannot hold: leave "
            f"--keep out, or for an MDS dataset pass --kind {mapper.schema} to read only its other columns"
        )
    return schemas.DOCUMENTS.columns


def check_columns(columns: Mapping[str, str], expected: Mapping[str, str] | None, *, source: str) -> None:
    """Raise DataError if samples have other columns than expected."""
    if expected is not None and dict(columns) != dict(expected):
        found, there = (
            ", ".join(f"{name} ({each[name]})" for name in sorted(each)) for each in (dict(columns), dict(expected))
        )
        raise DataError(
            f"{source} gives samples with {found}, and samples of the dataset have {there}: convert it to another "
            "target, or describe its rows with --kind, --columns and --keep"
        )


def stored_schema(options: ConvertOptions, mapper: Mapper) -> str:
    """Name of the schema in the dataset's description."""
    return schemas.TOKENS.name if options.stores_tokens else mapper.schema
