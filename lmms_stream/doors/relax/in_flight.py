"""InFlight: groups that were handed out and have not come back, as they were handed out. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...errors import DataError
from .sample import Sample

Group = list[Sample]


@dataclass
class _Handed:
    group: Group
    holder: str
    rollout_id: int | None = None  # the rollout that has delivered it; None while it is generated


class InFlight:
    """By their numbers: a group is in flight until it is put back, or delivered in a rollout whose state is saved."""

    def __init__(self) -> None:
        self._handed: dict[int, _Handed] = {}

    def __len__(self) -> int:
        return len(self._handed)

    def hand_out(self, groups: Iterable[Group], *, holder: str) -> None:
        for group in groups:
            self._handed[number_of(group)] = _Handed([sample.copy() for sample in group], holder)

    def came_back(self, groups: Iterable[Group]) -> None:
        """Groups of other numbers are none of these, and let be."""
        for group in groups:
            self._handed.pop(number_of(group), None)

    def finish(self, groups: Iterable[Group | int], *, rollout_id: int | None) -> None:
        """Deliver groups in a rollout; None: for good. DataError for a group that nobody generates."""
        numbers = [each if isinstance(each, int) else number_of(each) for each in groups]
        for number in numbers:
            if number not in self._handed or self._handed[number].rollout_id is not None:
                raise DataError(
                    f"group {number} is not in flight: it was finished before, or put back because its holder was "
                    "taken for lost; leave this result out"
                )
        for number in numbers:
            if rollout_id is None:
                del self._handed[number]
            else:
                self._handed[number].rollout_id = rollout_id

    def take(self, holder: str | None) -> list[Group]:
        """The groups that a holder (None: any) generates, in the order of their numbers; they are in flight no more."""
        lost = [
            number
            for number, each in sorted(self._handed.items())
            if each.rollout_id is None and holder in (None, each.holder)
        ]
        return [self._handed.pop(number).group for number in lost]

    def after(self, rollout_id: int) -> list[Group]:
        """What a state of a rollout holds: groups that are generated, or were delivered in a later rollout."""
        return [
            each.group
            for _, each in sorted(self._handed.items())
            if each.rollout_id is None or each.rollout_id > rollout_id
        ]

    def saved(self, rollout_id: int) -> None:
        """Forget what was delivered in this rollout and those before."""
        self._handed = {
            number: each
            for number, each in self._handed.items()
            if each.rollout_id is None or each.rollout_id > rollout_id
        }


def number_of(group: Group) -> int:
    number = group[0].group_index if group else None
    if number is None:
        raise DataError("a group has no group_index: hand out, put back and finish groups of get_samples")
    return number
