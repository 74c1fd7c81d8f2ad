"""Trainers of this process leave their process group; it ends with each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lmms_stream.train.run.distributed import end_distributed


@pytest.fixture(autouse=True)
def _group_ends() -> Iterator[None]:
    yield
    end_distributed()
