"""What the server of fork_server.py imports before all else.

It outlives signals that tell a whole job to stop, and says nothing of a process that asked for a fork and ended before
it had said what for: somebody has interrupted it.
"""

from __future__ import annotations

import sys
from pickle import UnpicklingError
from types import TracebackType

from ..signals import outlive_stop_signals


def _tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, EOFError | UnpicklingError):
        sys.__excepthook__(kind, error, traceback)


outlive_stop_signals()
sys.excepthook = _tell
