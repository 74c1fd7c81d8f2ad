"""What is said of rates: which part of a run is its limit, and what to change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lmms_stream.errors import ConfigError
from lmms_stream.tools.profile.rates import (
    LoaderRates,
    Rates,
    RateSpread,
    StepRates,
    check_measured,
    limit_of,
    verdict_of,
)


def spread(mean: float) -> RateSpread:
    return RateSpread.of([(0.95 * mean, 1), (mean, 1), (1.05 * mean, 1)])


def loader(tokens_per_s: float, *, num_workers: int = 2, busy_cpus: float = 1.9, misses: int = 0) -> LoaderRates:
    return LoaderRates(
        num_workers=num_workers, tokens_per_s=spread(tokens_per_s), packs_per_s=spread(tokens_per_s / 1000),
        busy_cpus=busy_cpus, fetched_mb_per_s=1.5 * (misses > 0), cache_hits=0, cache_misses=misses,
    )  # fmt: skip


def steps(tokens_per_s: float, *, waits: float = 0.0) -> StepRates:
    return StepRates(
        steps_per_s=spread(tokens_per_s / 8000), tokens_per_s=spread(tokens_per_s), wait_share=spread(waits), mfu=None
    )


def rates(*, ahead: float, waits: float, more: LoaderRates | None = None, **of_loader: float) -> Rates:
    """Of a loader that makes so many times what the model takes."""
    made = loader(1000 * ahead, **of_loader)  # type: ignore[arg-type]
    return Rates(loader=made, model=steps(1000), both=steps(1000, waits=waits), more_workers=more, num_cpus=8)


def test_a_loader_that_is_well_ahead_is_not_the_limit() -> None:
    found = verdict_of(rates(ahead=2.3, waits=0.01))
    assert found.limit == "model"
    said = "data is not the limit: the loader alone makes 2.3 times the tokens that the model alone takes, and together"
    assert found.sentence == f"{said} they wait for data 1% of the time"


def test_more_workers_are_advised_where_they_were_measured_to_help() -> None:
    found = verdict_of(rates(ahead=0.5, waits=0.5, more=loader(1300, num_workers=4)))
    assert found.limit == "data"
    assert found.sentence.startswith("data is the limit: the loader alone makes 0.5 times the tokens")
    said = (
        "set train.num_workers to 4: 4 workers instead of 2 make 2.6 times the tokens, 1.3 times what the model takes"
    )
    assert found.change == said
    not_enough = verdict_of(rates(ahead=0.3, waits=0.7, more=loader(600, num_workers=4)))
    assert not_enough.change.endswith("what the model takes; data stays the limit then, so measure again with more")


@pytest.mark.parametrize(
    ("busy_cpus", "misses", "said"),
    [
        (1.9, 0, "they compute on 1.9 of 2 CPUs that they could have: make samples cheaper to process, or take a mach"),
        (0.2, 9, "they compute on 0.2 of 2 CPUs that they could have, and 1.5 MB/s come from the store: look at the n"),
        (0.2, 0, "they compute on 0.2 of 2 CPUs that they could have, and nothing was fetched: look at the disk, and "),
    ],
)
def test_workers_that_do_not_help_are_no_advice(busy_cpus: float, misses: int, said: str) -> None:
    more = loader(510, num_workers=4, busy_cpus=busy_cpus)
    found = verdict_of(rates(ahead=0.5, waits=0.5, more=more, busy_cpus=busy_cpus, misses=misses))
    assert found.limit == "data"
    begins = "4 workers instead of 2 make 1 times the tokens, so workers are not what is missing: "
    assert found.change.startswith(begins + said)


def test_parts_that_hinder_each_other_and_parts_that_are_even_are_told_apart() -> None:
    shared = verdict_of(rates(ahead=1.6, waits=0.3, more=loader(1700, num_workers=4)))
    assert shared.limit == "shared"
    assert shared.sentence.startswith("loader and model hinder each other: the loader alone makes 1.6 times")
    assert limit_of(rates(ahead=1.05, waits=0.02)) == "even"
    assert "neither is far ahead" in verdict_of(rates(ahead=1.05, waits=0.02)).sentence


def test_data_that_comes_in_bursts_counts_with_the_time_between_them() -> None:
    bursts = RateSpread.of([(1000, 10.0), (1000, 0.1), (1000, 0.1)])
    assert bursts.median == 10_000
    found = replace(rates(ahead=1, waits=0.9), loader=replace(loader(1), tokens_per_s=bursts))
    assert limit_of(found) == "data"
    assert "the loader alone makes 0.29 times the tokens" in verdict_of(found).sentence


def test_workers_that_found_a_warm_cache_are_no_advice() -> None:
    warm = replace(loader(1300, num_workers=4), cache_hits=109, cache_misses=9)
    found = verdict_of(rates(ahead=0.5, waits=0.5, more=warm, misses=52))
    assert "whether more workers help is not known, as these found shards that were fetched before" in found.change


def test_without_a_measurement_of_more_workers_none_is_claimed() -> None:
    assert verdict_of(rates(ahead=0.2, waits=0.8)).change.endswith("neither was tried here")


def test_what_the_cache_held_is_said() -> None:
    made = loader(1.0)
    assert made.cache == "none: shards are read where they lie, or were open already"
    assert replace(made, cache_hits=3).cache == "warm: all 3 shards were there"
    assert replace(made, cache_hits=3, cache_misses=2).cache == "cold: 2 shards were fetched, 3 were there"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0: a measurement needs one"),
        ({"warmup_steps": 0}, "warmup_steps must be at least 1, got 0: the first step takes longer"),
        ({"seconds": 0.0}, "seconds must be above 0, got 0: each measurement takes at most as long"),
    ],
)
def test_measurements_of_nothing_are_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        check_measured(**({"steps": 1, "warmup_steps": 1, "seconds": 1.0} | given))  # type: ignore[arg-type]
