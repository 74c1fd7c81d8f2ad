"""When a checkpoint is due by time."""

from __future__ import annotations

import time


class SaveClock:
    """Whether so many minutes have passed since the last checkpoint, or since this was made; never without minutes.

    Clocks of ranks differ: that of rank 0 counts, which tells the others with the counts of a step.
    """

    def __init__(self, minutes: float | None, *, rank: int):
        self._seconds = None if minutes is None or rank != 0 else minutes * 60
        self.restart()

    @property
    def is_due(self) -> bool:
        """Always False on ranks other than 0."""
        return self._seconds is not None and time.monotonic() - self._since >= self._seconds

    def restart(self) -> None:
        """A checkpoint is being saved."""
        self._since = time.monotonic()
