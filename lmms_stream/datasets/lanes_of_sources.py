"""Which reader reads which lanes of sources, and whether a saved state is of the same packs."""

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
from typing import Any

from ..converters.rows.mapper import ROWS_VERSION
from ..converters.sources.units import CUT_VERSION
from ..errors import CursorError
from ..plan.lanes import allowed_readers, check_lanes
from ..processors.base import processor_fingerprint
from ..types import World
from .rows_of_sources import Reading
from .source_files import MAX_UNIT_BYTES, MIN_UNIT_BYTES, UNITS_PER_LANE, UNKNOWN_BYTES, SourcesOf, list_files
from .source_reader import SourcePack, SourceReader
from .source_state import SourcesState

MAX_LANES = 64  # that are chosen, unless there are more readers
LANE_PACKS = 32  # that a lane has at least, where it is chosen: at the end of an epoch its last pack is half full
TOKEN_BYTES = 4  # of text
_DIGEST_BYTES = 8


def choose_lanes(sources_of: SourcesOf | None, reading: Reading, num_readers: int) -> int:
    """Return the number of lanes of a run: a power of two for each reader, so that each lane fills LANE_PACKS packs.

    At most MAX_LANES, and at least one for each reader. Where a pack is a sample, or no source says how large it
    is, there are as many as may be.
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


def _bytes_of(sources_of: SourcesOf, reading: Reading) -> int:
    """Return the bytes of all sources that say theirs."""
    with _scratch() as scratch:
        found = list_files(sources_of(), num_lanes=1, scratch=scratch, keeps_refused=reading.on_error == "skip")
        return sum(file.source.num_bytes for file in found.values() if file.source is not None)


def check_readers(num_lanes: int, num_readers: int) -> None:
    """CursorError where readers cannot share the lanes of a saved state."""
    if num_lanes % num_readers:
        raise CursorError(
            f"the saved state has {num_lanes} lanes, which {num_readers} readers cannot share: ranks times workers "
            f"must be one of {', '.join(map(str, allowed_readers(num_lanes)))}"
        )


def reader_lanes(num_lanes: int, *, world: World, worker: int, num_workers: int) -> list[int]:
    """The lanes of worker `worker` of num_workers of a rank; ConfigError where some reader would have none.

    >>> reader_lanes(8, world=World(rank=1, world_size=2), worker=1, num_workers=2)
    [3, 7]
    """
    check_lanes(num_lanes, world.num_groups, num_workers)
    return list(range(world.group + world.num_groups * worker, num_lanes, world.num_groups * num_workers))


def reading_packs(
    sources_of: SourcesOf, reading: Reading, *, lanes: Sequence[int], state: SourcesState, endless: bool
) -> Iterator[SourcePack]:
    """The packs of lanes; what is fetched of sources meanwhile lies in the system's temporary folder."""
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


def fingerprint_of(reading: Reading) -> str:
    """Of all that rows and their packs follow from, but for the sources, which may grow: PART=DIGEST, …"""
    units = [CUT_VERSION, UNITS_PER_LANE, MIN_UNIT_BYTES, MAX_UNIT_BYTES, UNKNOWN_BYTES]
    parts = {
        "processor": processor_fingerprint(reading.processor),
        "packing": [asdict(reading.packing), reading.overlong, reading.max_length],
        "order": reading.seed,
        "rows": [ROWS_VERSION, reading.rows.asked],
        "units": units,
    }
    return ", ".join(f"{name}={_digest(value)}" for name, value in parts.items())


def check_state(state: SourcesState, fingerprint: str, *, num_lanes: int | None) -> SourcesState:
    """Return the state; CursorError where it is of other lanes or settings. num_lanes: None for any."""
    if num_lanes is not None and state.num_lanes != num_lanes:
        raise CursorError(
            f"the saved state has {state.num_lanes} lanes, this dataset {num_lanes}: set num_canonical_nodes to "
            f"{state.num_lanes}, with ranks times workers one of "
            f"{', '.join(map(str, allowed_readers(state.num_lanes)))}"
        )
    if state.fingerprint != fingerprint:
        saved, now = (dict(part.split("=") for part in text.split(", ")) for text in (state.fingerprint, fingerprint))
        names = ", ".join(name for name in now if saved.get(name) != now[name])
        raise CursorError(f"the saved state is of other settings ({names}): restore them, or begin anew without it")
    return state


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=_DIGEST_BYTES).hexdigest()
