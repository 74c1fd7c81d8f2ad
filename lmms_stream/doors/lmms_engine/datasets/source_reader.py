"""Packs of some lanes, read from sources. files + state -> [reader] -> packs, each with the state of its lane.

A reader reads the files of an epoch in order, and the units of a file in order; it skips units of other lanes. Rows go
to the packer of their lane. Memory holds only one unit and the open packs.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from ....converters.rows.mapper import COUNTS_VERSION, Mapper
from ....converters.sources.units import CUT_VERSION, NoRowsError, Unit
from ....errors import CursorError, DataError, ObjectMissingError
from ....plan.lanes import allowed_readers, check_lanes
from ....processors.base import processor_fingerprint
from ....types import Processed, World
from .rows_of_sources import Content, RowReader, SourceRowSettings, Tally, prepared, row_name
from .source_files import (
    MAX_UNIT_BYTES,
    MIN_UNIT_BYTES,
    UNITS_PER_LANE,
    UNKNOWN_BYTES,
    SourceFile,
    SourcesOf,
    file_order,
    lane_of,
    list_files,
)
from .source_state import KnownFile, LaneStep, SourcesState, UnitPosition, check_inside
from .streaming_packs import PieceRef, SamplePiece, StreamingPacker


class SourcePack(NamedTuple):
    """A pack from a reader. sample_ids: see sample_id_of.

    afters: position of its lane after the pack; the last pack of an epoch also has the positions of all lanes of the
    reader at the end of the epoch.
    """

    samples: list[Processed]
    sample_ids: list[int]
    afters: tuple[LaneStep, ...]


class _Lane:
    """A lane in progress; see LaneProgress."""

    def __init__(self, number: int, state: SourcesState, reading: SourceRowSettings):
        progress = state.lane(number)
        self.number = number
        self._num_lanes = reading.num_lanes
        self.epoch = progress.epoch
        self.num_packs = progress.num_packs
        self.tally = Tally.of(progress.counts)
        self.finished = set(progress.finished)
        self.positions = dict(progress.positions)
        self.packer = StreamingPacker(reading.packing)
        self._untold: list[str] = []

    def finish(self, key: str) -> None:
        self.positions.pop(key, None)
        self.finished.add(key)
        self._untold.append(key)

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.finished.clear()
        self.positions.clear()
        self._untold.clear()

    def after(self, known: dict[str, KnownFile]) -> LaneStep:
        """Return the current position of the lane, and count one more pack."""
        self.num_packs += 1
        untold, self._untold = tuple(self._untold), []
        return LaneStep(
            lane=self.number,
            num_lanes=self._num_lanes,
            epoch=self.epoch,
            num_packs=self.num_packs,
            counts=self.tally.counts,
            finished=untold,
            positions=dict(self.positions),
            open=self.packer.open_refs,
            known=known,
        )


class SourceReader:
    """Reader of lanes from a state on. scratch: folder for downloaded files, one at a time.

    Raises DataError, StorageError, ConfigError, PackingError, and CursorError for a state of other files.
    """

    def __init__(
        self,
        sources_of: SourcesOf,
        reading: SourceRowSettings,
        *,
        lanes: Sequence[int],
        state: SourcesState,
        scratch: Path,
    ):
        self._sources_of = sources_of
        self._reading = reading
        self._rows = RowReader(reading)
        self._scratch = scratch
        self._lanes = [_Lane(number, state, reading) for number in lanes]
        self._state = state
        self._known = {epoch: dict(files) for epoch, files in state.known.items()}
        self._untold: dict[str, KnownFile] = {}

    def packs(self, *, endless: bool) -> Iterator[SourcePack]:
        """Yield the packs of the earliest epoch of the lanes; endless: also of all later epochs."""
        yield from self._restored()
        while True:
            epoch = min(lane.epoch for lane in self._lanes)
            is_begun = any(lane.finished or lane.positions or lane.epoch > epoch for lane in self._lanes)
            num_packs = 0
            last: SourcePack | None = None  # possibly the last of the epoch, if no piece waits for another pack
            for pack in self._epoch(epoch):
                num_packs += 1
                if last is not None:
                    yield last
                # pieces wait in open packs: another pack of this epoch follows
                last = None if any(any(lane.packer.open_refs) for lane in self._in(epoch)) else pack
                if last is None:
                    yield pack
            if last is not None:
                yield last._replace(afters=(*last.afters, *self._ends(epoch)))
            if not endless:
                return
            if not num_packs and not is_begun:
                numbers = ", ".join(str(lane.number) for lane in self._lanes)
                raise DataError(
                    f"lanes {numbers} of {self._reading.num_lanes} have no sample in epoch {epoch}: take fewer ranks "
                    "and workers, or name more rows"
                )
            for lane in self._lanes:
                if lane.epoch == epoch:
                    lane.begin_epoch(epoch + 1)
            self._untold = {}  # files of this epoch
            self._known.pop(epoch, None)

    def _epoch(self, epoch: int) -> Iterator[SourcePack]:
        """Yield the packs of all files listed at the epoch's beginning, then of files added meanwhile, until none is
        added.
        """
        listed = self._list()
        known = self._known.setdefault(epoch, {})
        if not known:
            self._learn(epoch, listed, look=0)
        look = 0
        while True:
            keys = [key for key, file in known.items() if file.look == look]
            for key in file_order(keys, seed=self._reading.seed, epoch=epoch):
                yield from self._file(key, listed, epoch)
            look += 1
            if any(file.look >= look for file in known.values()):
                continue
            listed = self._list()
            if not self._learn(epoch, listed, look=look):
                break
        for lane in self._in(epoch):
            for pieces in lane.packer.flush():
                yield from self._given(lane, pieces)

    def _in(self, epoch: int) -> list[_Lane]:
        return [lane for lane in self._lanes if lane.epoch == epoch]

    def _ends(self, epoch: int) -> list[LaneStep]:
        """Return the lanes at the end of an epoch, including rows left out after their last packs."""
        known, self._untold = self._untold, {}
        return [lane.after(known) for lane in self._in(epoch)]

    def _learn(self, epoch: int, listed: dict[str, SourceFile], *, look: int) -> bool:
        """Add new files to the epoch; return whether there are any."""
        new = {key: KnownFile(file.digest, look) for key, file in listed.items() if key not in self._known[epoch]}
        self._known[epoch].update(new)
        self._untold.update(new)
        return bool(new)

    def _list(self) -> dict[str, SourceFile]:
        return list_files(
            self._sources_of(),
            num_lanes=self._reading.num_lanes,
            scratch=self._scratch,
            keeps_refused=self._reading.on_error == "skip",
        )

    def _units(self, file: SourceFile) -> Iterator[tuple[int, Unit]]:
        """Yield units with numbers; an invalid file raises at the first unit."""
        yield from enumerate(file.opened.units())

    def _file(self, key: str, listed: dict[str, SourceFile], epoch: int) -> Iterator[SourcePack]:
        """Yield the packs of a file's unread rows, for the lanes in this epoch."""
        lanes = {lane.number: lane for lane in self._lanes if lane.epoch == epoch and key not in lane.finished}
        if not lanes:
            return
        file = self._unchanged(key, listed, epoch)
        try:
            mapper, units, num_units = None, self._units(file), 0
            while True:
                try:
                    mapper = mapper or self._rows.mapper(file)
                    number, unit = next(units)
                    num_units = number + 1
                except StopIteration:
                    for mine in lanes.values():
                        check_inside("unit", mine.positions.get(key, UnitPosition()).unit, num_units, where=key)
                    break
                except DataError as error:
                    owner = lanes.get(lane_of(key, 0, self._reading.num_lanes))  # exactly one reader counts it
                    if isinstance(error, NoRowsError) and file.source is not None and file.source.is_part:
                        if owner is not None:
                            self._rows.pass_empty(error)
                        break
                    if owner is not None or self._reading.on_error == "fail":
                        self._rows.leave_out(error, owner.tally if owner else Tally())
                    break
                lane = lanes.get(lane_of(key, number, self._reading.num_lanes))
                if lane is not None and number >= lane.positions.get(key, UnitPosition()).unit:
                    yield from self._unit(lane, file, mapper, number, unit)
        finally:
            if file.source is not None:
                file.source.close()
        for lane in lanes.values():
            lane.finish(key)

    def _unit(self, lane: _Lane, file: SourceFile, mapper: Mapper, number: int, unit: Unit) -> Iterator[SourcePack]:
        """Yield the packs of a unit's unread rows."""
        key, at = file.key, lane.positions.get(file.key, UnitPosition())
        first = at if at.unit == number else UnitPosition(number)
        lane.positions[key] = first
        try:
            rows = self._rows.rows(file, unit, number, epoch=lane.epoch, first=first.row)
            for index, row in prepared(rows, mapper, self._reading, unit.folder):
                begun = first.piece if index == first.row else 0
                tally = lane.tally if not begun else Tally()  # a started row is counted already
                where = row_name(key, number, row.number)
                contents = self._rows.contents(row, where=where, tally=tally)
                check_inside("piece", begun, len(contents), where=where)
                for piece, content in enumerate(contents[begun:], start=begun):
                    lane.positions[key] = UnitPosition(number, index, piece + 1)
                    ref = PieceRef(key, number, index, piece, content.length)
                    for pieces in lane.packer.put(SamplePiece(ref, content)):
                        yield from self._given(lane, pieces)
                lane.positions[key] = UnitPosition(number, index + 1)
        except DataError as error:
            if self._reading.on_error == "fail":
                raise
            self._rows.leave_out(DataError(f"the rest of unit {number + 1} of {error}"), lane.tally)
        lane.positions[key] = UnitPosition(number + 1)

    def _given(self, lane: _Lane, pieces: list[SamplePiece]) -> Iterator[SourcePack]:
        samples, sample_ids = self._rows.samples_of(pieces, lane.tally, epoch=lane.epoch)
        if samples:
            known, self._untold = self._untold, {}
            yield SourcePack(samples, sample_ids, (lane.after(known),))

    def _unchanged(self, key: str, listed: dict[str, SourceFile], epoch: int) -> SourceFile:
        file = listed.get(key)
        if file is None:
            raise ObjectMissingError(f"{key}: the file was removed before it was read to its end: restore it")
        if file.digest != self._known[epoch][key].digest:
            raise DataError(
                f"{key} was changed during reading: restore its content, or start the epoch over; write new rows to "
                "new files"
            )
        return file

    # Resuming from a state

    def _restored(self) -> Iterator[SourcePack]:
        """Restore the open packs of a state; of earlier rows, only the rows of their pieces are read again."""
        refs = {lane.number: self._state.lane(lane.number).open for lane in self._lanes}
        wanted: dict[tuple[int, str], set[PieceRef]] = {}
        for lane in self._lanes:
            for ref in (each for pack in refs[lane.number] for each in pack):
                wanted.setdefault((lane.epoch, ref.file), set()).add(ref)
        listed = self._list() if wanted else {}
        contents: dict[PieceRef, Content] = {}
        for (epoch, key), of_file in wanted.items():
            contents.update(self._read_again(self._unchanged(key, listed, epoch), of_file, epoch))
        for lane in self._lanes:
            lane.packer.restore([[SamplePiece(ref, contents[ref]) for ref in pack] for pack in refs[lane.number]])
            for pieces in lane.packer.due():
                yield from self._given(lane, pieces)

    def _read_again(self, file: SourceFile, refs: set[PieceRef], epoch: int) -> dict[PieceRef, Content]:
        mapper, last = self._rows.mapper(file), max(ref.unit for ref in refs)
        rows = {(ref.unit, ref.row) for ref in refs}
        found: dict[PieceRef, Content] = {}
        try:
            for number, unit in enumerate(file.opened.units()):
                indices = {row for of_unit, row in rows if of_unit == number}
                if not indices:
                    continue
                again = self._rows.rows(file, unit, number, epoch=epoch, only=indices)
                for index, row in prepared(again, mapper, self._reading, unit.folder):
                    where = row_name(file.key, number, row.number)
                    made = self._rows.contents(row, where=where, tally=Tally())
                    for piece, content in enumerate(made):
                        found[PieceRef(file.key, number, index, piece, content.length)] = content
                if number == last:
                    break
        finally:
            if file.source is not None:
                file.source.close()
        if missing := refs - found.keys():
            ref = min(missing)
            raise CursorError(
                f"the saved state has {row_name(ref.file, ref.unit, ref.row)} with {ref.length} tokens, and its tokens "
                "have changed: restore the sources, the processor and its settings, or use another checkpoint"
            )
        return found


