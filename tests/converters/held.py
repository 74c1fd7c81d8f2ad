"""Commands that read as far as a row, wait there, and are killed: at a moment that depends on no clock."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmms_stream.storage.storage import open_storage

from ..processes import Job, running_after, start_module

LIMIT_S = 120.0
NUM_FILES, ROWS_PER_FILE = 8, 200
HELD = 5 * ROWS_PER_FILE + 150  # a row of the sixth file, behind the first rows that tell the kind of rows
PASS = "pass"  # the name of the file that lets the row pass
MAP = ("--map", "holding.py:hold")
OWN_CODE = f"""
import time
from pathlib import Path

def hold(row):
    while row["messages"][0]["content"] == "{HELD}?" and not Path("{PASS}").exists():
        time.sleep(0.05)
    return row
"""


def chat(number: int) -> dict[str, Any]:
    words = " ".join(f"word{(number * 31 + n) % 977}" for n in range(20 + number % 60))
    return {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": words}]}


def write_held_chats(folder: Path) -> list[bytes]:
    """Write the code that holds a row into `folder`; return the content of files of chats, each a unit."""
    (folder / "holding.py").write_text(OWN_CODE)
    lines = [json.dumps(chat(number)) + "\n" for number in range(NUM_FILES * ROWS_PER_FILE)]
    return ["".join(lines[n * ROWS_PER_FILE : (n + 1) * ROWS_PER_FILE]).encode() for n in range(NUM_FILES)]


@contextmanager
def held_command(*arguments: str, cwd: Path, until: Callable[[], bool]) -> Iterator[Job]:
    """`lmms-stream convert` with MAP, in a folder without PASS, once `until` is true."""
    with start_module("lmms_stream", ["convert", *arguments, *MAP], [{}], cwd=cwd) as job:
        deadline = time.monotonic() + LIMIT_S
        while not until():
            assert job.poll() is None, job.stderr.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield job


def kill(job: Job) -> None:
    """SIGKILL to a command; its workers end with it."""
    family = job.family()
    job.send_signal(signal.SIGKILL)
    assert job.wait(LIMIT_S) == -signal.SIGKILL
    assert not running_after(family, LIMIT_S)


def has_files(target: str, count: int) -> Callable[[], bool]:
    """Function that tells whether a target has so many files."""
    storage = open_storage(target)
    return lambda: len(list(storage.list_objects(""))) >= count
