"""Results of Relax's rollout functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...in_flight import Group
from ...opening import filter_samples


@dataclass
class RolloutFnTrainOutput:
    """Groups to train on."""

    samples: list[Group]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Results of evaluation, by name of dataset."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function, then the function of --rollout-sample-filter-path with the groups to train on.

    Wrap the bare groups or results of an older function.
    """
    output = fn(*args, **kwargs, evaluation=evaluation)
    if not isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        output = RolloutFnEvalOutput(output) if evaluation else RolloutFnTrainOutput(output)
    if isinstance(output, RolloutFnTrainOutput):
        filter_samples(kwargs.get("args", next(iter(args), None)), output.samples)
    return output
