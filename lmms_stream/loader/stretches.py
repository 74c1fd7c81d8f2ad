"""What decides the packs of the steps that a loader gives from here on, as JSON values that a checkpoint keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .loader import PackedLoader


def stretch_of(loader: PackedLoader, *, skipped: Sequence[tuple[int, int]] = ()) -> dict[str, Any] | None:
    """The stretch of a run that begins where the loader stands: ledger/stretches.py reads it. None in lanes.

    skipped: ranges [first, stop) of steps that nobody reads.
    """
    if not isinstance(loader, PackedLoader) or loader.state_is_per_rank:
        return None
    mixture, world = loader.mixture, loader.world
    sources = {
        name: {
            "url": loader.urls[name],
            "identity": loader.identities[name],
            "num_parts": loader.num_parts[name],
            "lengths": loader.lengths[name],
            "packing": dataclasses.asdict(plan.packing),
            "order": dataclasses.asdict(plan.order),
        }
        for name, plan in mixture.plans.items()
    }
    return {
        "cursor": loader.cursor.to_dict(),
        "sources": sources,
        "weights": mixture.schedule and [[step, dict(weights)] for step, weights in mixture.schedule],
        "max_epochs": mixture.max_epochs,
        "global_batch": loader.global_batch,
        "world": {
            "world_size": world.world_size,
            "num_nodes": world.num_nodes,
            "replication": world.replication,
        },
        "skip_steps": [list(each) for each in skipped],
    }


def begin_stretch(history: list[dict[str, Any]], stretch: Mapping[str, Any] | None) -> None:
    """Add a stretch to those of a run, unless its settings are those of the last one, which then goes on."""
    if stretch is None:
        return
    if history and _settings(history[-1]) == _settings(stretch):
        return
    history.append(dict(stretch))


def _settings(stretch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in stretch.items() if name != "cursor"}
