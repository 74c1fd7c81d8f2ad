"""Mixing: two streams by proportion, an epoch size in words. Argument: a folder with text/, more/ and caches."""

import sys
from pathlib import Path

from streaming import Stream, StreamingDataset
from torch.utils.data import DataLoader

if __name__ == "__main__":
    root = Path(sys.argv[1])
    streams = [
        Stream(remote=str(root / "text"), local=str(root / "cache" / "text"), proportion=0.25),
        Stream(remote=str(root / "more"), local=str(root / "cache" / "more"), proportion=0.75),
    ]
    dataset = StreamingDataset(
        streams=streams, epoch_size="0.06k", shuffle=True, shuffle_algo="py1br", num_canonical_nodes=2, batch_size=6,
        batching_method="stratified",
    )  # fmt: skip
    print([stream.choose for stream in dataset.streams], dataset.num_shards, len(dataset))
    for epoch in range(2):
        for batch in DataLoader(dataset, batch_size=6):
            print(epoch, batch["text"])
