"""What is measured of a run: values."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from ...errors import ConfigError


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure of several rounds. mean: over their whole time, which is what a run gets of data that comes in bursts.

    median, lowest, highest: of the rounds.
    """

    mean: float
    median: float
    lowest: float
    highest: float

    @staticmethod
    def of(rounds: Sequence[tuple[float, float]]) -> Spread:
        """rounds: what was counted in each, and the seconds that it took.

        >>> Spread.of([(30.0, 1.0), (10.0, 2.0), (20.0, 1.0)])
        Spread(mean=15.0, median=20.0, lowest=5.0, highest=30.0)
        """
        rates = [count / seconds for count, seconds in rounds]
        mean = sum(count for count, _ in rounds) / sum(seconds for _, seconds in rounds)
        return Spread(mean, statistics.median(rates), min(rates), max(rates))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderRates:
    """Batches as fast as they come, of all ranks; padding does not count as tokens.

    num_workers: of each rank. busy_cpus: CPU seconds that all loader workers take in a second (without workers: that
    the ranks take themselves). fetched_mb_per_s: what came from stores and peers. cache_hits, cache_misses: shards
    that were on this node, and that were fetched; both are 0 where a dataset is read where it lies.
    """

    num_workers: int
    tokens_per_s: Spread
    packs_per_s: Spread
    busy_cpus: float
    fetched_mb_per_s: float
    cache_hits: int
    cache_misses: int

    @property
    def cache(self) -> str:
        """Whether the node's cache of shards was cold, in words."""
        if self.cache_misses:
            return f"cold: {self.cache_misses} shards were fetched, {self.cache_hits} were there"
        if self.cache_hits:
            return f"warm: all {self.cache_hits} shards were there"
        return "none: shards are read where they lie, or were open already"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRates:
    """Steps, of all ranks. mfu: None where the arithmetic of the model or of the device is not known."""

    steps_per_s: Spread
    tokens_per_s: Spread
    wait_share: Spread  # time that the rank that waited most for data did so
    mfu: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The three measurements. more_workers: the loader alone with more workers; None where that was not asked.

    num_cpus: that a rank's node has for it and the ranks beside it. num_ranks: processes of the run.
    """

    loader: LoaderRates
    model: StepRates
    both: StepRates
    more_workers: LoaderRates | None = None
    num_cpus: int
    num_ranks: int = 1


def rates_from(found: Any) -> Rates:
    """Rates as JSON has them."""
    return TypeAdapter(Rates).validate_python(found)


def check_measured(*, steps: int, warmup_steps: int, seconds: float) -> None:
    """ConfigError where nothing would be measured."""
    if steps < 1:
        raise ConfigError(f"steps must be at least 1, got {steps}: a round needs one")
    if warmup_steps < 1:
        raise ConfigError(f"warmup_steps must be at least 1, got {warmup_steps}: the first step takes longer")
    if not seconds > 0:
        raise ConfigError(f"seconds must be above 0, got {seconds:g}: each measurement takes at most as long")
