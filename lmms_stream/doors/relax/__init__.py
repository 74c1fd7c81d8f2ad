"""Prompts for reinforcement learning, behind Relax's names: rows of files or shards -> samples -> groups for rollouts.

sample          a sample: generated and rewarded; samples as JSON and arrays, written atomically
row_files       rows by number: lines of JSON, samples of shards; row_groups: rows of Parquet
rows            typed text -> files, folders and slices -> all rows as one sequence
prompts         a row -> messages -> a sample: the text of its prompt, its media, its length; MultimodalConfig
cursor          IndexManager: an epoch, its shuffled order, and the position in it
base            BaseDataset: base class of both datasets, the order and the batches
dataset         Dataset: all samples in memory
streaming       StreamingDataset: samples made on demand, chunks prepared in the background; SampleBuffer
arguments       the flags, with their defaults
opening         arguments -> datasets, functions
in_flight       groups that were handed out and have not come back
data_source     RolloutDataSource and RolloutDataSourceWithBuffer: samples -> numbered groups; Relax's own states
rollouts        RolloutManager: groups -> rollouts of finished groups

Relax's own module paths, which re-export these names:

utils/data              the datasets, their readers, making a sample of a row
utils/types             Sample
utils/misc              load_function
utils/multimodal        limits on media
engine/rollout          the data sources, results of rollout functions
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .arguments import add_data_arguments as add_data_arguments
    from .base import BaseDataset as BaseDataset
    from .cursor import IndexManager as IndexManager
    from .data_source import RolloutDataSource as RolloutDataSource
    from .data_source import RolloutDataSourceWithBuffer as RolloutDataSourceWithBuffer
    from .data_source import pop_first as pop_first
    from .dataset import Dataset as Dataset
    from .prompts import MultimodalConfig as MultimodalConfig
    from .rollouts import RolloutManager as RolloutManager
    from .sample import Sample as Sample
    from .streaming import SampleBuffer as SampleBuffer
    from .streaming import StreamingDataset as StreamingDataset

_HOME = {
    "BaseDataset": "base",
    "Dataset": "dataset",
    "IndexManager": "cursor",
    "MultimodalConfig": "prompts",
    "RolloutDataSource": "data_source",
    "RolloutDataSourceWithBuffer": "data_source",
    "RolloutManager": "rollouts",
    "Sample": "sample",
    "SampleBuffer": "streaming",
    "StreamingDataset": "streaming",
    "add_data_arguments": "arguments",
    "pop_first": "data_source",
}

__all__ = [*_HOME]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
