"""LMMS Engine's front door: a DatasetConfig of theirs -> datasets whose packs a DataLoader and our trainer take.

names           their names of types, formats and processors -> ours; the sources and the processor of a config
moot            what of a config is refused or cannot matter for the class that it is given to
building        sources -> shards, once, whoever asks first
memory          what a run takes besides its model
multimodal      MultiModalDataset: packs by number
length_grouped  unpacked samples of like lengths -> batches of each rank
source_files    sources -> files that are read as they lie, and the lane of each of their units
streaming_packs pieces of samples that pass -> packs
source_state    which rows lanes have read
prepared_rows   rows of units -> samples, tokenized some at a time
rows_of_sources samples of rows -> pieces of samples
source_reader   the packs of some lanes
lanes_of_sources    which reader reads which lanes, and whether a saved state is of the same packs
epoch_turns     which epoch each iteration is, with any number of workers
streamed_batches    packs -> batches that say where their lanes stand
source_loader   batches for the trainer, step by step
iterable        MultiModalIterableDataset: packs of sources that are not converted
table           docs/datasets.md, from the names

Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from ..mds.dataset_config import DatasetConfig as DatasetConfig
    from .iterable import MultiModalIterableDataset as MultiModalIterableDataset
    from .length_grouped import DistributedLengthGroupedSampler as DistributedLengthGroupedSampler
    from .multimodal import MultiModalDataset as MultiModalDataset

_HOME = {
    "DatasetConfig": ".mds.dataset_config",
    "DistributedLengthGroupedSampler": "length_grouped",
    "MultiModalDataset": "multimodal",
    "MultiModalIterableDataset": "iterable",
}

__all__ = [*_HOME]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
