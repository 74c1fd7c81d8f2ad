"""Samples that a run leaves out: quarantined or dropped. Their segments stay in the plan, as padding without loss."""

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
    """Samples of one source: sample_ids int64[n], sorted; since_steps int64[n], the step from which each counts."""

    sample_ids: NDArray[np.int64]
    since_steps: NDArray[np.int64]

    def at_step(self, step: int) -> NDArray[np.int64]:
        """The samples that are padding in a step: int64[k], sorted."""
        return self.sample_ids[self.since_steps <= step]


class LeftOut:
    """A collection of samples that are left out, each once: the entry with the earliest step is kept.

    A sample that is dropped and quarantined from the same step on counts as dropped.
    """

    def __init__(self, samples: Iterable[LeftOutSample] = ()):
        self._samples: dict[tuple[str, int], LeftOutSample] = {}
        for each in samples:
            self.add(each)

    def add(self, sample: LeftOutSample) -> bool:
        """Whether the sample was not there."""
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
        """By source, then by number."""
        return [self._samples[key] for key in sorted(self._samples)]

    def of_kind(self, kind: Kind) -> LeftOut:
        return LeftOut(each for each in self._samples.values() if each.kind == kind)

    def get(self, source: str, sample_id: int) -> LeftOutSample | None:
        return self._samples.get((source, sample_id))

    def of_source(self, source: str) -> LeftOutIds:
        """The samples of a source with the step from which each counts; empty arrays where there are none."""
        found = sorted((each.sample_id, each.since_step) for each in self._samples.values() if each.source == source)
        numbers = np.array(found, np.int64).reshape(-1, 2)
        return LeftOutIds(numbers[:, 0].copy(), numbers[:, 1].copy())

    def is_left_out(self, source: str, sample_id: int, *, step: int) -> bool:
        """Whether a sample is padding in a step."""
        found = self.get(source, sample_id)
        return found is not None and found.since_step <= step

    def merge(self, others: Iterable[LeftOut]) -> LeftOut:
        """This list and those of other ranks as one."""
        return LeftOut(each for one in (self, *others) for each in one.samples)

    def state_dict(self) -> list[dict[str, Any]]:
        """Plain JSON values, by source and number."""
        return [asdict(each) for each in self.samples]

    @staticmethod
    def load(state: Sequence[Mapping[str, Any]]) -> LeftOut:
        """state: a state_dict; DataError for an entry that is none."""
        return LeftOut(left_out_sample(each) for each in state)


def left_out_sample(entry: object) -> LeftOutSample:
    """The sample of an entry of a state_dict, which is a line of the list on disk; DataError for another value."""
    names = [each.name for each in fields(LeftOutSample)]
    if not isinstance(entry, Mapping) or set(entry) != set(names):
        raise DataError(f"{entry!r} is no sample that was left out: it must have {', '.join(names)} and no others")
    return LeftOutSample(**entry)


def _rank(sample: LeftOutSample) -> tuple[int, int, str]:
    return sample.since_step, sample.kind == "quarantined", sample.reason
