"""Packs of tokenized samples pass few Python functions, since a step makes all its packs in one call."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from lmms_stream import PackedLoader, PackedStreamingDataset, PackingConfig
from lmms_stream.processors.text import TokensProcessor

from ..conftest import write_tokens

MOST_CALLS = 13  # of Python functions a pack, those of libraries among them
GLOBAL_BATCH, STEPS = 64, 4


def test_a_pack_passes_few_functions(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=4000)
    dataset = PackedStreamingDataset(
        tmp_path / "data", processor=TokensProcessor(), packing=PackingConfig(packing_length=128)
    )
    batches = iter(PackedLoader(dataset, global_batch=GLOBAL_BATCH))
    for _ in range(GLOBAL_BATCH * STEPS):  # the first steps plan and open
        next(batches)
    calls = Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename} {frame.f_code.co_qualname}"] += 1

    sys.setprofile(count)
    try:
        for _ in range(GLOBAL_BATCH * STEPS):
            next(batches)
    finally:
        sys.setprofile(None)
    assert calls.total() <= MOST_CALLS * GLOBAL_BATCH * STEPS, calls.most_common(20)
