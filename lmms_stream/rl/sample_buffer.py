"""SampleBuffer: the samples that were used last, by their rows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from ..errors import DataError
from .prompts import Outcome
from .sample import Sample

# What is kept of a sample: its prompt, label, metadata and media. Samples themselves would cost more than to make them
# again: Python's garbage collector goes through each of them, and its lists, again and again.
_Kept = tuple[Any, Any, dict[str, Any], Any, Any] | Sample | DataError | str


class SampleBuffer:
    """At most max_size rows; the row that was not used for longest gives way. Threads may use it at once."""

    def __init__(self, max_size: int = 10000):
        self.max_size = max_size
        self._held: OrderedDict[int, _Kept] = OrderedDict()
        self._hits = 0
        self._misses = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def hit_rate(self) -> float:
        """Share of the rows asked for that were here."""
        return self._hits / max(self._hits + self._misses, 1)

    def get(self, idx: int) -> Sample | None:
        """The sample of a row; None where it is not here, or was dropped."""
        found = self.outcomes([idx]).get(idx)
        return found if isinstance(found, Sample) else None

    def put(self, idx: int, sample: Sample) -> None:
        self._put([(idx, sample)])

    def clear(self) -> None:
        """Forget all rows and counts."""
        with self._lock:
            self._held.clear()
            self._hits = self._misses = 0

    def outcomes(self, rows: list[int]) -> dict[int, Outcome]:
        """Those of the rows that are here."""
        found: dict[int, Outcome] = {}
        with self._lock:
            if not self._held.keys().isdisjoint(rows):
                for row in rows:
                    if row in self._held:
                        self._held.move_to_end(row)
                        kept = self._held[row]
                        found[row] = Sample.of(*kept) if isinstance(kept, tuple) else kept
            self._hits += len(found)
            self._misses += len(rows) - len(found)
        return found

    def keep(self, rows: list[int], outcomes: Iterable[Outcome]) -> None:
        """Hold what rows became, of samples the parts that they are made of."""
        self._put(
            (row, (each.prompt, each.label, each.metadata, each.multimodal_inputs, each.teacher_multimodal_inputs))
            if isinstance(each, Sample)
            else (row, each)
            for row, each in zip(rows, outcomes, strict=True)
        )

    def _put(self, held: Iterable[tuple[int, _Kept]]) -> None:
        with self._lock:
            self._held.update(held)
            while len(self._held) > self.max_size:
                self._held.popitem(last=False)
