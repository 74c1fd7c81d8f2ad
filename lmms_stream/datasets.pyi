"""Names of lmms_stream.datasets for type checkers; at run time it is another name of doors/lmms_engine/datasets."""

from .doors.lmms_engine.datasets.iterable import MultiModalIterableDataset as MultiModalIterableDataset
from .doors.lmms_engine.datasets.length_grouped import (
    DistributedLengthGroupedSampler as DistributedLengthGroupedSampler,
)
from .doors.lmms_engine.datasets.naive import MultiModalDataset as MultiModalDataset
from .doors.lmms_engine.datasets.names import DatasetConfig as DatasetConfig
