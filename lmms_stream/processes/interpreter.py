"""One call in an interpreter of its own, which may start processes in turn. call -> its result, or its error.

A spawned process imports the script of its parent, and runs it again if its main part has no guard. This interpreter
imports only what the call names, so any script, notebook or worker may use it.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe, connection
from typing import Any

from ..errors import LmmsStreamError, WorkerError
from ..processors.tokenizers import ONE_THREAD

_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from lmms_stream.processes import interpreter; interpreter.answer({pipe})"
)


def call_in_interpreter(call: Callable[[Callable[[int], None]], Any], *, on_progress: Callable[[int], None]) -> Any:
    """Return the result of `call`, or raise its error; WorkerError when its process dies.

    call: is pickled with all its values, and takes a function for its progress. Its process ends with this one.
    """
    ours, theirs = Pipe()
    program = _PROGRAM.format(path=sys.path, pipe=theirs.fileno())
    command = [sys.executable, "-c", program]
    environment = os.environ | ONE_THREAD  # each core will have a process of its own
    with ours, subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        try:
            ours.send_bytes(pickle.dumps(call))
            return _result(ours, on_progress)
        except LmmsStreamError:
            raise
        except (EOFError, OSError) as error:
            status = process.wait()
            raise WorkerError(f"process {process.pid} ended (status {status}) before it was done") from error
        finally:
            process.kill()


def _result(pipe: connection.Connection, on_progress: Callable[[int], None]) -> Any:
    while True:
        kind, value = pipe.recv()
        if kind == "error":
            raise value
        if kind == "result":
            return value
        on_progress(value)


def answer(descriptor: int) -> None:
    """Run the call that the parent sends, and send its result or its error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that waits, which ends this one
    pipe = connection.Connection(descriptor)
    try:
        call = pickle.loads(pipe.recv_bytes())
        answered = "result", call(lambda count: pipe.send(("progress", count)))
    except (EOFError, BrokenPipeError):  # nobody waits any more
        return
    except LmmsStreamError as error:
        answered = "error", error
    except Exception as error:  # noqa: BLE001 - it is raised by the process that waits
        answered = "error", WorkerError(repr(error))
    pipe.send(answered)
