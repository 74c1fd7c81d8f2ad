"""A program without loader workers, whose processor never returns from sample 7. Its argument is a dataset's folder."""

from __future__ import annotations

import sys
import threading

from lmms_stream.loader.bad_samples import BadSamples
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.types import Processed, Sample


class Hanging(TokensProcessor):
    fill_packs = None  # type: ignore[assignment]

    def process(self, sample: Sample) -> Processed:
        if sample["input_ids"][0] == 7:
            threading.Event().wait()
        return super().process(sample)


def main() -> None:
    packing = PackingConfig(packing_length=64)
    dataset = PackedStreamingDataset(sys.argv[1], processor=Hanging(), packing=packing)
    for _ in PackedLoader(dataset, global_batch=1, bad=BadSamples(sample_timeout_s=0.5)):
        pass


if __name__ == "__main__":
    main()
