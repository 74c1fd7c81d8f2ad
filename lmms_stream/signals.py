"""Signals to end a run or a command, and the signal for workers to write their stacks.

A run takes note of the signal, and its workers work until the run has ended. Other commands end at once.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # SLURM can be asked to send SIGUSR1 before its limit
_SAME_S = 2.0  # a terminal and torchrun both send a rank the SIGINT of one Ctrl-C
STACKS_SIGNAL = signal.SIGUSR2  # has a loader worker write the stacks of its threads to standard error
_GRACE_S = 30.0  # launchers kill what is left after as long


class StopSignal:
    """Block in which stop signals only set is_received; a second Ctrl-C raises KeyboardInterrupt.

    Before has_begun is set, with nothing to save, the first Ctrl-C raises KeyboardInterrupt. Signals reach the main
    thread only: a block in another thread receives nothing. A program that ignores or handles SIGINT itself keeps its
    handler.
    """

    def __init__(self) -> None:
        self.is_received = self.has_begun = False
        self._error: Exception | None = None
        self._interrupted_at: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in _STOP_SIGNALS:
                if number != signal.SIGINT or signal.getsignal(number) is signal.default_int_handler:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def raising(self, error: Exception) -> Iterator[None]:
        """Raise the error inside, at once, for a signal received before or inside."""
        if self.is_received:
            raise error
        self._error = error
        try:
            yield
        finally:
            self._error = None

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.is_received = True
        error, self._error = self._error, None  # a second signal does not end the clean-up
        if error is not None:
            raise error
        if number != signal.SIGINT:
            return
        if not self.has_begun:
            raise KeyboardInterrupt
        if self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                os.write(2, b"interrupted: a checkpoint is saved after this step; press Ctrl-C again to end at once\n")
        elif time.monotonic() > self._interrupted_at + _SAME_S:
            raise KeyboardInterrupt


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM: the command and its child processes end as after Ctrl-C."""


@contextmanager
def raised_termination() -> Iterator[None]:
    """Raise Terminated for SIGTERM inside the block, unless the program handles it or this is not its main thread."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, _: FrameType | None) -> None:
    raise Terminated


def outlive_stop_signals() -> None:
    """Ignore stop signals in a fork server: its end would look like the end of its workers."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def outlive_stop_signal(worker: int) -> None:
    """Let a loader worker continue for a while after a stop signal to the job: the run still takes batches.

    A crashed worker reports the location, unlike torch's handlers. worker: number of the worker, passed by torch.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes of a job
    signal.signal(signal.SIGTERM, _end_later)
    faulthandler.register(STACKS_SIGNAL, file=2)
    faulthandler.disable()  # as a parent may have enabled it, and torch has put its own handlers above
    faulthandler.enable(file=2)


def _end_later(number: int, _: FrameType | None) -> None:
    timer = threading.Timer(_GRACE_S, os._exit, [128 + number])
    timer.daemon = True
    timer.start()
