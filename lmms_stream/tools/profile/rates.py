"""Measured rates of a run: values."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from ...errors import ConfigError


@dataclass(frozen=True, slots=True)
class RateSpread:
    """A figure of several rounds. mean: over their whole time, which is what a run gets of data that comes in bursts.

    median, lowest, highest: of the rounds.
    """

    mean: float
    median: float
    lowest: float
    highest: float

    @staticmethod
    def of(rounds: Sequence[tuple[float, float]]) -> RateSpread:
        """rounds: what was counted in each, and the seconds that it took.

        >>> RateSpread.of([(30.0, 1.0), (10.0, 2.0), (20.0, 1.0)])
        RateSpread(mean=15.0, median=20.0, lowest=5.0, highest=30.0)
        """
        rates = [count / seconds for count, seconds in rounds]
        mean = sum(count for count, _ in rounds) / sum(seconds for _, seconds in rounds)
        return RateSpread(mean, statistics.median(rates), min(rates), max(rates))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderRates:
    """Batches as fast as they come, of all ranks; padding does not count as tokens.

    num_workers: of each rank. busy_cpus: CPU seconds that all loader workers take in a second (without workers: that
    the ranks take themselves). fetched_mb_per_s: what came from stores and peers. cache_hits, cache_misses: shards
    that were on this node, and that were fetched; both are 0 where a dataset is read where it lies.
    """

    num_workers: int
    tokens_per_s: RateSpread
    packs_per_s: RateSpread
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

    steps_per_s: RateSpread
    tokens_per_s: RateSpread
    wait_share: RateSpread  # time that the rank that waited most for data did so
    mfu: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The three measurements. more_workers: only the loader, with more workers; None if not measured.

    num_cpus: that a rank's node has for it and the ranks beside it. num_ranks: processes of the run.
    """

    loader: LoaderRates
    model: StepRates
    both: StepRates
    more_workers: LoaderRates | None = None
    num_cpus: int
    num_ranks: int = 1


def rates_from(found: Any) -> Rates:
    """Build rates from JSON values."""
    return TypeAdapter(Rates).validate_python(found)


def check_measured(*, steps: int, warmup_steps: int, seconds: float) -> None:
    """Raise ConfigError for settings without anything to measure."""
    if steps < 1:
        raise ConfigError(f"steps must be at least 1, got {steps}: a measurement needs one")
    if warmup_steps < 1:
        raise ConfigError(f"warmup_steps must be at least 1, got {warmup_steps}: the first step takes longer")
    if not seconds > 0:
        raise ConfigError(f"seconds must be above 0, got {seconds:g}: each measurement takes at most as long")


# The limiting part of a run, the ratio, and a remedy. rates -> [verdict] -> sentences. Pure.

Limit = Literal["data", "model", "shared", "even"]
AHEAD = 1.2  # a loader that makes so many times what the model takes is well ahead of it
WAITS = 0.1  # a run that waits for data for such a share of its time waits
BUSY = 0.8  # workers that compute for such a share of the time have no more to give


class Verdict(NamedTuple):
    """limit: data; model; shared: each alone is faster than both together; even: neither is well ahead."""

    limit: Limit
    sentence: str
    change: str


def limit_of(rates: Rates) -> Limit:
    """The limit, from the ratio of the loader's tokens to the model's, and from how long the run waits for data."""
    waits, is_ahead = rates.both.wait_share.mean >= WAITS, ratio_of(rates.loader, rates) >= AHEAD
    if waits:
        return "shared" if is_ahead else "data"
    return "model" if is_ahead else "even"


def ratio_of(loader: LoaderRates, rates: Rates) -> float:
    """Tokens/s of a loader alone over those of the model alone."""
    return loader.tokens_per_s.mean / rates.model.tokens_per_s.mean


def times(ratio: float) -> str:
    """
    >>> times(2.345), times(0.0123), times(1234.5)
    ('2.3 times', '0.012 times', '1,234 times')
    """
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.2g} times"


def verdict_of(rates: Rates) -> Verdict:
    """Return the verdict of the measurements; no claims beyond the measurements."""
    limit = limit_of(rates)
    figures = (
        f"the loader alone makes {times(ratio_of(rates.loader, rates))} the tokens that the model alone takes, and "
        f"together they wait for data {rates.both.wait_share.mean:.0%} of the time"
    )
    if limit == "model":
        return Verdict(
            limit,
            f"data is not the limit: {figures}",
            "nothing about the data, as the steps of the model are the limit",
        )
    if limit == "even":
        change = "nothing yet; a faster device or model would wait for data"
        return Verdict(limit, f"neither is far ahead: {figures}", change)
    if limit == "shared":
        change = "give the workers CPUs of their own: loader and model are slower beside each other than each alone"
        return Verdict(limit, f"loader and model hinder each other: {figures}", f"{change}{_by_workers(rates)}")
    return Verdict(limit, f"data is the limit: {figures}", _change_of_data(rates))


def _by_workers(rates: Rates) -> str:
    return "" if rates.more_workers is None else f" ({_gain(rates)})"


def _gain(rates: Rates) -> str:
    more, here = rates.more_workers, rates.loader
    assert more is not None
    gain = more.tokens_per_s.mean / here.tokens_per_s.mean
    return f"{more.num_workers} workers instead of {here.num_workers} make {times(gain)} the tokens"


def _change_of_data(rates: Rates) -> str:
    more, here = rates.more_workers, rates.loader
    if more is None:
        return "more workers (train.num_workers), or less work for each sample; neither was tried here"
    if here.cache_misses and more.cache_hits > more.cache_misses:
        return (
            "a faster store, or a cache that is filled before; whether more workers help is not known, as these found "
            "shards that were fetched before (the data is too short to measure it)"
        )
    if more.tokens_per_s.lowest > here.tokens_per_s.highest and ratio_of(more, rates) >= AHEAD * ratio_of(here, rates):
        remains = "" if ratio_of(more, rates) >= AHEAD else "; data stays the limit then, so measure again with more"
        return (
            f"set train.num_workers to {more.num_workers}: {_gain(rates)}, "
            f"{times(ratio_of(more, rates))} what the model takes{remains}"
        )
    return f"{_gain(rates)}, so workers are not what is missing: {_missing(here, rates)}"


def _missing(loader: LoaderRates, rates: Rates) -> str:
    """Name the workers' bottleneck by their CPU time."""
    num_workers = max(1, loader.num_workers) * rates.num_ranks
    most = min(num_workers, rates.num_cpus)
    busy = f"they compute on {loader.busy_cpus:.1f} of {most} CPUs that they could have"
    if loader.busy_cpus >= BUSY * most:
        return f"{busy}: make samples cheaper to process, or take a machine with more CPUs"
    if loader.cache_misses:
        fetched = f"{loader.fetched_mb_per_s:.1f} MB/s come from the store"
        return f"{busy}, and {fetched}: look at the network, or fill the cache before"
    return f"{busy}, and nothing was fetched: look at the disk, and at what the processor and the collator wait for"
