"""How far a run is: what its checkpoints say of it, besides the cursor of its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class RunCounts:
    """Steps, and tokens and samples in them, since the run began; num_skipped_steps: those without an update.

    history: the stretches of the run, each with the settings that its packs follow from; see loader/stretches.py.
    left_out: the samples that are padding, of all ranks; see plan/left_out.py.
    """

    step: int = 0
    tokens_seen: int = 0
    samples_seen: int = 0
    num_skipped_steps: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """All but the step, by which a checkpoint is named."""
        values = asdict(self)
        del values["step"]
        return values

    def load(self, state: Mapping[str, Any]) -> None:
        """state: a state_dict, with its step; those of earlier versions have no history, and none left out."""
        for each in fields(self):
            is_list = each.name in ("history", "left_out")
            setattr(self, each.name, list(state.get(each.name, [])) if is_list else state[each.name])
