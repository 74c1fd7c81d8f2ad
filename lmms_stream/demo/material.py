"""What a demo trains on, and what: the part of it that is of one kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """sources: files to be converted. processor: its section of a YAML file. model: fields of a transformers config.

    about: what the sources hold, in a line.
    """

    sources: Sequence[Path]
    processor: Mapping[str, Any]
    model: Mapping[str, Any]
    packing_length: int
    about: str
