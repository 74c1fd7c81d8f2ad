"""Where training stands in lanes: packs consumed, and the state of every lane that gave one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple

from ..errors import CursorError, LmmsStreamError
from .cursor import CURSOR_VERSION, check_version, explain_other_plan
from .lane_state import LaneState


class LaneAfter(NamedTuple):
    """A lane, by its number, and its state after a pack."""

    lane: int
    state: LaneState


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneCursor:
    """step: finished steps of the run. packs: consumed by all ranks. states: of lanes that gave packs, by number.

    plan: fingerprint of the order, the packing and the processor. A rank knows the states of its own lanes alone;
    merge joins those of all ranks.
    """

    plan: str
    num_lanes: int
    step: int = 0
    packs: int = 0
    states: Mapping[int, LaneState] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain ints, strings and lists, for JSON; see from_dict."""
        states = {str(lane): state.to_dict() for lane, state in sorted(self.states.items())}
        return {
            "version": CURSOR_VERSION,
            "plan": self.plan,
            "num_lanes": self.num_lanes,
            "step": self.step,
            "packs": self.packs,
            "lanes": states,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> LaneCursor:
        """Read what to_dict wrote; CursorError for another version, a plan's cursor, or a damaged state."""
        if not isinstance(data, Mapping) or "lanes" not in data:
            raise CursorError(
                "the saved cursor is not one of lanes: it was saved with a lengths index (set packing_mode to plan), "
                "or is damaged"
            )
        check_version(data.get("version"))
        try:
            numbers = {name: index(data[name]) for name in ("num_lanes", "step", "packs")}
            states = {int(lane): LaneState.from_dict(state) for lane, state in data["lanes"].items()}
            if min(numbers.values()) < 0 or not isinstance(data["plan"], str):
                raise ValueError("a number is negative or the plan is not text")
        except LmmsStreamError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CursorError(f"the saved cursor is damaged ({error!r}): use another checkpoint") from error
        return LaneCursor(plan=data["plan"], states=states, **numbers)

    def check(self, plan: str) -> None:
        """CursorError where it follows another plan than this one, or lacks the state of a lane that gave packs."""
        if self.plan != plan:
            raise CursorError(explain_other_plan("data", self.plan, plan))
        for lane in range(self.num_lanes):
            given = self.states[lane].num_packs if lane in self.states else 0
            expected = max(0, -(-(self.packs - lane) // self.num_lanes))
            if given != expected:
                raise CursorError(
                    f"the saved cursor has lane {lane} after {given} packs instead of {expected}: it is of one rank "
                    "alone; save PackedLoader.merge_states of the states of all ranks"
                )

    def after_step(self, packs: Sequence[LaneAfter], *, num_packs: int) -> LaneCursor:
        """The cursor after a step of num_packs packs of all ranks. packs: what this rank read of them, in order."""
        return LaneCursor(
            plan=self.plan,
            num_lanes=self.num_lanes,
            step=self.step + 1,
            packs=self.packs + num_packs,
            states={**self.states, **dict(packs)},
        )

    def merge(self, others: Sequence[LaneCursor]) -> LaneCursor:
        """The cursor with the lanes of all; CursorError unless they stand at the same step."""
        states = dict(self.states)
        for other in others:
            if (other.plan, other.step, other.packs) != (self.plan, self.step, self.packs):
                raise CursorError(
                    f"cursors of ranks at steps {self.step} and {other.step} cannot be merged: save all at one step"
                )
            # Ranks of a replicated group have the same lanes; a lane that a rank does not own stays as it was loaded.
            for lane, state in other.states.items():
                if lane not in states or state.num_packs > states[lane].num_packs:
                    states[lane] = state
        return LaneCursor(plan=self.plan, num_lanes=self.num_lanes, step=self.step, packs=self.packs, states=states)
