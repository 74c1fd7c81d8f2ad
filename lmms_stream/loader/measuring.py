"""The tokens of samples of a lane, measured as they pass. sample ids -> [measure] -> tokens and patches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..mds.core import PackedDataset
from ..plan.measured_block import UNMEASURED
from ..processors.base import Measured, Processor
from ..processors.measured import checked, groups, measured_with_media, measures_media, sample_bytes
from ..types import Sample
from .segment import name_sample, naming, processor_that_packs

PassOver = Callable[[int, Exception], bool]  # sample id and why it has no length -> whether that is no error


def measure(dataset: PackedDataset, sample_ids: NDArray[np.int64], *, pass_over: PassOver) -> NDArray[np.int64]:
    """What the dataset's processor measures of samples: tokens, int64[n], or tokens and patches, int64[n, 2].

    One that cannot be measured is UNMEASURED where pass_over says so, and its error is raised otherwise.
    """
    processor = processor_that_packs(dataset)
    has_media = measures_media(processor)
    measured = np.zeros((len(sample_ids), 2), np.int64)
    for at, found in enumerate(_found(dataset, processor, sample_ids, has_media=has_media)):
        error = _error_of(found)
        if error is None:
            measured[at] = found[:2]  # type: ignore[index]
        elif pass_over(int(sample_ids[at]), error):
            measured[at] = UNMEASURED, 0
        elif isinstance(error, DataError):
            raise naming(dataset, int(sample_ids[at]), error) from error
        else:
            name_sample(error, f"sample {sample_ids[at]} of {dataset.url}")
            raise error
    return measured if has_media else measured[:, 0]


def _error_of(found: Measured | Exception) -> Exception | None:
    """Why a sample has no length; None where it has one."""
    if isinstance(found, Exception):
        return found
    try:
        checked(found, what="it")
    except DataError as error:
        return error
    return None


def _found(
    dataset: PackedDataset, processor: Processor, sample_ids: NDArray[np.int64], *, has_media: bool
) -> Iterator[Measured | Exception]:
    """What each sample amounts to, or why that cannot be said."""
    if not has_media:
        for sample in dataset.pack_reader.samples(sample_ids):
            try:
                yield Measured(operator.index(processor.measure(sample)))
            except Exception as error:  # noqa: BLE001 - it is raised by who asks, or is of the sample alone
                yield error
        return
    first = 0
    for group in groups(dataset.measure_reader.samples(sample_ids), num_bytes=sample_bytes):
        yield from _found_of_group(dataset, processor, sample_ids[first : first + len(group)], group)
        first += len(group)


def _found_of_group(
    dataset: PackedDataset, processor: Processor, sample_ids: NDArray[np.int64], group: Sequence[Sample]
) -> Iterator[Measured | Exception]:
    """Those of samples that are measured at once; the bytes of media are read of those alone that lack facts."""
    first = 0
    while first < len(group):
        whole = partial(_whole_sample, dataset, sample_ids[first:])
        try:
            for found in measured_with_media(processor, group[first:], whole=whole):
                first += 1
                yield found
        except Exception as error:  # noqa: BLE001 - as above; it ends the measuring of what comes after it
            first += 1
            yield error


def _whole_sample(dataset: PackedDataset, sample_ids: NDArray[np.int64], index: int) -> Sample:
    """All columns that the processor needs of the sample of an index."""
    return dataset.pack_reader[int(sample_ids[index])]
