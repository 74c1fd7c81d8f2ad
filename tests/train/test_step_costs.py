"""A step reads the device once, whatever it accumulates, and sums and records are those of the values read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lmms_stream.signals import StopSignal
from lmms_stream.train.loop import Loop
from lmms_stream.train.model.loss import learnt_tokens
from lmms_stream.train.model.sharding import fits
from lmms_stream.train.run.counts import StepReading

from ..conftest import write_tokens
from .runs import trainer_of, write_run
from .step_costs import reads


@pytest.mark.parametrize(
    ("settings", "is_logged", "num_reads"),
    [
        ({"optim": "muon", "ema_decay": 0.9}, True, [1, 1, 1]),
        ({"per_device_batch": 2}, True, [0, 1, 1]),  # of the step before, also for a record of each step
        ({"per_device_batch": 2}, False, [0, 1, 1]),
    ],
    ids=["each", "logged", "late"],
)
def test_a_step_reads_the_device_once(
    settings: dict[str, Any], is_logged: bool, num_reads: list[int], tmp_path: Path
) -> None:
    """Of four packs, with the record of the step or without."""
    write_tokens(tmp_path / "data", num_samples=200)
    run = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=3, global_batch=4, **settings)
    trainer = trainer_of(run, "model.attention=sdpa")
    trainer.build()
    with StopSignal() as stop, trainer.run_log.running(trainer.schedule, step=0, position=0):
        trainer.model.train()
        trainer.meter.start()
        loop, found = Loop(trainer, stop), []
        for batches, _ in zip(trainer.data.steps_of(iter(trainer.loader)), range(3), strict=False):
            with reads() as counts:
                stopped = loop.train_step(batches)
                if is_logged:
                    loop.log()
            assert not stopped
            found.append(dict(counts))
    assert found == [{"counts.py:values": each} if each else {} for each in num_reads]


def test_reads_that_wait_for_the_device_are_counted_by_their_lines() -> None:
    """So that the test above would find one."""
    values = torch.arange(3)
    with reads() as counts:
        learnt_tokens(values[None])  # without their number
        assert float(values.sum()) == 3
        assert values.tolist() == [0, 1, 2]
        assert values.any()
    assert counts == {"loss.py:learnt_tokens": 1, "torch": 3}


def test_the_norm_and_the_losses_are_read_as_they_are() -> None:
    losses = torch.tensor([[[0.1, 1e300], [3.0, 0.0]]], dtype=torch.float64)
    norm, found, _ = StepReading(torch.tensor(0.1), losses).values
    assert norm == float(torch.tensor(0.1))
    assert torch.equal(found, losses)
    assert math.isnan(StepReading(torch.tensor(math.nan), losses).values[0])


@pytest.mark.parametrize("labels", [[-100, 5, -100, 6], [-100] * 4, [-100, 1, 2, 3], [-100]])
def test_targets_whose_number_is_known_are_those_that_are_looked_for(labels: list[int]) -> None:
    given = torch.tensor([labels])
    found = learnt_tokens(given, num_learnt=sum(label != -100 for label in labels))
    for one, other in zip(found, learnt_tokens(given), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("num_gb", "free_gb", "is_so"), [(4, 68, True), (32, 38, False), (4, 15, False), (4, 16, True), (1, -2, False)]
)
def test_gradients_stay_on_their_ranks_where_they_take_a_quarter_of_the_free_memory_at_most(
    num_gb: int, free_gb: int, is_so: bool
) -> None:
    assert fits(num_gb * 10**9, free_gb * 10**9) is is_so
