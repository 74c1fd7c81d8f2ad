"""Signals that tell a run to stop: the run takes note, and its workers go on until it has stopped.

And one that has workers write their stacks.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from types import FrameType
from typing import Any

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # the second is what SLURM is asked to send before its time limit
STACKS_SIGNAL = signal.SIGUSR2  # has a loader worker write the stacks of its threads to standard error
_GRACE_S = 30.0  # launchers kill what is left after as long


class StopSignal:
    """Whether this process was told to stop, within the block.

    Signals reach the main thread alone: a block in another receives nothing.
    """

    def __init__(self) -> None:
        self.is_received = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in _STOP_SIGNALS:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.is_received = True


def outlive_stop_signals() -> None:
    """Take no notice of them: a server of forked processes, which would be taken for dead without it, lives as long."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def outlive_stop_signal(worker: int) -> None:
    """Let a loader worker go on for a while when its whole job is told to stop: the run still takes its batches.

    worker: its number, which torch passes.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_later)
    faulthandler.register(STACKS_SIGNAL, file=2)


def _end_later(number: int, _: FrameType | None) -> None:
    timer = threading.Timer(_GRACE_S, os._exit, [128 + number])
    timer.daemon = True
    timer.start()
