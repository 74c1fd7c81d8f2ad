"""Counts of rows that are left out: added up, read from a dataset.json, and told in words."""

from __future__ import annotations

import numpy as np
from lmms_stream.converters.stored.row_counts import REASONS, RowCounts


def test_counts_of_units_add_up_and_come_back_from_a_description() -> None:
    rows = {why: np.arange(number) for number, why in enumerate(REASONS)}
    unit = RowCounts.of_unit(rows, num_rejected=7, num_duplicates=9, num_dropped=4)
    assert list(unit.as_dict().values()) == [7, 0, 1, 2, 3, 9, 4]
    both = RowCounts.total([unit, unit])
    assert list(both.as_dict().values()) == [14, 0, 2, 4, 6, 18, 8]
    assert RowCounts.of_dataset({"num_samples": 5, **both.as_dict()}) == both


def test_a_description_of_an_earlier_release_counts_what_it_knew() -> None:
    assert RowCounts.of_dataset({"num_rejected": 3, "num_filtered": 1}) == RowCounts(num_rejected=3, num_filtered=1)


def test_only_reasons_that_left_rows_out_are_told() -> None:
    counts = RowCounts(num_rejected=2, num_duplicates=1)
    assert counts.left_out == {
        "with values that do not fit, listed in _lmms/rejects.jsonl": 2,
        "whose samples came before": 1,
    }
