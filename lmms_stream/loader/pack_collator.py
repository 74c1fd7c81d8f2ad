"""What a DataLoader makes one Batch of packs with. packs of a dataset -> [pack collator] -> Batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from ..types import Batch, Processed
from .collate import collate, join


class PackCollator:
    """Called with the packs that a dataset gives, it joins them: one sequence, in which no sample sees another.

    Called as the loader calls its collator, with processed samples and sample_ids, it makes the Batch of a pack.
    """

    def __call__(
        self, packs: Sequence[Batch] | Sequence[Processed], sample_ids: Sequence[int] | None = None, **options: Any
    ) -> Batch:
        if sample_ids is not None:
            return collate(packs, sample_ids, **options)  # type: ignore[arg-type]
        if not packs or not all(isinstance(each, Batch) for each in packs):
            kinds = sorted({type(each).__name__ for each in packs}) or ["nothing"]
            raise ConfigError(
                f"the collator of a dataset of packs was given {', '.join(kinds)}: give it the packs that dataset[i] is"
            )
        return join(packs)  # type: ignore[arg-type]
