"""Text: a subclass that makes tokens of each sample. Argument: a folder with data/ and a cache."""

import sys
from pathlib import Path
from typing import Any

import torch
from streaming import StreamingDataset
from torch.utils.data import DataLoader


class TextDataset(StreamingDataset):
    def __init__(self, max_tokens: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_tokens = max_tokens

    def __getitem__(self, index: Any) -> torch.Tensor:
        tokens = list(super().__getitem__(index)["text"].encode())[: self.max_tokens]
        return torch.tensor(tokens + [0] * (self.max_tokens - len(tokens)))


if __name__ == "__main__":
    root = Path(sys.argv[1])
    dataset = TextDataset(
        16, remote=str(root / "text"), local=str(root / "cache"), shuffle=True, shuffle_seed=3, batch_size=4
    )
    loader: DataLoader[torch.Tensor] = DataLoader(dataset, batch_size=4, num_workers=2, drop_last=True)
    print(len(dataset), dataset.size, dataset[-1].tolist())
    for epoch in range(2):
        for batch in loader:
            print(epoch, batch.tolist())
