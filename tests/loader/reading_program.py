"""A program that has imported what one that trains does, and reads. Arguments: a dataset of tokens, a start method."""

from __future__ import annotations

import sys

from lmms_stream import PackedDataset, PackedLoader, PackingConfig
from lmms_stream.mds.streams import StreamConfig

from tests.loader.reporting import Reporting


def main() -> None:
    import streaming
    import transformers.models.llama.modeling_llama

    assert {streaming.__name__, transformers.models.llama.modeling_llama.__name__} <= sys.modules.keys()
    folder, method = sys.argv[1:]
    dataset = PackedDataset(
        [StreamConfig(remote=folder)], processor=Reporting(), packing=PackingConfig(packing_length=64)
    )
    loader = PackedLoader(dataset, global_batch=2, num_workers=2, start_method=method, timeout_s=90)  # type: ignore[arg-type]
    sys.stdout.write(f"{len(list(loader))}\n")


if __name__ == "__main__":
    main()
