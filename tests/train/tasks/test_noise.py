"""What a task draws at random for a sample follows from the seed, the step and the sample alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.tasks.causal import CausalLanguageModelling
from lmms_stream.train.tasks.registry import TASKS, build_task, objective_of
from lmms_stream.train.tasks.task import Draw, LossSum
from lmms_stream.types import Batch

from ...conftest import write_tokens
from ..runs import trainer_of, write_run


def pack_of(*sample_ids: int, source: str = "data") -> Batch:
    samples = [{"input_ids": np.zeros(1, np.int64), "labels": np.zeros(1, np.int64)} for _ in sample_ids]
    return collate(samples, sample_ids, source=source)


def test_noise_does_not_depend_on_what_lies_beside_a_sample() -> None:
    draw = Draw(seed=3, step=5)
    together = draw.normal([pack_of(4, 9, 2)], (2, 3))
    assert together.shape == (3, 2, 3)
    assert together.dtype == torch.float32
    assert torch.equal(draw.normal([pack_of(2), pack_of(), pack_of(4)], (2, 3)), together[[2, 0]])
    assert draw.normal([pack_of()], (2, 3)).shape == (0, 2, 3)


def test_noise_is_another_for_each_seed_step_sample_repeat_source_and_name() -> None:
    draw, pack = Draw(seed=3, step=5), pack_of(4)
    all_of_them = [
        draw.normal([pack], (4,)), Draw(seed=4, step=5).normal([pack], (4,)), Draw(seed=3, step=6).normal([pack], (4,)),
        Draw(seed=3, step=None).normal([pack], (4,)), draw.normal([pack_of(5)], (4,)),
        draw.normal([pack_of(4, source="other")], (4,)), draw.normal([pack], (4,), name="other"),
        *(draw.normal([replace(pack, repeats=[number])], (4,)) for number in (1, 2)),
    ]  # fmt: skip
    assert len({tuple(each[0].tolist()) for each in all_of_them}) == len(all_of_them)


def test_draws_have_the_distributions_that_they_are_named_by() -> None:
    draw, pack = Draw(seed=0, step=0), pack_of(*range(4000))
    noise, times = draw.normal([pack], (4,)), draw.uniform([pack])
    assert abs(float(noise.mean())) < 0.03
    assert abs(float(noise.std()) - 1) < 0.03
    assert float(times.min()) >= 0
    assert float(times.max()) < 1
    assert abs(float(times.mean()) - 0.5) < 0.02
    assert abs(float(draw.chosen([pack], 0.1, name="label").float().mean()) - 0.1) < 0.02


class Drawing(CausalLanguageModelling):
    """Writes down what it is given to draw by."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int | None] = []

    def losses(
        self, model: PackedModel, batch: Batch, packs: Sequence[Batch], draw: Draw | None = None
    ) -> Mapping[str, LossSum]:
        assert draw is not None
        assert draw.seed == 7
        self.steps.append(draw.step)
        return super().losses(model, batch, packs)


def test_a_task_that_draws_is_told_the_step_and_one_that_does_not_is_not(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=80)
    run = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=2, seed=7, eval_dataset={}, global_batch=2)
    task = Drawing()
    trainer_of(run, task=task).train()
    trained = [step for step in task.steps if step is not None]
    assert trained == [0, 0, 1, 1]
    assert task.steps[-1] is None  # of the evaluation
    again = Drawing()
    trainer_of(run, "train.max_steps=3", task=again).train()
    # A run that resumes goes on counting, and evaluates after its last step alone.
    assert (again.steps[:2], {*again.steps[2:]}) == ([2, 2], {None})


class Asks:
    objective = "causal"


def test_a_processor_names_the_task_that_its_samples_are_for() -> None:
    assert objective_of([object(), None, Asks()]) == "causal"
    assert isinstance(build_task("causal", {"z_loss": 0.5}), CausalLanguageModelling)
    other = Asks()
    other.objective = "flow_matching"
    assert objective_of([other, other]) == "flow_matching"
    with pytest.raises(ConfigError, match="for several tasks, causal and flow_matching: train on the datasets of"):
        objective_of([object(), other])


def test_a_task_that_is_not_there_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"there is no task 'casual': did you mean 'causal'\?"):
        build_task("casual")
    with pytest.raises(ConfigError, match=r"task causal has no option 'z': did you mean 'z_loss'\?"):
        build_task("causal", {"z": 1})


class Sums:
    def __init__(self, n: int = 1) -> None:
        self.collate, self.units = None, 1 / n


def test_a_task_that_cannot_be_made_or_is_no_task_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TASKS, "ours", {**TASKS.ours, "sums": Sums})
    with pytest.raises(ConfigError, match="z_loss must be a number, got 'big'"):
        build_task("causal", {"z_loss": "big"})
    with pytest.raises(ConfigError, match=r"task sums cannot be made with n=0 \(ZeroDivisionError: division by zero\)"):
        build_task("sums", {"n": 0})
    with pytest.raises(ConfigError, match="task Sums lacks objectives, losses, check: make it a subclass of CausalLan"):
        build_task("sums")
