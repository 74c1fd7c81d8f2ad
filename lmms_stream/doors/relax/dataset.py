"""Dataset: all samples in memory, built when the dataset is opened."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import BaseDataset
from .prompts import Outcome
from .sample import Sample

ROWS_AT_ONCE = 1024


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pause Python's garbage collector: it would traverse all samples repeatedly and find nothing to free."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Dataset(BaseDataset):
    """Dataset whose rows are read, and dropped rows counted, when opened; see BaseDataset."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self._all: list[Outcome] = []
        with _without_collections():
            for start in range(0, self.num_rows, ROWS_AT_ONCE):
                made = self._made(np.arange(start, min(start + ROWS_AT_ONCE, self.num_rows)))
                self._kept(start, made)
                self._all += made
        self.num_processed = self.num_rows
        self._num_kept = self.num_rows - self.num_overlong - self.num_unreadable
        self.may_drop = self._num_kept < self.num_rows
        if self.index_manager.order == "relax" and self.may_drop:
            self.follow_relax_order()

    def __len__(self) -> int:
        return self._num_kept

    def _outcomes(self, rows: NDArray[np.int64]) -> list[Outcome]:
        return [self._all[row] for row in rows.tolist()]

    @property
    def origin_samples(self) -> list[Sample]:
        """All samples, in the order of the rows."""
        return [each for each in self._all if isinstance(each, Sample)]

    @property
    def dropped_rows(self) -> NDArray[np.int64]:
        return np.flatnonzero(np.unpackbits(self._dropped, count=self.num_rows)).astype(np.int64)

    # Relax shuffles only the kept samples

    def follow_relax_order(self) -> None:
        """Shuffle the samples by Relax's permutation; dropped rows come last."""
        self.index_manager.order, self.index_manager.last = "relax", self.dropped_rows if self.may_drop else None

    @property
    def _relax_order(self) -> str:
        return f"relax, of {self._num_kept} samples" if self.may_drop else "relax"

    @property
    def _order(self) -> str:
        return super()._order if self.index_manager.last is None else self._relax_order

    def follow(self, order: str) -> None:
        if order == self._relax_order:
            self.follow_relax_order()
        else:
            super().follow(order)
