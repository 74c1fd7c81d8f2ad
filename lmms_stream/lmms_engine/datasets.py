"""LMMS Engine's datasets by their names. The dataset_type of a config says which rows are read, whatever the class."""

from __future__ import annotations

from ..datasets import DatasetConfig, MultiModalDataset, MultiModalIterableDataset

VisionSFTDataset = VisionAudioSFTDataset = MultiModalDataset
VisionSFTIterableDataset = FinewebEduDataset = MultiModalIterableDataset

__all__ = [
    "DatasetConfig",
    "FinewebEduDataset",
    "MultiModalDataset",
    "MultiModalIterableDataset",
    "VisionAudioSFTDataset",
    "VisionSFTDataset",
    "VisionSFTIterableDataset",
]
