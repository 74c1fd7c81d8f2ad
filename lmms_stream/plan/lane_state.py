"""Where a lane stands after a pack, with the packs that wait for its next window, as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CursorError, LmmsStreamError
from .packing import MAX_LENGTH

MAX_COUNT = 1 << 62  # in a state
MAX_PATCHES = (1 << 32) - 1  # of a sample


@dataclass(frozen=True, kw_only=True, slots=True)
class CarriedPacks:
    """Packs that wait for a window, in the order that the packer keeps them, with what is known of their segments.

    sizes: segments of each pack. firsts: index of each pack's first segment among the segments of the block.
    samples: of each segment, the sample's index in its block. expected: tokens of that sample, as measured. pieces:
    of each segment, the piece of its sample; empty where all are 0. patches: of each segment's sample; empty where all
    are 0.
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
        """samples, expected, pieces and patches as int64[num_segments] each."""
        none = (0,) * len(self.samples)
        samples, expected, pieces, patches = (
            np.array(each, np.int64)
            for each in (self.samples, self.expected, self.pieces or none, self.patches or none)
        )
        return samples, expected, pieces, patches


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneState:
    """Where a lane stands after a pack: in an epoch, a block of its canonical node, and a window of that block.

    The window begins with piece `piece` of sample `sample` of the block, which is segment `segment` of the block;
    without splits that is the sample's index among those that are not dropped. taken: packs of the window that are
    taken; carried: packs that waited for it. num_packs: taken from the lane in all. num_overlong: samples longer than
    a pack in all windows before this one; exact at the end of a window, hence of an epoch.
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

    @property
    def begins_epoch(self) -> bool:
        return self.block == self.sample == self.piece == self.taken == 0

    def to_dict(self) -> dict[str, Any]:
        """Plain ints and lists of ints, for JSON; see from_dict. Without media nothing is said of patches."""
        numbers = {key: getattr(self, name) for name, key in _KEYS.items()}
        carried = {field.name: list(getattr(self.carried, field.name)) for field in _LISTS}
        if not self.carried.patches:
            del carried["patches"]
        return numbers | {"carried": carried}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> LaneState:
        """Read what to_dict wrote; CursorError for a damaged state."""
        try:
            lists = {"patches": [], **data["carried"]}
            carried = {
                field.name: tuple(_count(value, MAX_PATCHES if field.name == "patches" else MAX_LENGTH)
                                  for value in lists[field.name])
                for field in _LISTS
            }  # fmt: skip
            return LaneState(
                **{name: _count(data[key], MAX_COUNT) for name, key in _KEYS.items()}, carried=CarriedPacks(**carried)
            )
        except LmmsStreamError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise CursorError(f"the saved lane state is damaged ({error!r}): use another checkpoint") from error


_KEYS = {field.name: field.name for field in fields(LaneState) if field.name != "carried"} | {"segment": "place"}
_LISTS = fields(CarriedPacks)


def _count(value: Any, largest: int) -> int:
    number = index(value)
    if not 0 <= number <= largest:
        raise ValueError(f"{number} is out of range")
    return number
