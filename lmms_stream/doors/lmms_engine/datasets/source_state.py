"""Rows that lanes have read: recorded pack by pack, saved, merged, and resumed with any number of readers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import index
from typing import Any, NamedTuple

from ....errors import CursorError, LmmsStreamError
from .streaming_packs import PieceRef

STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Counts of rows since the beginning. rows: rows read. unreadable: rows and files that were unreadable or invalid.

    empty: rows of empty texts. overlong: samples longer than a pack (or than max_length).
    """

    rows: int = 0
    samples: int = 0
    unreadable: int = 0
    empty: int = 0
    overlong: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(Counts)})


class UnitPosition(NamedTuple):
    """Position of a lane in a file: number of finished units, finished rows of this unit, finished pieces of this
    row.
    """

    unit: int = 0
    row: int = 0
    piece: int = 0


class KnownFile(NamedTuple):
    """A file of an epoch. digest: see SourceFile. look: number of earlier listings of the sources in the epoch."""

    digest: str
    look: int


KnownFiles = Mapping[str, KnownFile]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneStep:
    """Position of a lane, one of num_lanes, after a pack.

    finished: files finished since the lane's last pack, or since the epoch began.
    positions: positions in started files. open: pieces waiting in packs. known: files found since the reader's last
    pack.
    """

    lane: int
    num_lanes: int
    epoch: int
    num_packs: int
    counts: Counts
    finished: tuple[str, ...] = ()
    positions: Mapping[str, UnitPosition] = field(default_factory=dict)
    open: tuple[tuple[PieceRef, ...], ...] = ()
    known: KnownFiles = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneProgress:
    """Progress of a lane. finished: finished files of the epoch. Other fields: see LaneStep."""

    epoch: int = 0
    num_packs: int = 0
    counts: Counts = Counts()
    finished: frozenset[str] = frozenset()
    positions: Mapping[str, UnitPosition] = field(default_factory=dict)
    open: tuple[tuple[PieceRef, ...], ...] = ()


