"""Where a run of some epochs ends: where its cursor says, whatever was changed or passed over on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.errors import TrainingError
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.flow import Flags, Flow
from lmms_stream.train.run.settings import TrainConfig
from lmms_stream.types import Batch
from transformers import TrainerCallback

from ..conftest import write_tokens
from ..rounds import in_long_rounds
from .runs import trainer_of, write_run

NUM_SAMPLES = 160


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two epochs with steps of eight packs."""
    write_tokens(tmp_path / "data", num_samples=NUM_SAMPLES)
    return write_run(tmp_path / "run.yaml", tmp_path / "data", num_train_epochs=2, lr_scheduler_type="linear")


def times_read(output: Path) -> set[int]:
    """How often each sample was read: one number, where all were read equally often."""
    read = Counter(sample for record in read_log(output) for sample in record["sample_ids"])
    assert len(read) == NUM_SAMPLES
    return set(read.values())


@pytest.mark.parametrize("eval_steps", ["epoch", pytest.param(1, marks=in_long_rounds)])
def test_evaluations_begin_with_the_epoch_or_step_of_eval_delay(eval_steps: Any) -> None:
    config = TrainConfig(output_dir="out", global_batch=1, max_steps=9, eval_steps=eval_steps, eval_delay=2)
    found = []
    for number in (1, 2, 3):
        flow, control = Flow(config, evaluates=True), Flags()
        flow.end_step(control, step=number, is_finished=False)
        if eval_steps == "epoch":
            flow.end_epoch(control, epoch=number)
        found.append(control.should_evaluate)
    assert found == [False, True, True]


@pytest.mark.parametrize("global_batch", [3, pytest.param(16, marks=in_long_rounds)])
def test_epochs_end_where_the_cursor_says_after_a_change_of_the_global_batch(
    run: Path, tmp_path: Path, global_batch: int
) -> None:
    trainer_of(run, "train.num_train_epochs=null", "train.max_steps=4").train()
    trainer = trainer_of(run, f"train.global_batch={global_batch}")
    trainer.train()
    assert times_read(tmp_path / "default") == {2}
    assert {at.epoch for at in trainer.loader.cursor.sources.values()} == {2}
    assert trainer.schedule.length == trainer.step == read_log(tmp_path / "default")[-1]["step"]
    assert trainer.schedule.learning_rate == 0


def test_steps_that_are_passed_over_belong_to_their_epoch(run: Path, tmp_path: Path) -> None:
    """The last of them ends the run, with its checkpoint."""
    whole = trainer_of(run, f"train.output_dir={tmp_path / 'whole'}")
    whole.train()
    last = whole.step
    skipped = f"train.skip_steps=[[2, 4], [3, 5], [{last - 1}, {last + 9}]]"
    trainer = trainer_of(run, skipped, f"train.output_dir={tmp_path / 'skipped'}")
    trainer.train()
    assert trainer.step == last - 4 == trainer.schedule.length
    assert trainer.schedule.learning_rate == 0
    assert [path.name for path in (tmp_path / "skipped" / "checkpoints").glob("step-*")] == [f"step-{last - 4:08d}"]


@pytest.mark.parametrize("is_last", [False, True])
def test_a_checkpoint_of_a_step_after_which_a_callback_leaves_the_epoch_is_of_the_next_epoch(
    is_last: bool, run: Path, tmp_path: Path
) -> None:
    """At the last step of an epoch nothing is left to skip."""

    class Leave(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop = state.global_step == left_at

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if is_killed and state.global_step == left_at:
                raise KeyboardInterrupt

    is_killed = True
    of_epoch = trainer_of(run).loader.steps_left
    left_at = of_epoch if is_last else 2
    with pytest.raises(KeyboardInterrupt):
        trainer_of(run, f"train.save_steps={left_at}", callbacks=[Leave]).train()
    is_killed = False
    resumed = trainer_of(run, callbacks=[Leave])
    resumed.train()
    assert resumed.step == left_at + of_epoch


def test_a_loader_that_gives_nothing_twice_is_an_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: PackedLoader) -> Iterator[Batch]:
        yield from ()

    trainer = trainer_of(run)
    monkeypatch.setattr(PackedLoader, "__iter__", nothing)
    with pytest.raises(TrainingError, match=r"the loader gave no batch twice at step 0, and has \d+ packs left: "):
        trainer.train()
