from __future__ import annotations

from collections.abc import Iterator

import pytest
from lmms_stream.plan import short_epochs


@pytest.fixture(scope="module")
def long_epochs() -> Iterator[None]:
    """Plans of few samples are treated as plans of many: test_short_epochs.py shows that both give the same packs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(short_epochs, "MAX_SAMPLES", 0)
        yield
