"""How the demo compares runs, on records made up here."""

from __future__ import annotations

from typing import Any

import pytest
from lmms_stream.errors import TrainingError
from lmms_stream.tools.demo.jobs import RunRecords, compare_runs


def test_a_comparison_finds_every_difference() -> None:
    def run(**changes: Any) -> RunRecords:
        records = {step: {"sample_ids": [step], "loss": 1.0} for step in (1, 2, 3)}
        for step, change in changes.items():
            records[int(step[1:])] |= change
        return RunRecords(name="run", records=records, tolerance=1e-3)

    assert compare_runs(run(), [run()], first_step=1, last_step=3)[1] == []
    assert compare_runs(run(), [run(_2={"loss": 1.0005})], first_step=1, last_step=3)[1] == []
    assert compare_runs(run(), [run(_2={"loss": 1.1})], first_step=1, last_step=3)[1] == [
        "step 2: the loss of run differs by 0.1"
    ]
    assert len(compare_runs(run(), [run(_2={"loss": float("nan")})], first_step=1, last_step=3)[1]) == 1
    assert compare_runs(run(), [run(_3={"sample_ids": [4]})], first_step=1, last_step=3)[1] == [
        "step 3: run read other samples"
    ]
    short = RunRecords(name="short", records={1: run().records[1]}, tolerance=0)
    assert len(compare_runs(run(), [short], first_step=1, last_step=3)[1]) == 2
    for first, last in ((2, 1), (3, 4)):
        with pytest.raises(TrainingError, match="the log of run lacks steps"):
            compare_runs(run(), [run()], first_step=first, last_step=last)
