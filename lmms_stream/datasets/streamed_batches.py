"""Packs of lanes -> batches that say where their lanes stand after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..loader.batch_maker import Collator
from ..loader.collate import for_checked
from ..loader.pack_collator import PackCollator
from ..types import Batch, Processed
from .source_reader import SourcePack
from .source_state import LaneAfter


@dataclass(kw_only=True, slots=True)
class StreamedBatch(Batch):
    """afters: where lanes stand after its packs. See MultiModalIterableDataset.deliver."""

    afters: tuple[LaneAfter, ...] = ()


def batch_of(pack: SourcePack, collator: Collator, **options: Any) -> StreamedBatch:
    """Return the batch of a pack."""
    batch = for_checked(collator)(pack.samples, pack.sample_ids, **options)
    return StreamedBatch(**{each.name: getattr(batch, each.name) for each in fields(Batch)}, afters=pack.afters)


class StreamedCollator(PackCollator):
    """A PackCollator whose batches say where the lanes of all their packs stand."""

    def __call__(
        self, packs: Sequence[Batch] | Sequence[Processed], sample_ids: Sequence[int] | None = None, **options: Any
    ) -> Batch:
        batch = super().__call__(packs, sample_ids, **options)
        if sample_ids is not None or not isinstance(batch, StreamedBatch):
            return batch
        values = {each.name: getattr(batch, each.name) for each in fields(Batch)}
        return StreamedBatch(**values, afters=tuple(after for pack in packs for after in pack.afters))  # type: ignore[union-attr]
