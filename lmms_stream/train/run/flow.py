"""Logs, evaluations and saves due after a step or an epoch, and the best evaluation. Values in, values out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import ConfigError
from .settings import TrainConfig


class Control(Protocol):
    """Next actions of a run, by the names of transformers' TrainerControl."""

    should_training_stop: bool
    should_epoch_stop: bool
    should_save: bool
    should_evaluate: bool
    should_log: bool


@dataclass(slots=True)
class Flags:
    """The control of a run without callbacks."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


class Flow:
    """Adds due actions to a control, by the settings of a run. evaluates: the run has an eval_dataset."""

    def __init__(self, config: TrainConfig, *, evaluates: bool):
        self._config = config
        self._evaluates = evaluates and config.eval_steps != "no"

    def begin_step(self, control: Control) -> None:
        control.should_log = control.should_evaluate = control.should_save = False

    def end_step(self, control: Control, *, step: int, is_finished: bool, is_time_to_save: bool = False) -> None:
        """step: the number of finished steps. is_finished: the run ends with this step.

        is_time_to_save: a checkpoint is due by time.
        """
        config = self._config
        if isinstance(config.logging_steps, int):
            control.should_log |= is_finished or is_due(step, config.logging_steps)
        control.should_log |= config.log_sample_ids or (config.logging_first_step and step == 1)
        if self._evaluates and isinstance(config.eval_steps, int):
            is_time = is_due(step, config.eval_steps) and step >= config.eval_delay
            control.should_evaluate |= is_finished or is_time
        if isinstance(config.save_steps, int):
            control.should_save |= is_finished or is_due(step, config.save_steps)
        control.should_save |= is_time_to_save
        if is_finished:
            control.should_training_stop = True

    def end_epoch(self, control: Control, *, epoch: float) -> None:
        """epoch: finished epochs, with the fraction of the last. Called at the end of the run, too."""
        config = self._config
        control.should_log |= config.logging_steps == "epoch"
        control.should_evaluate |= self.evaluates_epoch(control, epoch=epoch)
        control.should_save |= config.save_steps == "epoch"

    def evaluates_epoch(self, control: Control, *, epoch: float) -> bool:
        """Whether an evaluation is due at the end of an epoch."""
        config = self._config
        is_time = epoch >= config.eval_delay or control.should_training_stop
        return self._evaluates and config.eval_steps == "epoch" and is_time


@dataclass(slots=True)
class Best:
    """Best evaluation of a run so far. name: the compared figure; None: no comparison."""

    name: str | None
    is_greater: bool = False
    metric: float | None = None
    step: int | None = None
    checkpoint: str | None = None  # of this step, if saved

    @staticmethod
    def of(config: TrainConfig) -> Best:
        name = config.best.metric or ("loss" if config.tracks_best else None)
        if name is None:
            return Best(None)
        mode = config.best.mode or ("min" if name.endswith("loss") else "max")
        return Best(name if name.startswith("eval_") else f"eval_{name}", is_greater=mode == "max")

    def take(self, metrics: Mapping[str, Any], *, step: int) -> bool:
        """Keep the figures of an evaluation if they are the best so far; return whether they are."""
        if self.name is None:
            return False
        if self.name not in metrics:
            raise ConfigError(
                f"train.best.metric {self.name} is not a metric of the evaluation: choose one of {', '.join(metrics)}"
            )
        metric = float(metrics[self.name])
        if self.metric is not None and not (metric > self.metric if self.is_greater else metric < self.metric):
            return False
        if metric != metric:  # NaN is never the best
            return False
        self.metric, self.step, self.checkpoint = metric, step, None
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "step": self.step, "checkpoint": self.checkpoint}

    def load(self, state: Mapping[str, Any]) -> None:
        self.metric, self.step, self.checkpoint = state["metric"], state["step"], state["checkpoint"]


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


# Checkpoints due by time.


class SaveClock:
    """Whether `minutes` have passed since the last checkpoint or since creation; None: never due.

    Clocks of ranks differ: only rank 0's clock counts. Rank 0 sends its vote with the counts of a step.
    """

    def __init__(self, minutes: float | None, *, rank: int):
        self._seconds = None if minutes is None or rank != 0 else minutes * 60
        self.restart()

    @property
    def is_due(self) -> bool:
        """Always False on ranks other than 0."""
        return self._seconds is not None and time.monotonic() - self._since >= self._seconds

    def restart(self) -> None:
        """Restart the clock when a save begins."""
        self._since = time.monotonic()
