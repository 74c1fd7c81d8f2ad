"""First import of the server in fork_server.py.

The server ignores a job's stop signals. The server prints no error if a client ends in the middle of a request for a
fork: the client was interrupted.
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
