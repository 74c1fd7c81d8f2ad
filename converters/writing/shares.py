"""Which units of the sources each part of a conversion encodes. sizes of sources -> [share] -> a part's units. Pure.

Machines that know nothing of each other come to the same division, since it follows from the sources alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import ConfigError

_FULLEST = 1.1  # times the mean: so uneven whole sources may be dealt before they are cut into units


@dataclass(frozen=True, slots=True)
class Part:
    """Part `number` of `count`, counted from 0."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"part {self}: there is at least 1 part, as in 0/1")
        if not 0 <= self.number < self.count:
            raise ConfigError(
                f"part {self}: parts are counted from 0, so {self.count} of them are 0/{self.count} to "
                f"{self.count - 1}/{self.count} (sbatch --array=0-{self.count - 1})"
            )

    @staticmethod
    def parse(text: str) -> Part:
        """Of "3/16"; ConfigError for anything else."""
        found = re.fullmatch(r"\s*(-?\d+)\s*/\s*(-?\d+)\s*", text)
        if found is None:
            raise ConfigError(f"part {text!r}: expected I/N such as 3/16, the fourth of 16 parts")
        return Part(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


@dataclass(frozen=True, slots=True)
class Share:
    """The units of a part. owners: of each source the part that encodes all of it, None where its units are dealt."""

    part: Part
    owners: tuple[int | None, ...]

    @staticmethod
    def of(part: Part, sizes: Sequence[int], *, is_fetched: Sequence[bool]) -> Share:
        """sizes: bytes of each source, 0 where it is unknown. is_fetched: whether it is copied whole to be read.

        Whole sources are dealt where that is even enough, so that no part opens those of others; else units, in turn.
        Sources that are fetched are never fetched by two.

        >>> Share.of(Part(0, 2), [5, 4, 1], is_fetched=[False] * 3).owners
        (0, 1, 1)
        >>> Share.of(Part(0, 2), [9, 1, 1], is_fetched=[False, True, True]).owners
        (None, 0, 1)
        """
        owners, loads = _dealt(part.count, sizes, range(len(sizes)))
        if all(sizes) and max(loads) * part.count <= _FULLEST * sum(sizes):
            return Share(part, tuple(owners[source] for source in range(len(sizes))))
        fetched = [source for source, each in enumerate(is_fetched) if each]
        owners, _ = _dealt(part.count, sizes, fetched)
        return Share(part, tuple(owners.get(source) for source in range(len(sizes))))

    def reads(self, source: int) -> bool:
        """Whether any unit of the source may be this part's."""
        return self.owners[source] in (None, self.part.number)

    def has(self, source: int, index: int) -> bool:
        """Whether unit `index` of the source is this part's."""
        owner = self.owners[source]
        return (
            owner == self.part.number if owner is not None else (source + index) % self.part.count == self.part.number
        )


def _dealt(count: int, sizes: Sequence[int], sources: Sequence[int]) -> tuple[dict[int, int], list[int]]:
    """The part of each source, the largest first to the part that has least; and the bytes that each part has."""
    owners: dict[int, int] = {}
    loads = [0] * count
    for source in sorted(sources, key=lambda source: (-sizes[source], source)):
        owners[source] = min(range(count), key=lambda part: (loads[part], part))
        loads[owners[source]] += max(1, sizes[source])
    return owners, loads
