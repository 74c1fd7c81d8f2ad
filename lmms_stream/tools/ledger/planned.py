"""A run's file -> its datasets and settings before it begins, as far as its plan follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ...mds.core import PackedDataset, core_of, opens_loader
from ...plan.cursor import SOURCE
from ...plan.mixture import Mixture
from ...types import World

if TYPE_CHECKING:
    from ...train.run.settings import Datasets, TrainConfig

CONFIG_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """A run that has not begun. built: its datasets as a trainer takes them; datasets: by the names of its cursor."""

    path: Path
    train: TrainConfig
    world: World
    built: Datasets
    datasets: Mapping[str, PackedDataset]

    @property
    def mixture(self) -> Mixture:
        plans = {name: each.plan for name, each in self.datasets.items()}
        return Mixture(plans, weights=self.train.weights, max_epochs=self.train.max_epochs)


def open_run(
    path: Path, *, world: World | None = None, overrides: Sequence[str] = (), is_stored: bool = False
) -> PlannedRun:
    """The run of a file, its datasets opened as the run opens them.

    world: the ranks that it will have; None where they do not matter. overrides: settings as `key.sub=value`.
    is_stored: datasets whose shards are made when the run begins are refused, not made.

    ConfigError for a run whose packs are made in lanes, and so are not known beforehand; for ranks that cannot share
    its packs; and for LMMS Engine's launch file without a world, whose global batch follows from that.
    """
    from ...config import load_mapping
    from ...train.launch import RUN_LENGTHS, is_launch_file

    data = load_mapping(path, overrides, one_of=RUN_LENGTHS)
    opened = _launched if is_launch_file(data) else _configured
    train, world, built = opened(data, path, world, is_stored)
    named = built if isinstance(built, Mapping) else {SOURCE: built}
    cores = {name: _core(each, name=name, path=path) for name, each in named.items()}
    return PlannedRun(path=path, train=train, world=world, built=built, datasets=cores)


def _configured(
    data: Mapping[str, Any], path: Path, world: World | None, is_stored: bool
) -> tuple[TrainConfig, World, Datasets]:
    from ...config import build_config
    from ...train.run_config import RunConfig

    config = build_config(RunConfig, data, source=str(path))
    if is_stored:
        for name, each in ({SOURCE: config.dataset} if config.dataset is not None else config.datasets).items():
            if each.source_type is not None:
                raise _not_stored(name, each.source_type)
    ranks = config.train.group_ranks
    if world is not None and world.world_size % ranks:
        raise ConfigError(
            f"--world-size {world.world_size}: of {path} {ranks} ranks share their packs: name a multiple"
        )
    world = World() if world is None else replace(world, replication=ranks)
    return config.train, world, config.build_datasets(world)


def _launched(
    data: Mapping[str, Any], path: Path, world: World | None, is_stored: bool
) -> tuple[TrainConfig, World, Datasets]:
    if is_stored:
        raise _not_stored(SOURCE, str((data.get("dataset_config") or {}).get("dataset_type")))
    if world is None:
        raise ConfigError(
            f"{path} is a launch file, whose global batch follows from the number of ranks: write a run's file with "
            "dataset, model and train, or ask lmms-stream ledger with --world-size"
        )
    from ...doors.lmms_engine.launch.run import planned_launch

    return planned_launch(data, source=str(path), world=world)


def _core(dataset: Any, *, name: str, path: Path) -> PackedDataset:
    core = None if opens_loader(dataset) else core_of(dataset)
    if core is None or core.mode == "lanes":
        raise ConfigError(
            f"the packs of {name!r} of {path} are made in lanes as samples are read, and are not known beforehand: "
            "write its lengths index with lmms-stream index, and leave its packing_mode auto"
        )
    return core


def _not_stored(name: str, dataset_type: str) -> ConfigError:
    return ConfigError(
        f"the shards of dataset {name!r} are made when the run begins (dataset_type {dataset_type}): convert it with "
        "lmms-stream convert, and name its folder or URL as remote"
    )
