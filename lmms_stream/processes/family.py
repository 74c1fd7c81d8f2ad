"""The processes that a process has started, and that they have."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> Iterator[int]:
    """The ids of those that live, as the kernel tells."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            for child in map(int, listed.read_text().split()):
                yield child
                yield from descendants(child)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    with suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
