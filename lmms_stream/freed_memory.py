"""Freed memory -> the system."""

from __future__ import annotations

import ctypes


def give_back_memory() -> None:
    """Return freed memory to the system, of all threads.

    glibc keeps it: for each thread that ever took any, and wherever something that is still in use lies above it. Call
    this where large arrays come and go many times; it costs about a millisecond, and new pages when memory is taken
    again. Without glibc it does nothing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
