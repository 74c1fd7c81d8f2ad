"""What is stored of samples: the schemas of datasets, each a name and columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schema:
    """name: as a dataset's description has it. columns: stored column -> MDS encoding."""

    name: str
    columns: Mapping[str, str]


MESSAGES = Schema("messages", {"messages": "str", "media": "bytes"})
PREFERENCE = Schema("preference", {"messages": "str", "media": "bytes"})  # a prompt and its answers
TOKENS = Schema("tokens", {"input_ids": "ndarray:int32", "loss_spans": "ndarray:int32"})
# Documents laid end to end: the tokens at which one begins or, at 0, may go on from the sample before.
DOCUMENTS = Schema("tokens", {"document_starts": "ndarray:int32", **TOKENS.columns})
TEXT = Schema("text", {"text": "str"})
IMAGE = Schema("image", {"image": "bytes", "facts": "str", "label": "int"})  # label -1: none
# Those that processors read. Of two with the same columns the first is meant where a dataset does not name its own.
READ_SCHEMAS = {schema.name: schema for schema in (MESSAGES, PREFERENCE, TOKENS, TEXT, IMAGE)}


def columns_schema(columns: Mapping[str, str]) -> Schema:
    """A schema that no processor reads: columns that a user's own code reads."""
    return Schema("columns", columns)
