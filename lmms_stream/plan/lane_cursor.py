"""Position of training in lanes: consumed packs, and the state of every lane with consumed packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import CursorError, LmmsStreamError
from .cursor import CURSOR_VERSION, check_version, checked_count, explain_other_plan, refuse_state_of_samples
from .packing import MAX_LENGTH


class LaneAfter(NamedTuple):
    """Number of a lane, and its state after a pack."""

    lane: int
    state: LaneState


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneCursor:
    """Position of a run in lanes.

    plan: fingerprint of the order, the packing and the processor. step: finished steps of the run. packs: packs
    consumed by all ranks. states: state of each lane that gave packs, by number. A rank knows only the states of its
    own lanes; merge joins the states of all ranks.
    """

    plan: str
    num_lanes: int
    step: int = 0
    packs: int = 0
    states: Mapping[int, LaneState] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain ints, strings and lists, for JSON; see from_dict."""
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
        """Read a dict written by to_dict; CursorError for another version, a plan's cursor, or a damaged state."""
        if isinstance(data, Mapping):
            refuse_state_of_samples(data)
        if not isinstance(data, Mapping) or "lanes" not in data:
            raise CursorError(
                "the saved cursor is not one of lanes: it was saved with a lengths index (set packing_mode to plan), "
                "or is damaged"
            )
        check_version(data.get("version"))
        try:
            numbers = {name: checked_count(data[name]) for name in ("num_lanes", "step", "packs")}
            states = {
                checked_count(int(lane), numbers["num_lanes"] - 1): LaneState.from_dict(state)
                for lane, state in data["lanes"].items()
            }
            if numbers["step"] > numbers["packs"] or not isinstance(data["plan"], str):
                raise ValueError("there are more steps than packs, or the plan is not text")
        except LmmsStreamError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CursorError(f"the saved cursor is damaged ({error!r}): use another checkpoint") from error
        return LaneCursor(plan=data["plan"], states=states, **numbers)

    def check(self, plan: str, num_lanes: int) -> None:
        """Raise CursorError for a cursor of another plan, or with a lane whose number of packs does not fit."""
        if self.plan != plan:
            raise CursorError(explain_other_plan("data", self.plan, plan))
        if self.num_lanes != num_lanes:
            raise CursorError(
                f"the saved cursor has {self.num_lanes} lanes, and its plan {num_lanes}: it is damaged; use another "
                "checkpoint"
            )
        for lane in range(self.num_lanes):
            given = self.states[lane].num_packs if lane in self.states else 0
            expected = max(0, -(-(self.packs - lane) // self.num_lanes))
            if given != expected:
                raise CursorError(
                    f"the saved cursor has lane {lane} after {given} packs instead of {expected}: it is of one rank "
                    "alone; save PackedLoader.merge_states of the states of all ranks"
                )

    def after_step(self, packs: Sequence[LaneAfter], *, num_packs: int) -> LaneCursor:
        """Return the cursor after a step of num_packs packs of all ranks. packs: packs read by this rank, in order."""
        return LaneCursor(
            plan=self.plan,
            num_lanes=self.num_lanes,
            step=self.step + 1,
            packs=self.packs + num_packs,
            states={**self.states, **dict(packs)},
        )

    def merge(self, others: Sequence[LaneCursor]) -> LaneCursor:
        """Return the cursor with the lanes of all cursors; CursorError unless all have equal plan, step and packs."""
        states = dict(self.states)
        for other in others:
            if (other.plan, other.step, other.packs) != (self.plan, self.step, self.packs):
                raise CursorError(
                    f"cursors of ranks at steps {self.step} and {other.step} cannot be merged: save all at one step"
                )
            # Ranks of a replicated group have the same lanes; lanes of other ranks stay as loaded.
            for lane, state in other.states.items():
                if lane not in states or state.num_packs > states[lane].num_packs:
                    states[lane] = state
        return LaneCursor(plan=self.plan, num_lanes=self.num_lanes, step=self.step, packs=self.packs, states=states)


# Position of a lane after a pack, with the packs that wait for the next window, for a checkpoint.

MAX_PATCHES = (1 << 32) - 1  # maximum patches of a sample


@dataclass(frozen=True, kw_only=True, slots=True)
class CarriedPacks:
    """Packs that wait for a window, in the packer's order, with the facts known about their segments.

    sizes: segments of each pack. firsts: index of each pack's first segment among the segments of the block. samples:
    index in the block of each segment's sample. expected: measured tokens of each segment's sample. pieces: number of
    each segment in its sample; empty if all are 0. patches: patches of each segment's sample; empty if all are 0.
    """

    sizes: tuple[int, ...] = ()
    firsts: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()
    pieces: tuple[int, ...] = ()
    patches: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        num_segments = sum(self.sizes)
        if not (
            len(self.firsts) == len(self.sizes)
            and len(self.samples) == len(self.expected) == num_segments
            and len(self.pieces) in (0, num_segments)
            and len(self.patches) in (0, num_segments)
            and all(count > 0 for count in self.sizes + self.expected)
        ):
            raise ValueError("the lists of carried packs do not fit each other")

    def segments(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return samples, expected, pieces and patches as int64[num_segments] each."""
        none = (0,) * len(self.samples)
        samples, expected, pieces, patches = (
            np.array(each, np.int64)
            for each in (self.samples, self.expected, self.pieces or none, self.patches or none)
        )
        return samples, expected, pieces, patches


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneState:
    """Position of a lane after a pack: an epoch, a block of its canonical node, and a window of the block.

    The window begins with piece `piece` of sample `sample` of the block. This piece is segment `segment` of the block;
    without splits `segment` is the sample's index among the samples that are not dropped. taken: packs taken from the
    window. carried: packs that waited for the window. num_packs: packs taken from the lane in all. num_overlong:
    samples longer than a pack in all windows before this window; exact at the end of a window, and therefore of an
    epoch.
    """

    epoch: int = 0
    block: int = 0
    sample: int = 0
    piece: int = 0
    segment: int = 0
    taken: int = 0
    num_packs: int = 0
    num_overlong: int = 0
    carried: CarriedPacks = CarriedPacks()

    def to_dict(self) -> dict[str, Any]:
        """Return plain ints and lists of ints, for JSON, without patches for text only; see from_dict."""
        numbers = {key: getattr(self, name) for name, key in _KEYS.items()}
        carried = {field.name: list(getattr(self.carried, field.name)) for field in _LISTS}
        if not self.carried.patches:
            del carried["patches"]
        return numbers | {"carried": carried}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> LaneState:
        """Read a dict written by to_dict; CursorError for a damaged state."""
        try:
            lists = {"patches": [], **data["carried"]}
            carried = {
                field.name: tuple(checked_count(value, MAX_PATCHES if field.name == "patches" else MAX_LENGTH)
                                  for value in lists[field.name])
                for field in _LISTS
            }  # fmt: skip
            return LaneState(
                **{name: checked_count(data[key]) for name, key in _KEYS.items()}, carried=CarriedPacks(**carried)
            )
        except LmmsStreamError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise CursorError(f"the saved lane state is damaged ({error!r}): use another checkpoint") from error


_KEYS = {field.name: field.name for field in fields(LaneState) if field.name != "carried"} | {"segment": "place"}
_LISTS = fields(CarriedPacks)
