"""Packs that a processor makes straight from the shards, with padding in the place of samples that are left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..processors.base import IGNORED_LABEL, SegmentError
from ..types import Columns, Rows, Segments
from .collate import PAD_TOKEN_ID
from .row_memory import new_rows

FillPacks = Callable[[Columns, NDArray[np.int64], Segments, Rows], NDArray[np.int64]]


def fill_with_padding(
    fill: FillPacks,
    columns: Columns,
    addresses: NDArray[np.int64],
    segments: Segments,
    rows: Rows,
    *,
    left_out: Sequence[int],
) -> NDArray[np.int64]:
    """Write segments into rows as `fill` does, those of samples left_out as padding: see PackFiller.

    Returns the loss tokens of each, int64[num_segments]. A SegmentError names the segment among all.
    """
    if not left_out:
        return fill(columns, addresses, segments, rows)
    is_kept = ~np.isin(segments.sample_ids, left_out)
    has_tokens = np.repeat(is_kept, segments.lengths)
    kept = Segments(*[values[is_kept] for values in segments])
    made = new_rows(int(has_tokens.sum()))
    learnt = np.zeros(len(is_kept), np.int64)
    if len(kept.lengths):
        try:
            learnt[is_kept] = fill(columns, addresses[is_kept], kept, made)
        except SegmentError as error:
            error.segment = int(np.flatnonzero(is_kept)[error.segment])
            raise
    rows.input_ids[:] = PAD_TOKEN_ID
    rows.labels[:] = IGNORED_LABEL
    starts = np.cumsum(segments.lengths) - segments.lengths
    rows.position_ids[:] = np.arange(len(has_tokens)) - np.repeat(starts, segments.lengths)
    for target, source in zip(rows, made, strict=True):
        target[:, has_tokens] = source
    return learnt
