"""Memory that was freed goes back to the system."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lmms_stream.freed_memory import give_back_memory

MIB = 1 << 20
STATUS = Path("/proc/self/status")


def private_bytes() -> int:
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@pytest.mark.skipif(not STATUS.exists(), reason="the kernel says how much memory a process has")
def test_memory_that_was_freed_goes_back_to_the_system_from_between_what_is_still_used() -> None:
    give_back_memory()
    before = private_bytes()
    arrays = [np.ones(64 << 10, np.uint8) for _ in range(1600)]  # too small for mappings of their own
    assert private_bytes() - before > 90 * MIB
    kept = arrays[::16]
    arrays.clear()
    give_back_memory()
    assert private_bytes() - before < 20 * MIB
    assert all(array.all() for array in kept)