# Lanes of each reader, and compatibility of a saved state with the packs.

MAX_LANES = 64  # maximum number of lanes chosen by default, unless there are more readers
LANE_PACKS = 32  # minimum packs per lane in the default choice: a lane's last pack of an epoch is half full
TOKEN_BYTES = 4  # bytes of text per token
_DIGEST_BYTES = 8


def choose_lanes(sources_of: SourcesOf | None, reading: SourceRowSettings, num_readers: int) -> int:
    """Return the number of lanes of a run: num_readers times a power of two, with at least LANE_PACKS packs per lane.

    At most MAX_LANES, and at least one per reader. If a pack is one sample, or no source has a known size, return the
    maximum.
    """
    most = MAX_LANES
    if sources_of is not None and reading.packing.max_samples_per_pack != 1:
        num_bytes = _bytes_of(sources_of, reading)
        if num_bytes:
            most = min(most, num_bytes // (LANE_PACKS * reading.packing.packing_length * TOKEN_BYTES))
    num_lanes = num_readers
    while 2 * num_lanes <= most:
        num_lanes *= 2
    return num_lanes


def _bytes_of(sources_of: SourcesOf, reading: SourceRowSettings) -> int:
    """Return the total bytes of all sources with a known size."""
    with _scratch() as scratch:
        found = list_files(sources_of(), num_lanes=1, scratch=scratch, keeps_refused=reading.on_error == "skip")
        return sum(file.source.num_bytes for file in found.values() if file.source is not None)


def check_readers(num_lanes: int, num_readers: int) -> None:
    """Raise CursorError if the readers cannot share the lanes of a saved state."""
    if num_lanes % num_readers:
        raise CursorError(
            f"the saved state has {num_lanes} lanes, which {num_readers} readers cannot share: ranks times workers "
            f"must be one of {', '.join(map(str, allowed_readers(num_lanes)))}"
        )


def reader_lanes(num_lanes: int, *, world: World, worker: int, num_workers: int) -> list[int]:
    """Return the lanes of worker `worker` of num_workers of a rank; ConfigError if a reader would have no lane.
    >>> reader_lanes(8, world=World(rank=1, world_size=2), worker=1, num_workers=2)
    [3, 7]
    """
    check_lanes(num_lanes, world.num_groups, num_workers)
    return list(range(world.group + world.num_groups * worker, num_lanes, world.num_groups * num_workers))


def reading_packs(
    sources_of: SourcesOf, reading: SourceRowSettings, *, lanes: Sequence[int], state: SourcesState, endless: bool
) -> Iterator[SourcePack]:
    """Yield the packs of lanes; downloads are stored in the system's temporary folder meanwhile."""
    with _scratch() as scratch:
        reader = SourceReader(sources_of, reading, lanes=lanes, state=state, scratch=scratch)
        yield from reader.packs(endless=endless)


@contextmanager
def _scratch() -> Iterator[Path]:
    scratch = Path(tempfile.gettempdir()) / f"lmms-stream-sources-{uuid.uuid4().hex}"
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def fingerprint_of(reading: SourceRowSettings) -> str:
    """Return a fingerprint of all settings of rows and packs, as PART=DIGEST, …; without the sources, which may
    grow.
    """
    units = [CUT_VERSION, UNITS_PER_LANE, MIN_UNIT_BYTES, MAX_UNIT_BYTES, UNKNOWN_BYTES]
    parts: dict[str, Any] = {
        "processor": processor_fingerprint(reading.processor),
        "packing": [asdict(reading.packing), reading.overlong, reading.max_length],
        "order": reading.seed,
        "rows": [COUNTS_VERSION, reading.rows.identity],
        "units": units,
    }
    if reading.loader is not None:
        parts["loader"] = [reading.loader.name, reading.loader.code]
    return ", ".join(f"{name}={_digest(value)}" for name, value in parts.items())


def check_state(state: SourcesState, fingerprint: str, *, num_lanes: int | None) -> SourcesState:
    """Return the state; CursorError for a state of other lanes or settings. num_lanes: None for any number."""
    if num_lanes is not None and state.num_lanes != num_lanes:
        raise CursorError(
            f"the saved state has {state.num_lanes} lanes, this dataset {num_lanes}: set num_canonical_nodes to "
            f"{state.num_lanes}, with ranks times workers one of "
            f"{', '.join(map(str, allowed_readers(state.num_lanes)))}"
        )
    if state.fingerprint != fingerprint:
        saved, now = (dict(part.split("=") for part in text.split(", ")) for text in (state.fingerprint, fingerprint))
        names = ", ".join(name for name in now if saved.get(name) != now[name])
        raise CursorError(
            f"the saved state has other settings ({names}): restore them, or start over without the state"
        )
    return state


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=_DIGEST_BYTES).hexdigest()
