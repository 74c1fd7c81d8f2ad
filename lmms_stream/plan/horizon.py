"""How far ahead the packs that a source has left in its epoch can lie. mixture + cursor -> [horizon] -> a step."""

from __future__ import annotations

from fractions import Fraction

from .cursor import Cursor
from .mixture import Mixture


def last_step(mixture: Mixture, cursor: Cursor, source: str, *, global_batch: int) -> int:
    """A step before which all packs that a source has left in its epoch are read, if they ever are.

    With weights that is an upper bound: the source has its share of each step of the last phase of the schedule, and
    more where others have ended. Where that phase is without it, it can come again only once all sources of the phase
    have ended.
    """
    if mixture.schedule is None:
        return cursor.step - (-(mixture.packs_left(cursor) or 0) // global_batch)
    first, last = mixture.schedule[-1]
    begin = max(first, cursor.step)
    at = cursor.sources[source]
    left = mixture.plans[source].num_packs(at.epoch) - at.packs
    share = _share(last, source)
    others = 0  # packs of other sources that can come before
    if not share:
        if any(weight and name not in mixture.max_epochs for name, weight in last.items()):
            return begin
        share = min((found for _, weights in mixture.schedule if (found := _share(weights, source))), default=share)
        others = sum(_most_packs(mixture, cursor, name) for name in mixture.max_epochs)
    if not share:
        return begin
    num_packs = others + left / share + len(mixture.names)
    return begin - int(-num_packs // global_batch) + 1


def _share(weights: object, source: str) -> Fraction:
    shares: dict[str, float] = dict(weights)  # type: ignore[call-overload]
    return Fraction(shares.get(source, 0)) / Fraction(sum(map(Fraction, shares.values())))


def _most_packs(mixture: Mixture, cursor: Cursor, source: str) -> int:
    """More packs than a source has left in all its epochs; those of other epochs are about as many, and not counted."""
    at = cursor.sources[source]
    return 2 * mixture.plans[source].num_packs(at.epoch) * max(0, mixture.max_epochs[source] - at.epoch)
