"""One call in a new interpreter, allowed to start processes. call -> result or error.

A spawned process imports its parent's script, and runs an unguarded script again. The new interpreter imports only the
modules of the call; any script, notebook or worker can use the new interpreter.
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
    """Return the result of `call`, or raise its error; WorkerError if its process dies.

    call: pickled with all values; receives a function for its progress. The process of the call ends with this process.
    """
    ours, theirs = Pipe()
    program = _PROGRAM.format(path=sys.path, pipe=theirs.fileno())
    command = [sys.executable, "-c", program]
    environment = os.environ | ONE_THREAD  # each core will have its own process
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
    """Receive a call from the parent, run the call, and send the result or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the waiting parent, and the parent ends this process
    pipe = connection.Connection(descriptor)
    try:
        call = pickle.loads(pipe.recv_bytes())
        answered = "result", call(lambda count: pipe.send(("progress", count)))
    except (EOFError, BrokenPipeError):  # nobody waits any more
        return
    except LmmsStreamError as error:
        answered = "error", error
    except Exception as error:  # noqa: BLE001 - raised by the waiting process
        answered = "error", WorkerError(repr(error))
    pipe.send(answered)
