"""How many samples of each stream an epoch takes; MosaicML Streaming's rules, in exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamShare:
    """How much of a stream an epoch takes, by at most one of three settings; none: each sample once.

    proportion: its share of the epoch, relative to the other streams'. repeat: times its size. choose: samples.
    """

    proportion: float | None = None
    repeat: float | None = None
    choose: int | None = None

    def __post_init__(self) -> None:
        settings = ("proportion", "repeat", "choose")
        given = {name: value for name in settings if (value := getattr(self, name)) is not None}
        if len(given) > 1:
            listed = " and ".join(f"{name} {value}" for name, value in given.items())
            raise ConfigError(f"a stream takes one of proportion, repeat and choose, got {listed}: leave one")
        for name, value in given.items():
            if not 0 <= value < math.inf or (name == "choose" and value % 1):
                kind = "whole" if name == "choose" else "finite"
                raise ConfigError(f"{name} must be a {kind} number that is 0 or more, got {value}")


def samples_chosen(sizes: Sequence[int], shares: Sequence[StreamShare], *, epoch_size: int | None = None) -> list[int]:
    """How many samples of each stream an epoch takes.

    sizes: samples that each stream holds. The rules are those of streaming.Stream, in exact decimal arithmetic:
    repeat * size is rounded down; proportions (and with epoch_size alone, sizes) share out epoch_size, or as many
    samples as are stored, and what rounding down leaves goes to the largest remainders, ties to the earlier stream.
    Raises ConfigError.

    >>> samples_chosen([100, 7], [StreamShare(repeat=0.29), StreamShare()])
    [29, 7]
    >>> samples_chosen([100, 7], [StreamShare(proportion=2), StreamShare(proportion=1)], epoch_size=50)
    [33, 17]
    """
    if epoch_size is not None and (epoch_size < 1 or epoch_size % 1):
        raise ConfigError(f"epoch_size must be a whole number of samples, at least 1, got {epoch_size}")
    proportions = [_exact(share.proportion) for share in shares if share.proportion is not None]
    if proportions and len(proportions) < len(shares):
        without = next(stream for stream, share in enumerate(shares) if share.proportion is None)
        raise ConfigError(f"stream {without} has no proportion and others have: give every stream one, or none")
    if proportions and not any(proportions):
        raise ConfigError("the proportions are all 0: nothing would be read; raise one")
    fixed = [stream for stream, share in enumerate(shares) if (share.repeat, share.choose) != (None, None)]
    if epoch_size is not None and fixed:
        raise ConfigError(f"epoch_size {epoch_size} contradicts repeat or choose of stream {fixed[0]}: leave one out")
    if proportions or (epoch_size is not None and any(sizes)):
        total = sum(sizes) if epoch_size is None else int(epoch_size)
        chosen = _share_out(total, proportions or [Fraction(size) for size in sizes])
    else:
        chosen = [
            math.floor(_exact(share.repeat) * size) if share.choose is None else int(share.choose)
            for size, share in zip(sizes, shares, strict=True)
        ]
    for stream, (size, count) in enumerate(zip(sizes, chosen, strict=True)):
        if count and not size:
            raise ConfigError(f"stream {stream} holds no samples and cannot give {count} an epoch: leave it out")
    if not any(chosen):
        raise ConfigError("an epoch takes no sample of any stream: raise repeat, choose or epoch_size, or add samples")
    return chosen


def _exact(value: float | None) -> Fraction:
    """The number as it is written (0.1 is a tenth, not the nearest binary fraction), 1 unless given."""
    return Fraction(1) if value is None else Fraction(repr(float(value)))


def _share_out(total: int, weights: Sequence[Fraction]) -> list[int]:
    of_all = sum(weights)
    exact = [total * weight / of_all for weight in weights]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda stream: counts[stream] - exact[stream])
    for stream in by_remainder[: total - sum(counts)]:
        counts[stream] += 1
    return counts
