"""Standard output of a command, whose errors are those of the command and of nothing that it works on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class OutputError(Exception):
    """Standard output cannot be written; not an OSError, which handlers take for one of the disk that they write to."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"standard output cannot be written ({cause.strerror}): free some room, or write elsewhere")
        self.is_closed = isinstance(cause, BrokenPipeError)  # by its reader, such as head, which has read enough


class _Output:
    """A stream that raises OutputError."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise OutputError(error) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputError(error) from error


@contextmanager
def checked_output() -> Iterator[None]:
    """Inside, and at the end for what is still buffered, standard output raises OutputError."""
    stream = sys.stdout
    output = _Output(stream)
    sys.stdout = output
    try:
        yield
    except OutputError:
        raise
    except BaseException:
        output.flush()
        raise
    else:
        output.flush()
    finally:
        sys.stdout = stream


def discard_output() -> None:
    """Send what is still buffered nowhere, so that the interpreter does not try to write it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
