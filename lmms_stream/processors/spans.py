"""Tokens that are trained on: as spans [first, stop), as a mask, and as labels. Many samples tokenized at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..types import Processed, Sample
from .base import IGNORED_LABEL, Processor, TokenizeAll, works_together


def spans_of(learnt: NDArray[np.bool_]) -> NDArray[np.int32]:
    """The runs of tokens that are learnt: int32[k, 2].

    >>> spans_of(np.array([True, True, False, True])).tolist()
    [[0, 2], [3, 4]]
    """
    padded = np.concatenate([[False], learnt, [False]])
    return np.flatnonzero(padded[1:] != padded[:-1]).reshape(-1, 2).astype(np.int32)


def learnt_of(spans: Iterable[Sequence[int]], num_tokens: int) -> NDArray[np.bool_]:
    """bool[num_tokens], true within the spans."""
    learnt = np.zeros(num_tokens, np.bool_)
    for start, stop in spans:
        learnt[start:stop] = True
    return learnt


def labels_of(input_ids: NDArray[np.int64], spans: Iterable[Sequence[int]]) -> NDArray[np.int64]:
    """int64[T]: the ids within the spans, IGNORED_LABEL elsewhere."""
    labels = np.full_like(input_ids, IGNORED_LABEL)
    for start, stop in spans:
        labels[start:stop] = input_ids[start:stop]
    return labels


def tokenizes_all(processor: Processor) -> bool:
    """Tell whether a processor tokenizes many samples at once; see TokenizeAll."""
    return works_together(type(processor), "process", "tokenize_all")


def process_all(processor: Processor, samples: Sequence[Sample]) -> list[Processed | DataError] | None:
    """Return what `process` gives for each sample, or the DataError that it raises; see tokenizes_all.

    None where another error is raised: `process` of one sample after another raises it for its sample.
    """
    tokenize_all: TokenizeAll = processor.tokenize_all  # type: ignore[attr-defined]
    try:
        found = tokenize_all(samples)
    except Exception:  # noqa: BLE001 - one by one, the sample that causes it raises it again
        return None
    return [each if isinstance(each, DataError) else _processed(*each) for each in found]


def _processed(ids: NDArray[np.int32], spans: Iterable[Sequence[int]]) -> Processed:
    input_ids = ids.astype(np.int64)
    return {"input_ids": input_ids, "labels": labels_of(input_ids, spans)}
