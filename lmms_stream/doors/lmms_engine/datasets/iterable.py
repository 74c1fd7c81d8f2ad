"""LMMS Engine's datasets that stream by their names."""

from __future__ import annotations

from ....datasets.iterable import MultiModalIterableDataset

BaseIterableDataset = MultiModalIterableDataset
VisionSFTIterableDataset = FinewebEduDataset = BagelIterableDataset = MultiModalIterableDataset
Qwen3VLIterableDataset = QwenOmniIterableDataset = MultiModalIterableDataset

__all__ = [
    "BagelIterableDataset",
    "BaseIterableDataset",
    "FinewebEduDataset",
    "MultiModalIterableDataset",
    "Qwen3VLIterableDataset",
    "QwenOmniIterableDataset",
    "VisionSFTIterableDataset",
]
