"""Images: transforms in __getitem__, labels, a limit on the cache. Argument: a folder with images/ and a cache."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from streaming import StreamingDataset
from torch.utils.data import DataLoader
from torchvision import transforms


class ImageDataset(StreamingDataset):
    def __init__(
        self, remote: str, local: str, shuffle: bool, batch_size: int, transform: Callable[[Any], Any]
    ) -> None:
        super().__init__(local=local, remote=remote, shuffle=shuffle, batch_size=batch_size, cache_limit="1mb")
        self.transform = transform

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, int]:
        sample = super().__getitem__(idx)
        image: Image.Image = sample["image"]
        return self.transform(image), sample["label"]


if __name__ == "__main__":
    root = Path(sys.argv[1])
    transform = transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()])
    dataset = ImageDataset(str(root / "images"), str(root / "cache"), True, 4, transform)
    for epoch in range(2):
        for pixels, labels in DataLoader(dataset, batch_size=4, num_workers=2):
            print(epoch, tuple(pixels.shape), round(float(pixels.sum()), 3), labels.tolist())
