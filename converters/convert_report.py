"""What a conversion says of itself at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .outputs import Output


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitReport:
    """One dataset of several. num_tokens is None where nothing measured them."""

    num_rows: int
    num_tokens: int | None
    num_shards: int

    @staticmethod
    def of(output: Output) -> SplitReport:
        tokens = sum(int(each.sum(dtype=np.int64)) for each in output.lengths) if output.lengths else None
        return SplitReport(num_rows=output.num_samples, num_tokens=tokens, num_shards=output.num_shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertReport:
    """What a conversion did, all outputs together, and each of its `splits` by name, if it was asked for any.

    num_rejected rows did not fit their schema; num_filtered were left out for their length. num_tokens is None where
    nothing measured them.
    """

    schema: str
    num_rows: int
    num_rejected: int
    num_filtered: int
    num_tokens: int | None
    num_shards: int
    num_bytes: int
    seconds: float
    splits: Mapping[str, SplitReport]
