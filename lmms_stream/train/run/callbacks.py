"""Callbacks of transformers in a run: called at events on every rank; all ranks follow a decision on any rank."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, TrainingError
from .copies import fence
from .distributed import gather
from .flow import Control, Flags

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerState, TrainingArguments

_FLAGS = tuple(each.name for each in dataclasses.fields(Flags))
_IN_STEPS = (
    "on_log", "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end",
)  # fmt: skip


class Callbacks:
    """The callbacks of a run, with TrainerState and TrainerControl, like in transformers' Trainer.

    reads_records: whether a callback of any rank is called in steps, and may need the records of all steps before.
    arguments: makes the TrainingArguments for callbacks. standing: returns the current fields of TrainerState.
    transformers' callbacks are imported only with a callback, or when the state is read.
    """

    def __init__(
        self,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]],
        *,
        arguments: Callable[[], TrainingArguments],
        standing: Callable[[], Mapping[str, Any]],
        world_size: int,
    ):
        self.control: Control = Flags()
        self.given: dict[str, Any] = {}  # keyword arguments of every callback: the model, the optimizer, …
        self._all: list[TrainerCallback] = []
        self._make_arguments, self._standing, self._world_size = arguments, standing, world_size
        self._arguments: TrainingArguments | None = None
        self._state: TrainerState | None = None
        self._agrees = self.reads_records = False
        for each in callbacks:
            self.add(each)

    def add(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, or an instance of a class; raise ConfigError for anything but a transformers callback."""
        try:
            from transformers import TrainerCallback, TrainerControl
        except ImportError as error:
            raise ConfigError(f"callbacks need accelerate ({error}): pip install accelerate") from error
        made = callback() if isinstance(callback, type) else callback
        if not isinstance(made, TrainerCallback):
            raise ConfigError(f"callback {made!r} is none of transformers': inherit from transformers.TrainerCallback")
        if isinstance(self.control, Flags):
            self.control = TrainerControl(**dataclasses.asdict(self.control))
        self._all.append(made)

    def pop(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove and return the callback, or the first callback of a class; return None if missing."""
        is_asked_for = (
            (lambda each: isinstance(each, callback)) if isinstance(callback, type) else lambda each: each == callback
        )
        found = next((each for each in self._all if is_asked_for(each)), None)
        if found is not None:
            self._all.remove(found)
        return found

    def begin_run(self) -> None:
        """Begin a run. If any rank has callbacks, all ranks will agree on due actions. All ranks call this."""
        mine = [float(len(self._all)), float(any(map(self.listens, _IN_STEPS)))]
        self._agrees, self.reads_records = gather(mine, self._world_size).bool().any(dim=0).tolist()
        self.control.should_training_stop = False
        self.call("on_train_begin")
        self.agree()

    def call(self, event: str, **details: Any) -> None:
        """Call the method `event` of each callback, one after another; each may change the control."""
        if self.listens(event):
            fence()  # a callback may write to weights
        for callback in self._all:
            changed = getattr(callback, event)(self.arguments, self.state, self.control, **self.given, **details)
            if changed is not None:
                self.control = changed

    def agree(self) -> None:
        """Set each flag of the control if any rank has set the flag; all ranks call this."""
        if self._agrees:
            mine = [float(getattr(self.control, name)) for name in _FLAGS]
            for name, is_set in zip(_FLAGS, gather(mine, self._world_size).any(dim=0).tolist(), strict=True):
                setattr(self.control, name, is_set)

    def listens(self, event: str) -> bool:
        """Whether any callback of this rank does something at this event."""
        if not self._all:
            return False
        from transformers import TrainerCallback

        return any(getattr(type(each), event) is not getattr(TrainerCallback, event) for each in self._all)

    def log(self, record: Mapping[str, Any]) -> None:
        """Pass a record to the callbacks, and keep the record in the state's log_history; any rank may call this."""
        if self._is_used:
            self.state.log_history.append(dict(record))
            self.call("on_log", logs=dict(record))

    @property
    def arguments(self) -> TrainingArguments:
        if self._arguments is None:
            self._arguments = self._make_arguments()
        return self._arguments

    @property
    def state(self) -> TrainerState:
        """Current state of the run, as transformers' TrainerState."""
        if self._state is None:
            from transformers import TrainerState

            self._state = TrainerState()
        for name, value in self._standing().items():
            setattr(self._state, name, value)
        return self._state

    def state_dict(self) -> dict[str, Any] | None:
        """Return the history, and the states of callbacks with ExportableState; None without callbacks and state."""
        if not self._is_used:
            return None
        states = [{"name": type(each).__name__, "state": each.state()} for each in self._stateful()]
        try:
            json.dumps(states)
        except TypeError as error:
            raise TrainingError(
                f"a callback's state is no JSON value ({error}): let state() of {', '.join(_names(states))} return "
                "numbers, strings, lists and dicts"
            ) from error
        return {"log_history": self.state.log_history, "callbacks": states}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load a state_dict: the history, and attributes of callbacks, matched by class and order."""
        if not self._is_used:
            return
        self.state.log_history = list(saved["log_history"])
        waiting = list(saved["callbacks"])
        for callback in self._stateful():
            found = next((each for each in waiting if each["name"] == type(callback).__name__), None)
            if found is not None:
                waiting.remove(found)
                for name, value in found["state"].get("attributes", {}).items():
                    setattr(callback, name, value)

    @property
    def _is_used(self) -> bool:
        return bool(self._all) or self._state is not None

    def _stateful(self) -> list[Any]:
        from transformers.trainer_callback import ExportableState

        return [each for each in self._all if isinstance(each, ExportableState)]

    def __len__(self) -> int:
        return len(self._all)


def _names(states: Sequence[Mapping[str, Any]]) -> list[str]:
    return [each["name"] for each in states]
