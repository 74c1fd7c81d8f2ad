"""Prompts for reinforcement learning, behind Relax's names: rows of files or shards -> samples -> groups for rollouts.

sample          what is generated and rewarded
paths           what is typed -> files, folders and slices of them
spans           bytes of a file between offsets, here or in a store
row_files       rows by number: lines of JSON, samples of shards; row_groups: of Parquet
rows            the rows of all that is named, as one sequence
messages        a row's prompt, media and tools -> messages
prompts         a row -> a sample: the text of its prompt, its media, its length
permutation     the shuffled order of an epoch, at any position of it
base            BaseDataset: what both datasets share, the order and the batches
dataset         Dataset: all samples in memory
ahead           chunks of samples that are made in the background
streaming       StreamingDataset: samples that are made when they are asked for
saved           samples and counts as JSON and arrays, written atomically
data_source     RolloutDataSource and RolloutDataSourceWithBuffer: samples -> numbered groups
arguments       the flags of all this, with their defaults
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .arguments import add_data_arguments as add_data_arguments
    from .base import BaseDataset as BaseDataset
    from .data_source import RolloutDataSource as RolloutDataSource
    from .data_source import RolloutDataSourceWithBuffer as RolloutDataSourceWithBuffer
    from .data_source import pop_first as pop_first
    from .dataset import Dataset as Dataset
    from .sample import Sample as Sample
    from .streaming import StreamingDataset as StreamingDataset

_HOME = {
    "BaseDataset": "base",
    "Dataset": "dataset",
    "RolloutDataSource": "data_source",
    "RolloutDataSourceWithBuffer": "data_source",
    "Sample": "sample",
    "StreamingDataset": "streaming",
    "add_data_arguments": "arguments",
    "pop_first": "data_source",
}

__all__ = [*_HOME]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
