"""Tasks by name; a dataset's processor or a run's file names the task."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from ...checks import check_arguments
from ...errors import ConfigError, LmmsStreamError, did_you_mean
from ...registry import Registry
from .task import Task

CAUSAL = "causal"
TASKS = Registry[Any](
    "tasks",
    {
        CAUSAL: "train.tasks.causal:CausalLanguageModelling",
        "dft": "plugins.tasks.dft:DynamicFineTuning",
        "masked_diffusion": "plugins.tasks.masked_diffusion:MaskedDiffusion",
        "flow_matching": "plugins.tasks.flow_matching:FlowMatching",
        "reconstruction": "plugins.tasks.reconstruction:Reconstruction",
        "bagel": "plugins.tasks.bagel:Bagel",
        "dpo": "plugins.tasks.dpo:DPO",
        "kto": "plugins.tasks.kto:KTO",
    },
)

_ALONE = {"dpo", "kto"}  # tasks with samples of their own: other tasks cannot read them


def build_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Build the task of a name. options: the task's arguments. ConfigError for an unknown name or option, a wrong
    value, and a class whose objects are not tasks.
    """
    if name not in TASKS:
        remedy = did_you_mean(name, TASKS)
        raise ConfigError(f"there is no task {name!r}: {remedy}, or pass your own task to the trainer")
    TASKS.check_names()
    kind, options = TASKS[name], options or {}
    known = list(inspect.signature(kind).parameters)
    for option in options:
        if option not in known:
            raise ConfigError(f"task {name} has no option {option!r}: {did_you_mean(option, known)}")
    check_arguments(kind, options)
    try:
        task: Task = kind(**options)
    except LmmsStreamError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise ConfigError(
            f"task {name} cannot be made with {given or 'no options'} ({type(error).__name__}: {error}): correct the "
            "section task"
        ) from error
    check_task(task)
    return task


def check_task(task: Task) -> None:
    """Raise ConfigError for a task that lacks a member of Task."""
    members = [member for member in vars(Task) if not member.startswith("_")]
    if missing := [member for member in members if not hasattr(task, member)]:
        raise ConfigError(
            f"task {type(task).__name__} lacks {', '.join(missing)}: make it a subclass of "
            "CausalLanguageModelling, or give it all members of Task"
        )


def check_objective(task: Task, processors: Iterable[Any]) -> None:
    """Raise ConfigError if a task with a `name` cannot read the samples of processors, by their `objective`."""
    name = getattr(task, "name", None)
    if name is None:
        return
    for objective in sorted({getattr(each, "objective", CAUSAL) for each in processors}):
        if objective != name and {objective, name} & _ALONE:
            raise ConfigError(
                f"task {name} cannot train on a dataset for {objective}: leave task out, and the dataset chooses the "
                "task, or pass another dataset"
            )


def objective_of(processors: Iterable[Any]) -> str:
    """Return the task name in the processors' `objective`; the default objective is causal.

    ConfigError for several objectives.
    """
    names = sorted({getattr(each, "objective", CAUSAL) for each in processors})
    if len(names) > 1:
        raise ConfigError(
            f"the datasets are for several tasks, {' and '.join(names)}: train on the datasets of one task, or pass "
            "the trainer a task for both"
        )
    return names[0] if names else CAUSAL
