"""Schemas of datasets: names and columns of stored samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schema:
    """Schema of samples. name: in a dataset's description. columns: stored column -> MDS encoding."""

    name: str
    columns: Mapping[str, str]


MESSAGES = Schema("messages", {"messages": "str", "media": "bytes"})
PREFERENCE = Schema("preference", {"messages": "str", "media": "bytes"})  # prompt and answers
TOKENS = Schema("tokens", {"input_ids": "ndarray:int32", "loss_spans": "ndarray:int32"})
# Concatenated documents: first tokens of documents; token 0 may continue the previous sample's document.
DOCUMENTS = Schema("tokens", {"document_starts": "ndarray:int32", **TOKENS.columns})
TEXT = Schema("text", {"text": "str"})
IMAGE = Schema("image", {"image": "bytes", "facts": "str", "label": "int"})  # label -1: no label
# Schemas of processors. Of two schemas with equal columns, the first is assumed for a dataset without a schema's name.
READ_SCHEMAS = {schema.name: schema for schema in (MESSAGES, PREFERENCE, TOKENS, TEXT, IMAGE)}


def columns_schema(columns: Mapping[str, str]) -> Schema:
    """Return a schema without a processor: the user's code reads its columns."""
    return Schema("columns", columns)
