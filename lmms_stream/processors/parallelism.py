"""Threads of tokenizers: as many as the machine has cores, unless the environment of a process says one."""

from __future__ import annotations

import os

VARIABLE = "TOKENIZERS_PARALLELISM"  # an environment variable of the tokenizers library
ONE_THREAD = {VARIABLE: "false"}


def tokenize_in_one_thread() -> None:
    """Set this process, and those that it starts, to one thread, unless the user's environment sets a number.

    Used where each core has a process of its own.
    """
    os.environ.setdefault(VARIABLE, ONE_THREAD[VARIABLE])


def is_parallel() -> bool:
    """Whether a tokenizer uses several threads for several texts."""
    return os.environ.get(VARIABLE) != ONE_THREAD[VARIABLE]
