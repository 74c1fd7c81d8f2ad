"""How often tests try what they try again and again: a few times in `make test`, many times in `make test-long`."""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

T = TypeVar("T")

LONG = os.environ.get("LMMS_STREAM_ROUNDS") == "long"
in_long_rounds = pytest.mark.skipif(not LONG, reason="it takes long, and others try most of it: make test-long")


def rounds(few: T, many: T) -> T:
    """`few` in `make test`, `many` in `make test-long`."""
    return many if LONG else few
