"""Processors that are slow, and a loader of them. Programs of tests import this file, which imports no streaming."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor


class OneByOne:
    """TokensProcessor without what fills packs at once, so that samples are processed in workers."""

    def __init__(self) -> None:
        tokens = TokensProcessor()
        self.columns, self.schema, self.description = tokens.columns, tokens.schema, tokens.description
        self.measure = tokens.measure
        self.tokens = tokens

    def process(self, sample: Any) -> Any:
        return self.tokens.process(sample)


class Busy(OneByOne):
    """Takes longer than any test over the tenth sample that it is given, and all after it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_samples = 0

    def process(self, sample: Any) -> Any:
        self.num_samples += 1
        if self.num_samples >= 10:
            time.sleep(900)
        return super().process(sample)


def loader(folder: Path, processor: Any, **options: Any) -> PackedLoader:
    packing = PackingConfig(packing_length=64)
    dataset = PackedDataset([StreamConfig(remote=str(folder))], processor=processor, packing=packing)
    return PackedLoader(dataset, global_batch=1, num_workers=1, **options)
