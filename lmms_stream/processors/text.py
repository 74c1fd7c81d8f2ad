"""Samples that are tokenized already: `input_ids` with `loss_spans`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import DataError
from ..types import Processed, Sample
from .base import IGNORED_LABEL


@dataclass(frozen=True, slots=True)
class TokensProcessor:
    """input_ids int32[T] and loss_spans int32[k, 2] (half-open token ranges that are trained on) -> tensors."""

    columns: ClassVar[tuple[str, ...]] = ("input_ids", "loss_spans")
    schema: ClassVar[str] = "tokens"

    @property
    def description(self) -> Mapping[str, Any]:
        return {"class": "TokensProcessor", "version": 1}

    def measure(self, sample: Sample) -> int:
        return len(sample["input_ids"])

    def process(self, sample: Sample) -> Processed:
        input_ids = np.asarray(sample["input_ids"], dtype=np.int64)
        labels = np.full_like(input_ids, IGNORED_LABEL)
        for start, stop in sample["loss_spans"]:
            if not 0 <= start < stop <= len(input_ids):
                raise DataError(f"loss span [{start}, {stop}) lies outside the sample's {len(input_ids)} tokens")
            labels[start:stop] = input_ids[start:stop]
        return {"input_ids": input_ids, "labels": labels}
