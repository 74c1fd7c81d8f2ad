"""Which reader reads which lanes of sources, and whether a saved state is of the same packs."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
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
from .source_files import MAX_UNIT_BYTES, MIN_UNIT_BYTES, UNITS_PER_LANE, UNKNOWN_BYTES, SourcesOf
from .source_reader import SourcePack, SourceReader
from .source_state import SourcesState

_DIGEST_BYTES = 8


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
    scratch = Path(tempfile.gettempdir()) / f"lmms-stream-sources-{uuid.uuid4().hex}"
    reader = SourceReader(sources_of, reading, lanes=lanes, state=state, scratch=scratch)
    try:
        yield from reader.packs(endless=endless)
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


def check_state(state: SourcesState, fingerprint: str, *, num_lanes: int) -> SourcesState:
    """The state; CursorError where it is of other lanes or settings."""
    if state.num_lanes != num_lanes:
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
