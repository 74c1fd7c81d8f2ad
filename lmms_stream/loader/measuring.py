"""The tokens of samples of a lane, measured as they pass. sample ids -> [measure] -> tokens and patches."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..mds.core import PackedDataset
from ..processors.base import Processor
from ..processors.measured import checked, groups, measured_with_media, measures_media, sample_bytes
from ..types import Sample
from .batch_maker import naming, processor_of


def measure(dataset: PackedDataset, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """What the dataset's processor measures of samples: tokens, int64[n], or tokens and patches, int64[n, 2]."""
    processor = processor_of(dataset)
    if measures_media(processor):
        return _measure_media(dataset, processor, sample_ids)
    lengths = np.empty(len(sample_ids), np.int64)
    for at, sample in enumerate(dataset.pack_reader.samples(sample_ids)):
        try:
            lengths[at] = processor.measure(sample)
        except DataError as error:
            raise naming(dataset, int(sample_ids[at]), error) from error
    return lengths


def _measure_media(dataset: PackedDataset, processor: Processor, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens and patches; the bytes of media are read of those samples alone that lack facts."""
    measured = np.empty((len(sample_ids), 2), np.int64)
    first = 0
    for group in groups(dataset.measure_reader.samples(sample_ids), num_bytes=sample_bytes):
        whole = partial(_whole_sample, dataset, sample_ids[first:])
        for at, found in enumerate(measured_with_media(processor, group, whole=whole), start=first):
            try:
                if isinstance(found, DataError):
                    raise found
                measured[at] = checked(found, what="it")[:2]
            except DataError as error:
                raise naming(dataset, int(sample_ids[at]), error) from error
        first += len(group)
    return measured


def _whole_sample(dataset: PackedDataset, sample_ids: NDArray[np.int64], index: int) -> Sample:
    """All columns that the processor needs of the sample of an index."""
    return dataset.pack_reader[int(sample_ids[index])]
