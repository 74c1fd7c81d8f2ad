"""The processes that a process has started, and that they have."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import current_process
from pathlib import Path

_NUMBER = re.compile(r"-(?:\d+:)*(\d+)$")  # in the name of a process


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


def first_number(worker: int) -> int:
    """The number of worker 0 among the processes of its program, told by worker number `worker` of the same row.

    multiprocessing numbers the processes that a process starts. 0 where this process has no number.
    """
    number = _NUMBER.search(current_process().name)
    return int(number[1]) - worker if number else 0


def is_running(pid: int) -> bool:
    """Whether there is a process of this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    return True
