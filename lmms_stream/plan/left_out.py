"""Quarantined or dropped samples of a run. Their segments stay in the plan, as padding without loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..types import Kind as Kind
from ..types import LeftOutSample as LeftOutSample


class LeftOutIds(NamedTuple):
    """Samples of a source: sample_ids int64[n], sorted; since_steps int64[n], first step without each sample."""

    sample_ids: NDArray[np.int64]
    since_steps: NDArray[np.int64]

    def at_step(self, step: int) -> NDArray[np.int64]:
        """Return the samples that are padding in a step: int64[k], sorted."""
        return self.sample_ids[self.since_steps <= step]


class LeftOut:
    """Left-out samples, each once, with the earliest step.

    A sample that is both dropped and quarantined from the same step counts as dropped.
    """

    def __init__(self, samples: Iterable[LeftOutSample] = ()):
        self._samples: dict[tuple[str, int], LeftOutSample] = {}
        for each in samples:
            self.add(each)

    def add(self, sample: LeftOutSample) -> bool:
        """Add a sample; return whether it is new."""
        key = (sample.source, sample.sample_id)
        known = self._samples.get(key)
        if known is None or _rank(sample) < _rank(known):
            self._samples[key] = sample
        return known is None

    def __len__(self) -> int:
        return len(self._samples)

    def __bool__(self) -> bool:
        return bool(self._samples)

    @property
    def samples(self) -> list[LeftOutSample]:
        """Samples by source, then by number."""
        return [self._samples[key] for key in sorted(self._samples)]

    def of_kind(self, kind: Kind) -> LeftOut:
        return LeftOut(each for each in self._samples.values() if each.kind == kind)

    def get(self, source: str, sample_id: int) -> LeftOutSample | None:
        return self._samples.get((source, sample_id))

    def of_source(self, source: str) -> LeftOutIds:
        """Return the left-out samples of a source; empty arrays without any."""
        found = sorted((each.sample_id, each.since_step) for each in self._samples.values() if each.source == source)
        numbers = np.array(found, np.int64).reshape(-1, 2)
        return LeftOutIds(numbers[:, 0].copy(), numbers[:, 1].copy())

    def is_left_out(self, source: str, sample_id: int, *, step: int) -> bool:
        """Return whether a sample is padding in a step."""
        found = self.get(source, sample_id)
        return found is not None and found.since_step <= step

    def merge(self, others: Iterable[LeftOut]) -> LeftOut:
        """Return this list joined with the lists of other ranks."""
        return LeftOut(each for one in (self, *others) for each in one.samples)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return JSON values, by source and number."""
        return [asdict(each) for each in self.samples]

    @staticmethod
    def load(state: Sequence[Mapping[str, Any]]) -> LeftOut:
        """Return the samples of a state_dict; DataError for an invalid entry."""
        return LeftOut(left_out_sample(each) for each in state)


def left_out_sample(entry: object) -> LeftOutSample:
    """Return the sample of an entry of a state_dict or a line of the list on disk; DataError for another value."""
    names = [each.name for each in fields(LeftOutSample)]
    if not isinstance(entry, Mapping) or set(entry) != set(names):
        raise DataError(f"{entry!r} is not a record of a left-out sample: it must have exactly {', '.join(names)}")
    return LeftOutSample(**entry)


def _rank(sample: LeftOutSample) -> tuple[int, int, str]:
    return sample.since_step, sample.kind == "quarantined", sample.reason
