"""Samples of several documents, which were laid end to end at conversion -> documents that do not see each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import DataError
from ..types import Processed, Role, Sample
from .text import TokensProcessor


@dataclass(frozen=True, slots=True)
class DocumentsProcessor:
    """What TokensProcessor makes, with each document, or piece of one, as a sequence of its own.

    `document_starts`, int32[k], are the tokens at which they begin, 0 first. `sequences` are the tokens and the role of
    each, int64[k, 2]; see Role. DataError for starts that do not ascend from 0 within the sample.
    """

    columns: ClassVar[tuple[str, ...]] = (*TokensProcessor.columns, "document_starts")
    schema: ClassVar[str] = TokensProcessor.schema

    @property
    def description(self) -> Mapping[str, Any]:
        """TokensProcessor's: samples have the same lengths, so the same lengths index is read."""
        return TokensProcessor().description

    def measure(self, sample: Sample) -> int:
        return TokensProcessor().measure(sample)

    def process(self, sample: Sample) -> Processed:
        processed = TokensProcessor().process(sample)
        starts = np.asarray(sample["document_starts"], np.int64)
        lengths = np.diff(starts, append=len(processed["input_ids"]))
        if starts.ndim != 1 or starts[:1].tolist() != [0] or (lengths < 1).any():
            raise DataError(
                f"its documents begin at the tokens {str(starts.tolist())[:80]}, expected some of its "
                f"{len(processed['input_ids'])} that ascend from 0: convert it again"
            )
        return {**processed, "sequences": np.stack([lengths, np.full(len(starts), Role.DOCUMENT)], axis=1)}
