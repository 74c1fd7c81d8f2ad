"""Weights of sources along a run -> their shares of each phase, in whole numbers. Integer arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import plain_number, whole_number
from ..errors import ConfigError

Weights = Mapping[str, float]  # source -> share of the tokens, in any unit
UNIT = 1 << 40  # of shares and of what is lacked of them: a pack


def parse_schedule(weights: Weights | Mapping[int, Weights], names: Sequence[str]) -> list[tuple[int, Weights]]:
    if not isinstance(weights, Mapping):
        raise ConfigError(f"weights must map sources to shares, or first steps to such maps, got {weights!r}")
    by_step: dict[Any, Any] = {key: value for key, value in weights.items() if isinstance(value, Mapping)}
    if len(by_step) not in (0, len(weights)) or any(isinstance(step, str) for step in by_step):
        raise ConfigError(f"weights must map sources to shares, or first steps to such maps, got {dict(weights)!r}")
    for step in by_step:
        whole_number("a first step of weights", step, least=0)
    schedule: list[tuple[Any, Any]] = sorted(by_step.items()) if by_step else [(0, weights)]
    if schedule[0][0] != 0:
        raise ConfigError(f"a schedule of weights must begin at step 0, got step {schedule[0][0]}")
    checked: list[tuple[int, Weights]] = []
    for step, shares in schedule:
        for name, share in shares.items():
            if name not in names:
                raise ConfigError(f"weights name {name!r}, the sources are {', '.join(names)}")
            if isinstance(share, bool) or not (isinstance(share, Real) and math.isfinite(share) and float(share) >= 0):
                raise ConfigError(f"the weight of {name!r} must be a number that is 0 or more, got {share!r}")
        if not any(shares.values()):
            raise ConfigError(f"the weights from step {step} on are all 0: nothing would be read")
        checked.append((int(step), {name: plain_number(share) for name, share in shares.items()}))
    return checked


def checked_epochs(max_epochs: Mapping[str, int] | None) -> dict[str, int]:
    """Return how often each source is read at most; ConfigError unless sources are mapped to whole numbers."""
    if not isinstance(max_epochs, Mapping | None):
        raise ConfigError(f"max_epochs must map sources to numbers of epochs, got {max_epochs!r}: write {{SOURCE: 2}}")
    counts = (max_epochs or {}).items()
    return {name: whole_number(f"max_epochs of {name!r}", count, least=1) for name, count in counts}


def to_quotas(shares: Sequence[Fraction | int]) -> NDArray[np.int64]:
    """Shares in whole numbers that add up to UNIT: int64[len(shares)]; what rounding leaves goes to the most rounded.

    >>> to_quotas([Fraction(3), Fraction(1)]).tolist() == [3 * UNIT // 4, UNIT // 4]
    True
    """
    denominator = math.lcm(*(share.denominator for share in shares))
    numbers = [share.numerator * (denominator // share.denominator) for share in shares]
    total = sum(numbers)
    quotas, rests = map(list, zip(*(divmod(number * UNIT, total) for number in numbers), strict=True))
    by_rest = sorted(range(len(shares)), key=lambda number: (-rests[number], number))
    for number in by_rest[: UNIT - sum(quotas)]:
        quotas[number] += 1
    return np.array(quotas, np.int64)


def passed_on(weights: Sequence[list[Fraction]]) -> list[list[Fraction]]:
    """The weights of each phase, or where all are 0 those of the next that has some, or else of the last before it."""
    some = [number for number, shares in enumerate(weights) if any(shares)]
    return [
        weights[min((other for other in some if other >= number), default=some[-1])] for number in range(len(weights))
    ]


def share_out(credit: int, quotas: NDArray[np.int64]) -> NDArray[np.int64]:
    """A credit shared in proportion: int64, of the shape of quotas, which add up to UNIT."""
    shares = np.array([credit * int(quota) // UNIT for quota in quotas.tolist()], np.int64) if credit else 0 * quotas
    shares[int(np.argmax(quotas))] += credit - int(shares.sum())
    return shares
