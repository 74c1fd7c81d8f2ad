"""Samples that are longer than a pack, told once before a run begins. plans -> warnings."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ...plan.pack_plan import PackPlan

logger = logging.getLogger("lmms_stream")


def tell_beyond_positions(plans: Mapping[str, PackPlan], positions: int | None) -> None:
    """Warn of the samples of each source that are longer than the positions that the model has."""
    for name, plan in plans.items():
        if positions is not None and (number := plan.num_longer_than(positions)):
            logger.warning(
                "%s: %d of %d samples are longer than the model's %d positions: lower packing_length, or drop them",
                name, number, plan.num_samples, positions,
            )  # fmt: skip


def tell_overlong(plans: Mapping[str, PackPlan]) -> None:
    """Warn of the overlong samples of each source, and of those among them that have media, for these are never cut."""
    for name, plan in plans.items():
        if num_overlong := plan.num_overlong(0):
            logger.warning(
                "%s: %d of %d samples are longer than packing_length %d, and overlong is %s",
                name, num_overlong, plan.num_samples, plan.packing.packing_length, plan.packing.overlong,
            )  # fmt: skip
        if num_media := plan.num_overlong_media(0):
            logger.warning(
                "%s: %d of these have media and are dropped, for samples with media are never cut: raise "
                "packing_length, or set smaller limits for the media in the processor", name, num_media,
            )  # fmt: skip
