"""LMMS Engine's datasets by their names. The dataset_type of a config says which rows are read, whatever the class.

naive, iterable     the classes by number, and those that stream
processor           what makes samples of messages
collator            what makes batches of samples
"""

from __future__ import annotations

from ....mds.dataset_config import DatasetConfig
from .iterable import FinewebEduDataset, MultiModalIterableDataset, VisionSFTIterableDataset
from .naive import MultiModalDataset, VisionAudioSFTDataset, VisionSFTDataset

__all__ = [
    "DatasetConfig",
    "FinewebEduDataset",
    "MultiModalDataset",
    "MultiModalIterableDataset",
    "VisionAudioSFTDataset",
    "VisionSFTDataset",
    "VisionSFTIterableDataset",
]
