"""A callback's request at any event of a step is done after the step, like in transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.callbacks import Callbacks
from transformers import TrainerCallback

from ..conftest import write_tokens
from .runs import trainer_of, write_run

EVENTS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")
FLAGS = ("should_log", "should_evaluate", "should_save")


class Asks(TrainerCallback):
    """Asks at one event of each step, at another event in the next step."""

    def __init__(self) -> None:
        self.evaluated: list[int] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, eval_dataloader: Any, **_: Any) -> None:
        assert eval_dataloader is not None
        self.evaluated.append(state.global_step)


def asking(event: str) -> Any:
    def ask(self: Asks, args: Any, state: Any, control: Any, eval_dataloader: Any, **_: Any) -> None:
        finished = state.global_step - (event == "on_step_end")
        if finished == EVENTS.index(event):
            for name in FLAGS:
                setattr(control, name, True)

    return ask


for name in EVENTS:
    setattr(Asks, name, asking(name))


def test_requests_at_all_events_of_a_step_are_done_after_it(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=160)
    path = write_run(
        tmp_path / "run.yaml", tmp_path / "data", max_steps=7, logging_steps=100, save_steps=100, eval_steps=100,
        eval_dataset={},
    )  # fmt: skip
    asks = Asks()
    trainer = trainer_of(path, "train.global_batch=2", "train.log_sample_ids=false", callbacks=[asks])
    trainer.train()
    steps = [1, 2, 3, 4, 5, 7]
    assert asks.evaluated == steps
    assert trainer.saver.steps() == steps
    assert [each["step"] for each in read_log(tmp_path / "default") if "loss" in each] == steps


def test_a_callback_is_removed_by_itself_or_by_its_class() -> None:
    class Other(TrainerCallback):
        pass

    first, second = Asks(), Asks()
    callbacks = Callbacks([Other, first, second], arguments=dict, standing=dict, world_size=1)
    assert callbacks.pop(second) is second
    assert callbacks.pop(second) is None
    assert callbacks.pop(Asks) is first
    assert callbacks.pop(Asks) is None
    assert len(callbacks) == 1
