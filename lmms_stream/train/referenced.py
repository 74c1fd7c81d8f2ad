"""The reference of a run's task: its starting weights, or what they gave to the answers of its datasets."""

from __future__ import annotations

from .model.model import PackedModel
from .protocol import Trainer
from .reference.frozen import FrozenWeights
from .reference.reference import Reference


def reference_of(trainer: Trainer, model: PackedModel) -> Reference | None:
    """None for a task that compares with none. All ranks call it, before the weights change."""
    kind = getattr(trainer.task, "reference", None)
    if kind is None:
        return None
    return FrozenWeights(model)
