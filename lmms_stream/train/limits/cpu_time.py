"""CPU time of a process and of those that it started."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from ...processes.family import descendants

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def loader_cpu_s(num_workers: int) -> float:
    """CPU seconds so far of all processes that this one started, which live; without workers, of this one."""
    return sum(map(_cpu_s, descendants(os.getpid()))) if num_workers else time.process_time()


def _cpu_s(pid: int) -> float:
    with suppress(OSError):  # it has ended
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / _TICKS_PER_S
    return 0.0
