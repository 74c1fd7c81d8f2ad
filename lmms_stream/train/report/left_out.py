"""Samples left out of a run: lists joined over ranks, logged, written, limited. All ranks make equal calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import TrainingError
from ...loader.drop_list import read_left_out, write_left_out
from ...loader.loader import PackedLoader
from ...plan.left_out import LeftOut, LeftOutSample
from ...plan.pack_plan import PackPlan
from ...types import Batch, World
from ..run.counts import RunCounts
from ..run.distributed import gather_objects
from ..run.settings import TrainConfig

LEFT_OUT_FOLDER = "left_out"  # in the output_dir: samples quarantined by workers
LEFT_OUT_NAME = "left_out.jsonl"  # in the output_dir: all samples left out
MOST_NAMED = 10
logger = logging.getLogger("lmms_stream")


class RunLeftOut:
    """Keeps the list of a run equal on all ranks; checkpoints contain the list."""

    def __init__(self, config: TrainConfig, loader: object, *, world: World):
        self._config, self._world = config, world
        self._loader = loader if isinstance(loader, PackedLoader) else None  # only a PackedLoader leaves samples out
        self._known = LeftOut()

    def begin(self, counts: RunCounts) -> None:
        """Leave out samples listed in the checkpoint, by workers of earlier starts, and in drop lists."""
        if self._loader is None:
            return
        listed = self._listed(self._loader) if self._config.bad_samples.leaves_out else LeftOut()
        self._loader.leave_out(LeftOut.load(counts.left_out).merge([listed]))
        if self._config.bad_samples.leaves_out or counts.left_out:
            self._merge(self._loader.left_out, counts)

    def _listed(self, loader: PackedLoader) -> LeftOut:
        """Return the samples listed by workers of earlier starts, of this run's datasets."""
        folder = Path(self._config.output_dir) / LEFT_OUT_FOLDER
        found = read_left_out(folder, loader.identities)
        if found.of_others and self._world.rank == 0:
            named = ", ".join(found.of_others[:MOST_NAMED])
            logger.warning(
                "%s lists %d samples of other datasets than those that are read, which are not left out (%s): give "
                "each dataset an output_dir of its own, or remove the folder",
                folder,
                len(found.of_others),
                named,
            )
        return found.left_out

    def take(self, batches: Sequence[Batch], counts: RunCounts) -> None:
        """Add the quarantined samples of a step's batches; raise TrainingError for more than the limit of a run."""
        found = LeftOut(each for batch in batches for each in batch.left_out if each.kind == "quarantined")
        self._merge(found, counts)

    def _merge(self, mine: LeftOut, counts: RunCounts) -> None:
        merged = self._known.merge(gather_objects(mine, self._world.world_size))
        new = [each for each in merged.samples if self._known.get(each.source, each.sample_id) is None]
        if new:
            self._known = merged
            counts.left_out = merged.state_dict()
            if self._world.rank == 0:
                self._write(new, merged)
        self._check(merged.of_kind("quarantined"))

    def _write(self, new: list[LeftOutSample], merged: LeftOut) -> None:
        for each in (sample for sample in new if sample.kind == "quarantined"):
            name = each.name if self._loader is None else self._loader.name_of(each.source, each.sample_id)
            logger.warning("sample %s is left out from step %d on: %s", name, each.since_step, each.reason)
        if num_dropped := sum(each.kind == "dropped" for each in new):
            logger.warning("%d samples are left out, as drop lists say", num_dropped)
        identities = self._loader.identities if self._loader is not None else {}
        write_left_out(Path(self._config.output_dir) / LEFT_OUT_NAME, merged, identities)

    def _check(self, quarantined: LeftOut) -> None:
        most = self._config.bad_samples.quarantine  # 0: listed by another run
        if most and len(quarantined) > most:
            named = "; ".join(f"{each.name}: {each.reason}" for each in quarantined.samples[:MOST_NAMED])
            more = f"; and {len(quarantined) - MOST_NAMED} others" if len(quarantined) > MOST_NAMED else ""
            raise TrainingError(
                f"{len(quarantined)} samples cannot be processed, and train.bad_samples.quarantine is {most}: correct "
                f"the data or the processor, or raise it ({named}{more})"
            )


# Samples longer than a pack, reported once before a run begins. plans -> warnings.


def tell_beyond_positions(plans: Mapping[str, PackPlan], positions: int | None) -> None:
    """Warn of each source's samples with more tokens than the model has positions."""
    for name, plan in plans.items():
        if positions is not None and (number := plan.num_longer_than(positions)):
            logger.warning(
                "%s: %d of %d samples are longer than the model's %d positions: lower packing_length, or drop them",
                name, number, plan.epoch_size, positions,
            )  # fmt: skip


def tell_overlong(plans: Mapping[str, PackPlan]) -> None:
    """Warn of overlong samples of each source, and of overlong samples with media: they are never cut."""
    for name, plan in plans.items():
        if num_overlong := plan.num_overlong(0):
            logger.warning(
                "%s: %d of %d samples are longer than packing_length %d, and overlong is %s",
                name, num_overlong, plan.epoch_size, plan.packing.packing_length, plan.packing.overlong,
            )  # fmt: skip
        for step, length, number in plan.num_overlong_later():
            if number:
                logger.warning(
                    "%s: from step %d on %d of %d samples are longer than packing_length %d, and overlong is %s",
                    name, step, number, plan.num_samples, length, plan.packing.overlong,
                )  # fmt: skip
        if num_media := plan.num_overlong_media(0):
            logger.warning(
                "%s: %d of these have media and are dropped, for samples with media are never cut: raise "
                "packing_length, or set smaller limits for the media in the processor", name, num_media,
            )  # fmt: skip
