"""Commands in terminals: what is shown of a command, in a terminal of so many columns."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import wait

COMMAND_S = 60.0


def in_terminal(*arguments: str, columns: int, environment: Mapping[str, str] | None = None) -> str:
    """All that `lmms-stream` writes to a terminal, escapes too; AssertionError where it takes longer than COMMAND_S."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", "lmms_stream", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=inherited | {"TERM": "xterm-256color"} | dict(environment or {}),
    ) as process:
        os.close(theirs)
        try:
            return _read(ours, until=time.monotonic() + COMMAND_S)
        finally:
            os.close(ours)
            process.kill()


def _read(file: int, *, until: float) -> str:
    """What comes, to its end."""
    found = b""
    while True:
        ready = wait([file], max(0.0, until - time.monotonic()))
        assert ready, f"the command takes longer than {COMMAND_S:.0f} s; so far it wrote {found!r}"
        with suppress(OSError):  # Linux says so where the other side is closed
            if chunk := os.read(file, 1 << 16):
                found += chunk
                continue
        return found.decode().replace("\r\n", "\n")
