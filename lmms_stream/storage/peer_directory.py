"""Which nodes have a file, and which are taking it: what the file's home node keeps. Who asks -> where to take it from.

Each file has one home, so that of all nodes that lack it one asks the store, however many ask at once. From there it
spreads like a tree: a node that has it gives it to FAN_OUT others at a time, and so do these once they have it.

Times are seconds of one clock, and passed in.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Literal

FAN_OUT = 2  # nodes that take a file from one other at a time
CHECK_S = 1.0  # between looks at a node that takes a file for which others wait
STALL_S = 20.0  # without a byte more, after which a node that takes a file is not waited for

Key = tuple[str, str]  # the source of a file, and its name
Where = int | Literal["store", "wait"]  # a node; "wait": ask again, others are taking it


@dataclass(slots=True)
class _Taking:
    """A node that takes a file, since when. giver: None is the store. moved_at: when more of it was there last."""

    giver: int | None
    checked_at: float
    moved_at: float
    num_bytes: int = -1


@dataclass(slots=True)
class _Entry:
    holders: dict[int, int] = field(default_factory=dict)  # nodes that have it, how often each was named
    takers: dict[int, _Taking] = field(default_factory=dict)


class Directory:
    """The files of which one node is the home, in memory. Its methods may be called by any thread."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._lock = threading.Lock()

    def where(
        self, key: Key, node: int, *, without: Iterable[int] = (), avoid: Container[int] = (), now: float
    ) -> Where:
        """Where a node is to take a file from, which it lacks.

        without: nodes that it could not have it from, and so have it no more; avoid: nodes that it leaves alone, which
        others may take it from.
        """
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            entry.takers.pop(node, None)
            for each in (node, *without):
                entry.holders.pop(each, None)
            givers = [taking.giver for taking in entry.takers.values()]
            usable = [each for each in entry.holders if each not in avoid]
            free = [each for each in usable if givers.count(each) < FAN_OUT]
            if not free and (entry.takers or usable):
                return "wait"
            giver = min(free, key=entry.holders.__getitem__) if free else None
            entry.takers[node] = _Taking(giver, now, now)
            if giver is None:
                return "store"
            entry.holders[giver] += 1
            return giver

    def add(self, key: Key, node: int) -> None:
        """A node has a file now."""
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            entry.takers.pop(node, None)
            entry.holders.setdefault(node, 0)

    def suspect(self, key: Key, *, now: float) -> int | None:
        """A node that takes the file and was not looked at for CHECK_S; one caller is told."""
        with self._lock:
            for node, taking in self._entries[key].takers.items():
                if now - taking.checked_at >= CHECK_S:
                    taking.checked_at = now
                    return node
            return None

    def note(self, key: Key, node: int, num_bytes: int | None, *, now: float) -> None:
        """What was found of a node that takes a file: the bytes it has so far; None: it does not take it any more."""
        with self._lock:
            takers = self._entries[key].takers
            taking = takers.get(node)
            if taking is None:
                return
            if num_bytes is None or (num_bytes == taking.num_bytes and now - taking.moved_at >= STALL_S):
                del takers[node]
            elif num_bytes != taking.num_bytes:
                taking.num_bytes, taking.moved_at = num_bytes, now
