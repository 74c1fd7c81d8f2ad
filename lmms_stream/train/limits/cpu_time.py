"""CPU time of a process and of those that it started."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from ...processes.family import descendants

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def loader_cpu_s(num_workers: int) -> float:
    """CPU seconds so far of all processes that this one started, living and ended; without workers, of this one.

    Workers end with their epoch: what they took counts on, as that of their parent's children.
    """
    if not num_workers:
        return time.process_time()
    ended = os.times()
    return sum(map(_cpu_s, descendants(os.getpid())), ended.children_user + ended.children_system)


def _cpu_s(pid: int) -> float:
    """Of a process and of its children that have ended."""
    with suppress(OSError):  # it has ended
        of_both = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        return sum(map(int, of_both)) / _TICKS_PER_S
    return 0.0
