"""LMMS Engine's datasets: its DatasetConfig -> packs for a DataLoader and for our trainer.

The dataset_type of a config specifies the kind of rows, for every class; classes and modules have LMMS Engine's names.

naive           MultiModalDataset: packs by number; memory of a run
iterable        MultiModalIterableDataset: packs of unconverted sources
processor       processors by their names: messages and images -> tensors
collator        collators by their names: samples -> a batch
names           names of types, formats and processors -> ours
moot            settings that are refused or have no effect
building        sources -> shards, once
length_grouped  unpacked samples of similar lengths -> batches of each rank
source_files    sources -> files to read in place, and the lane of each unit
streaming_packs pieces of samples -> packs, in one pass
source_state    rows that lanes have read
rows_of_sources rows of units -> samples, tokenized in groups -> pieces of samples
source_reader   packs of some lanes; lanes of each reader
epoch_turns     the epoch of each iteration, with any number of workers
source_loader   packs -> batches with the positions of their lanes, step by step
table           docs/datasets.md, from the names

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....lazy import lazy_names

if TYPE_CHECKING:
    from .iterable import FinewebEduDataset as FinewebEduDataset
    from .iterable import MultiModalIterableDataset as MultiModalIterableDataset
    from .iterable import VisionSFTIterableDataset as VisionSFTIterableDataset
    from .length_grouped import DistributedLengthGroupedSampler as DistributedLengthGroupedSampler
    from .naive import MultiModalDataset as MultiModalDataset
    from .naive import VisionAudioSFTDataset as VisionAudioSFTDataset
    from .naive import VisionSFTDataset as VisionSFTDataset
    from .names import DatasetConfig as DatasetConfig

_HOME = {
    "DatasetConfig": "names",
    "DistributedLengthGroupedSampler": "length_grouped",
    "FinewebEduDataset": "iterable",
    "MultiModalDataset": "naive",
    "MultiModalIterableDataset": "iterable",
    "VisionAudioSFTDataset": "naive",
    "VisionSFTDataset": "naive",
    "VisionSFTIterableDataset": "iterable",
}

__all__ = [*_HOME]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