class SourcesState:
    """Position of reading: the progress of lanes with packs, and the files of each epoch in progress.

    step: complete steps delivered by a loader.
    """

    def __init__(self, fingerprint: str, num_lanes: int, *, step: int = 0):
        self.fingerprint = fingerprint
        self.num_lanes = num_lanes
        self.step = step
        self.lanes: dict[int, LaneProgress] = {}
        self.known: dict[int, dict[str, KnownFile]] = {}

    def lane(self, lane: int) -> LaneProgress:
        return self.lanes.get(lane, LaneProgress())

    @property
    def counts(self) -> Counts:
        """Counts of all lanes."""
        return sum((each.counts for each in self.lanes.values()), Counts())

    def deliver(self, after: LaneStep) -> None:
        """Record a delivered pack; a repeated call for the same pack has no effect."""
        before = self.lane(after.lane)
        if (after.epoch, after.num_packs) <= (before.epoch, before.num_packs):
            return
        finished = before.finished if before.epoch == after.epoch else frozenset()
        self.lanes[after.lane] = LaneProgress(
            epoch=after.epoch,
            num_packs=after.num_packs,
            counts=after.counts,
            finished=finished.union(after.finished),
            positions=after.positions,
            open=after.open,
        )
        self._learn(after.epoch, after.known)

    def set_epoch(self, epoch: int) -> None:
        """Move lanes in an earlier epoch to the start of this epoch, dropping the rest of theirs."""
        for lane in range(self.num_lanes):
            if self.lane(lane).epoch < epoch:
                here = self.lane(lane)
                self.lanes[lane] = replace(here, epoch=epoch, finished=frozenset(), positions={}, open=())

    def _learn(self, epoch: int, files: KnownFiles) -> None:
        known = self.known.setdefault(epoch, {})
        for key, file in files.items():
            if key not in known or file.look < known[key].look:
                known[key] = file

    def merge(self, others: Iterable[SourcesState]) -> SourcesState:
        """Return a state with the lanes of all states; CursorError unless they have the same sources and step."""
        merged = SourcesState(self.fingerprint, self.num_lanes, step=self.step)
        for state in (self, *others):
            if (state.fingerprint, state.num_lanes, state.step) != (self.fingerprint, self.num_lanes, self.step):
                raise CursorError(
                    f"states at steps {self.step} and {state.step}, of {self.num_lanes} and {state.num_lanes} lanes, "
                    "cannot be merged: save the states of all ranks of a run at the same step"
                )
            for lane, progress in state.lanes.items():
                here = merged.lane(lane)
                if lane not in merged.lanes or (progress.epoch, progress.num_packs) > (here.epoch, here.num_packs):
                    merged.lanes[lane] = progress
            for epoch, files in state.known.items():
                merged._learn(epoch, files)
        return merged

    def to_dict(self) -> dict[str, Any]:
        """Return plain ints, strings and lists, for JSON; see from_dict.

        Files are numbered in their order of discovery in the epoch.
        """
        epochs = {self.lane(lane).epoch for lane in range(self.num_lanes)}
        known = {epoch: files for epoch, files in sorted(self.known.items()) if epoch in epochs}
        return {
            "version": STATE_VERSION,
            "sources": self.fingerprint,
            "num_lanes": self.num_lanes,
            "step": self.step,
            "files": {str(epoch): [[key, *file] for key, file in files.items()] for epoch, files in known.items()},
            "lanes": {
                str(lane): _lane_to_dict(each, list(known.get(each.epoch, ())))
                for lane, each in sorted(self.lanes.items())
            },
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> SourcesState:
        """Read a state of to_dict; CursorError for another version or a damaged state."""
        if not isinstance(data, Mapping) or data.get("version") != STATE_VERSION or "sources" not in data:
            raise CursorError(
                "the saved state does not belong to sources read without conversion (or has another version): use a "
                "checkpoint of a run on the same MultiModalIterableDataset"
            )
        try:
            state = SourcesState(str(data["sources"]), _count(data["num_lanes"], least=1), step=_count(data["step"]))
            for epoch, files in data["files"].items():
                known = {str(key): KnownFile(str(digest), _count(look)) for key, digest, look in files}
                state.known[_count(int(epoch))] = known
            for lane, each in data["lanes"].items():
                keys = list(state.known.get(_count(each["epoch"]), ()))
                state.lanes[_count(int(lane), most=state.num_lanes - 1)] = _lane_from_dict(each, keys)
        except LmmsStreamError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CursorError(f"the saved state is damaged ({error!r}): use another checkpoint") from error
        return state


def _lane_to_dict(lane: LaneProgress, keys: Sequence[str]) -> dict[str, Any]:
    numbers = {key: number for number, key in enumerate(keys)}
    return {
        "epoch": lane.epoch,
        "num_packs": lane.num_packs,
        "counts": {each.name: getattr(lane.counts, each.name) for each in fields(Counts)},
        "finished": _ranges(sorted(numbers[key] for key in lane.finished)),
        "positions": [[numbers[key], *position] for key, position in lane.positions.items()],
        "open": [[[numbers[ref.file], *ref[1:]] for ref in pack] for pack in lane.open],
    }


def _lane_from_dict(data: Mapping[str, Any], keys: Sequence[str]) -> LaneProgress:
    return LaneProgress(
        epoch=_count(data["epoch"]),
        num_packs=_count(data["num_packs"]),
        counts=Counts(**{name: _count(value) for name, value in data["counts"].items()}),
        finished=frozenset(keys[_count(number)] for first, stop in data["finished"] for number in range(first, stop)),
        positions={keys[_count(number)]: UnitPosition(*map(_count, rest)) for number, *rest in data["positions"]},
        open=tuple(
            tuple(PieceRef(keys[_count(number)], *map(_count, rest)) for number, *rest in pack) for pack in data["open"]
        ),
    )


def _count(value: Any, *, least: int = 0, most: int = (1 << 62) - 1) -> int:
    number = index(value)
    if not least <= number <= most:
        raise ValueError(f"{number} is out of range")
    return number


def check_inside(what: str, position: int, num_units: int, *, where: str) -> None:
    """Raise CursorError for a saved position after the last unit, row or piece of a file."""
    if position > num_units:
        raise CursorError(
            f"the saved state is at {what} {position} of {where}, which has {num_units}: the state is damaged, or its "
            "sources have changed; restore them, or use another checkpoint"
        )


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending numbers as ranges [first, stop).

    >>> _ranges([0, 1, 2, 5])
    [[0, 3], [5, 6]]
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return ranges


def merged_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the saved states of all ranks at one step into one state, for any number of ranks."""
    first, *others = [SourcesState.from_dict(state) for state in states]
    return first.merge(others).to_dict()
