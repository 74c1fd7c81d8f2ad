"""Where training stands in a plan: a few integers that fit any number of ranks and workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

from .errors import CursorError

CURSOR_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The next pack of one source: `packs` of epoch `epoch` are consumed."""

    epoch: int = 0
    packs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """plan: fingerprint of the plan that is followed. sources: the place in each source, by its name."""

    plan: str
    sources: Mapping[str, Place]

    def to_dict(self) -> dict[str, Any]:
        """Plain ints and strings, for JSON; see from_dict."""
        sources = {name: {"epoch": at.epoch, "packs": at.packs} for name, at in self.sources.items()}
        return {"version": CURSOR_VERSION, "plan": self.plan, "sources": sources}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Cursor:
        """Read what to_dict wrote; CursorError for another version or a damaged state."""
        if not isinstance(data, Mapping):
            raise CursorError(f"the saved cursor is damaged ({data!r}): use another checkpoint")
        version = data.get("version")
        if version is True or version != CURSOR_VERSION:
            raise CursorError(
                f"the saved cursor has version {version!r}, this release reads {CURSOR_VERSION}: "
                "resume with the release that wrote it"
            )
        try:
            places = {
                str(name): Place(epoch=index(at["epoch"]), packs=index(at["packs"]))
                for name, at in data["sources"].items()
            }
            plan = data["plan"]
            if not isinstance(plan, str):
                raise TypeError(f"plan is {plan!r}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CursorError(f"the saved cursor is damaged ({error!r}): use another checkpoint") from error
        for name, place in places.items():
            if place.epoch < 0 or place.packs < 0:
                raise CursorError(f"the saved cursor is damaged: {name} stands at {place}: use another checkpoint")
        return Cursor(plan=plan, sources=places)

    def check_plan(self, fingerprint: str) -> None:
        """Raise CursorError unless the cursor follows the plan of this fingerprint."""
        if self.plan != fingerprint:
            raise CursorError(
                f"the checkpoint follows plan {self.plan}, this run built {fingerprint}: restore its dataset, "
                "processor, seed and packing settings, or start over in another output_dir"
            )
