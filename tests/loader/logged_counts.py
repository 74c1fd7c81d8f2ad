"""Pack counts that log what is counted. A module of its own, so that processes that use it start soon."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from lmms_stream.mds.core import PackCountsFolder
from lmms_stream.plan.lengths import Lengths
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig
from numpy.typing import NDArray

LOG = "counted"


class LoggedCounts(PackCountsFolder):
    """Writes a line for each key whose counts were made."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.folder = folder

    def __setitem__(self, key: str, counts: NDArray[np.int64]) -> None:
        super().__setitem__(key, counts)
        with (self.folder / LOG).open("a") as log:
            log.write(f"{key}\n")


class SlowLengths(Lengths):
    """Lengths of which each block takes `pause_s` to count."""

    pause_s = 0.0

    def release(self) -> None:
        time.sleep(self.pause_s)


def log_of(folder: Path) -> list[str]:
    """The keys that were counted, in turn."""
    return (folder / LOG).read_text().splitlines()


def small_plan(folder: Path, *, pause_s: float = 0.0) -> PackPlan:
    """A plan of 900 samples in 10 blocks whose counts are kept in a folder."""
    SlowLengths.pause_s = pause_s
    counts = LoggedCounts(folder)
    plan = PackPlan(
        SlowLengths(lengths=np.random.default_rng(0).integers(1, 60, 900), content_hash="a"),
        [300, 300, 300],
        order=OrderConfig(num_canonical_nodes=1, shuffle_block_size=90),
        packing=PackingConfig(packing_length=128),
        counts_cache=counts,
        counting=counts.counting,
    )
    plan.is_short = False  # its epochs are counted as those of many samples are
    return plan
