"""What the user names -> the history of a run: from its checkpoint, or from the config of one that has not begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError, ConfigError
from ...mds.core import PackedDataset, core_of, opens_loader
from ...plan.cursor import SOURCE
from ...plan.mixture import Mixture
from ...storage.storage import open_storage
from ...train.checkpoint.store import Checkpoint, checkpoints_url, open_target, read_checkpoint, split_path
from ...types import World

if TYPE_CHECKING:
    from ...train.run.settings import Datasets, TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLength:
    """What says where a run ends, see TrainConfig; all None where that is not known beforehand (max_tokens)."""

    max_steps: int | None = None
    num_train_epochs: int | None = None

    @staticmethod
    def of(train: Mapping[str, Any]) -> RunLength:
        return RunLength(max_steps=train.get("max_steps"), num_train_epochs=train.get("num_train_epochs"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """A run up to a step.

    where: it is told, for errors. stretches: as loader/loader.py makes them; none in lanes. stop: the first step
    that is not trained. num_trained: steps before it that were not skipped. checkpoints: the folder or URL where they
    lie; None before the run. state: what the checkpoint holds besides tensors.
    """

    where: str
    stretches: Sequence[Mapping[str, Any]]
    stop: int = 0
    num_trained: int = 0
    settings: RunLength = field(default_factory=RunLength)
    checkpoints: str | None = None
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_in_lanes(self) -> bool:
        return "lanes" in self.state.get("cursor", {})


def open_history(run: str, *, world: World | None = None, overrides: Sequence[str] = ()) -> RunHistory:
    """The history of what `run` names: see Ledger. world, overrides: of a config.

    CheckpointError, ConfigError for what is neither.
    """
    if run.endswith(CONFIG_SUFFIXES):
        return history_of_config(Path(run), world=world or World(), overrides=overrides)
    if world is not None or overrides:
        raise ConfigError(
            f"{run} is no config, and its checkpoint says on which ranks and by which settings it was trained: leave "
            f"out {'--world-size and --num-nodes' if world else ' '.join(overrides)}, or name the run's YAML file"
        )
    found = _find(run)
    state = found.state
    return RunHistory(
        where=found.where,
        stretches=state.get("history") or (),
        stop=int(state["cursor"]["step"]),
        num_trained=found.step,
        settings=RunLength.of(state.get("fingerprint", {}).get("train", {})),
        checkpoints=split_path(found.where)[0],
        state=state,
    )


def history_of_config(path: Path, *, world: World, overrides: Sequence[str] = ()) -> RunHistory:
    """The history of a run before its first step: its datasets are opened as the run opens them.

    ConfigError for a run whose packs are made in lanes, and so are not known beforehand.
    """
    from ...loader.loader import PackedLoader, stretch_of

    run = open_run(path, world=world, overrides=overrides)
    train = run.train
    loader = PackedLoader(
        run.built,  # type: ignore[arg-type]  # none of several opens a loader
        global_batch=train.global_batch, weights=train.weights, max_epochs=train.max_epochs, world=run.world,
    )  # fmt: skip
    stretch = stretch_of(loader, skipped=train.skip_steps)
    assert stretch is not None  # nothing is in lanes
    settings = RunLength(max_steps=train.max_steps, num_train_epochs=train.num_train_epochs)
    return RunHistory(where=str(path), stretches=[stretch], settings=settings)


def _find(run: str) -> Checkpoint:
    folder, step = split_path(run)
    if step is not None:
        return read_checkpoint(open_storage(folder), step)
    for url in (checkpoints_url(run, None), run):
        target = open_target(url, staging=Path())  # nothing is fetched
        if steps := target.candidates():
            return read_checkpoint(target.storage, steps[-1])
    raise CheckpointError(f"{run} has no complete checkpoint: name one, or the output_dir of a run that has saved one")


# A run's file -> its datasets and settings before it begins, as far as its plan follows from them.

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
