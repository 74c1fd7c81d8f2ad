"""Tokens that are trained on: as spans [first, stop), as a mask, and as labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

IGNORED_LABEL = -100  # transformers' and torch's ignore_index


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
