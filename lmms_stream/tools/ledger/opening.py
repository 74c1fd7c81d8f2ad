"""Path of the user -> history of a run: from a checkpoint, or from the config before the run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError, ConfigError
from ...mds.core import PackedDataset, core_of, opens_loader
from ...mds.mixed import mixed, plans_of, warn_of_shared
from ...plan.cursor import SOURCE
from ...plan.ledger import StepLookup
from ...plan.left_out import LeftOut
from ...plan.packing import PackRange
from ...plan.windows import WindowedMixture
from ...storage.storage import open_storage
from ...train.checkpoint.store import Checkpoint, checkpoints_of, open_target, read_checkpoint, split_path
from ...train.report.train_log import (
    DIGESTS_NAME,
    LOG_NAME,
    digest_of,
    history,
    known_digest,
    read_digests,
    read_log,
)
from ...types import World

if TYPE_CHECKING:
    from ...train.run.settings import Datasets, TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLength:
    """Settings for the end of a run, see TrainConfig; all None if the end is unknown in advance (max_tokens)."""

    max_steps: int | None = None
    num_train_epochs: int | None = None

    @staticmethod
    def of(train: Mapping[str, Any]) -> RunLength:
        return RunLength(max_steps=train.get("max_steps"), num_train_epochs=train.get("num_train_epochs"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """A run up to a step.

    where: path for errors. stretches: from loader/loader.py; empty for lanes. stop: the first untrained step.
    num_trained: number of earlier steps without skipped steps. checkpoints: folder or URL of the checkpoints; None
    before the run. state: content of the checkpoint except tensors.
    """

    where: str
    stretches: Sequence[Mapping[str, Any]]
    stop: int = 0
    num_trained: int = 0
    settings: RunLength = field(default_factory=RunLength)
    checkpoints: str | None = None
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_computed(self) -> bool:
        """Return whether the steps are computed from a config, without a record of training."""
        return self.checkpoints is None


def open_history(run: str, *, world: World | None = None, overrides: Sequence[str] = ()) -> RunHistory:
    """History of a run, see Ledger. world, overrides: only for a config.

    CheckpointError, ConfigError if `run` is neither a checkpoint nor a config.
    """
    if run.endswith(CONFIG_SUFFIXES):
        return history_of_config(Path(run), world=world or World(), overrides=overrides)
    if world is not None or overrides:
        raise ConfigError(
            f"{run} is not a config, and its checkpoint already has the ranks and settings of the run: leave out "
            f"{'--world-size and --num-nodes' if world else ' '.join(overrides)}, or name the run's YAML file"
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
    """History of a run before the first step, with datasets opened like in the run.

    ConfigError for packs made in lanes, unknown in advance.
    """
    from ...loader.loader import PackedLoader, stretch_of

    run = open_run(path, world=world, overrides=overrides)
    train = run.train
    loader = PackedLoader(
        run.built,  # type: ignore[arg-type]  # none of several opens a loader
        global_batch=train.global_batch, weights=train.weights, max_epochs=train.max_epochs,
        balance=train.balance, mixing=train.mixing, world=run.world,
    )  # fmt: skip
    stretch = stretch_of(loader, skipped=train.skip_steps)
    assert stretch is not None  # nothing is in lanes
    settings = RunLength(max_steps=train.max_steps, num_train_epochs=train.num_train_epochs)
    return RunHistory(where=str(path), stretches=[stretch], settings=settings)


def _find(run: str) -> Checkpoint:
    folder, step = split_path(run)
    if step is not None:
        return read_checkpoint(open_storage(folder), step)
    for url in (checkpoints_of(run), run):
        target = open_target(url, staging=Path())  # nothing is fetched
        if steps := target.candidates():
            return read_checkpoint(target.storage, steps[-1])
    raise CheckpointError(
        f"{run} has no complete checkpoint: name a checkpoint, or the output_dir of a run with a checkpoint"
    )


# A run's file -> datasets and settings of the plan, before the run.

CONFIG_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """Run before the first step. built: datasets for a trainer; datasets: by names of the run's cursor."""

    path: Path
    train: TrainConfig
    world: World
    built: Datasets
    datasets: Mapping[str, PackedDataset]

    @property
    def mixture(self) -> WindowedMixture:
        train, plans = self.train, plans_of(self.datasets)
        weights = None if train.mixing == "samples" else train.weights
        return WindowedMixture(plans, weights=weights, max_epochs=train.max_epochs, balance=train.balance)


def open_run(
    path: Path, *, world: World | None = None, overrides: Sequence[str] = (), is_stored: bool = False
) -> PlannedRun:
    """Open the run of a file, with datasets opened like in the run.

    world: ranks of the run; None if irrelevant. overrides: settings as `key.sub=value`. is_stored: refuse datasets with
    shards made at the start of the run, instead of making the shards.

    ConfigError for packs made in lanes, unknown in advance; for a number of ranks incompatible with the packs; and for
    LMMS Engine's launch file without a world, needed for the global batch.
    """
    from ...config import load_mapping
    from ...train.launch import RUN_LENGTHS, is_launch_file

    data = load_mapping(path, overrides, one_of=RUN_LENGTHS)
    opened = _launched if is_launch_file(data) else _configured
    train, world, built = opened(data, path, world, is_stored)
    named = built if isinstance(built, Mapping) else {SOURCE: built}
    cores = {name: _core(each, name=name, path=path) for name, each in named.items()}
    warn_of_shared(cores)
    if train.mixing == "samples":
        cores = {SOURCE: mixed(cores, weights=train.weights)}  # type: ignore[arg-type]  # no schedule
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
                raise not_stored(name, each.source_type)
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
        raise not_stored(SOURCE, str((data.get("dataset_config") or {}).get("dataset_type")))
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
            f"the packs of {name!r} of {path} are made in lanes during reading, and are unknown before: write its "
            "lengths index with lmms-stream index, and set its packing_mode to auto"
        )
    return core


def model_positions(path: Path, overrides: Sequence[str] = ()) -> int | None:
    """Return how many positions the model of a run's file has; None if neither the file nor the model's folder says."""
    from ...config import load_mapping

    model = load_mapping(path, overrides).get("model") or {}
    said = model.get("config")
    if said is None and (file := Path(str(model.get("pretrained"))) / "config.json").is_file():
        said = json.loads(file.read_text(encoding="utf-8"))
    fields = {**(said or {}), **((said or {}).get("text_config") or {})}
    found = fields.get("n_positions") or fields.get("max_position_embeddings")
    return found if isinstance(found, int) else None


def not_stored(name: str, dataset_type: str) -> ConfigError:
    """Error for a dataset whose shards a run makes at its beginning."""
    return ConfigError(
        f"the shards of dataset {name!r} are made when the run begins (dataset_type {dataset_type}): convert it with "
        "lmms-stream convert, and name its folder or URL as remote"
    )


# The first step that was trained on any of some samples, and the checkpoint before the step.


@dataclass(frozen=True, kw_only=True, slots=True)
class Retraining:
    """Effect of removing some samples on a run.

    step: the first step trained on any removed sample; source, sample_id: one removed sample in this step. num_steps:
    steps from there to the end of the history, including skipped steps. checkpoint: the latest checkpoint before
    `step`; None: no earlier checkpoint exists, and the run would start again from step 0.
    """

    step: int
    source: str
    sample_id: int
    num_steps: int
    checkpoint: str | None


def retraining(
    plans: StepLookup, sample_ids: Mapping[str, NDArray[np.int64]], *, history: RunHistory, left_out: LeftOut
) -> Retraining | None:
    """Return the effect of removing samples; None if no step was trained on the samples. sample_ids: by source."""
    stop, firsts = history.stop, []
    for source, ids in sample_ids.items():
        found = plans.first_step(source, ids, stop=stop, left_out=left_out)
        if found is not None:
            firsts.append(found)
            stop = found.step + 1  # other sources matter only at earlier steps
    if not firsts:
        return None
    first = min(firsts, key=lambda each: each.step)
    checkpoint = None if history.checkpoints is None else _last_before(history.checkpoints, first.step)
    return Retraining(**first._asdict(), num_steps=history.stop - first.step, checkpoint=checkpoint)


def _last_before(checkpoints: str, step: int) -> str | None:
    """Return the latest complete checkpoint in a folder or URL with steps before `step` only."""
    target = open_target(checkpoints, staging=Path())  # nothing is fetched
    for number in reversed(target.candidates()):
        try:
            found = read_checkpoint(target.storage, number)
        except CheckpointError:  # a lost file: no run can resume from this checkpoint
            continue
        if int(found.state["cursor"]["step"]) <= step:
            return found.where
    return None


# What a run wrote of its steps, compared with the arithmetic.


class Verified(NamedTuple):
    """Numbers of compared steps, of their digests, and of records of the log; the first difference, None without."""

    num_steps: int
    num_digests: int
    num_records: int
    difference: str | None


def verified(plans: StepLookup, *, run: RunHistory, output_dir: Path) -> Verified:
    """Compare the steps before the checkpoint with the digests and the log of the run.

    Later steps are not compared: only the next checkpoint has their settings. ConfigError for a run without digests
    and records, or without its first steps in the history.
    """
    digests = read_digests(output_dir)
    records = {record["step"]: record for record in history(read_log(output_dir)).steps}
    if run.is_computed or plans.stretches[0].cursor.step or not (digests or records):
        raise ConfigError(
            f"{run.where} and {output_dir} are no checkpoint with the whole history of a run, and its {DIGESTS_NAME} "
            f"or {LOG_NAME}: name the output_dir of a run that this release began"
        )
    num_steps = num_digests = num_records = 0
    seen = {"tokens_seen": 0, "samples_seen": 0}
    for step, packs, names in _trained_steps(plans, stop=run.stop):
        num_steps += 1
        seen["tokens_seen"] += int(packs.lengths.sum())
        seen["samples_seen"] += len(packs.sample_ids)
        read, planned = digests[num_steps - 1] if num_steps <= len(digests) else 0, _digest_of(packs, names)
        logged = [records[num_steps]] if num_steps in records else []
        num_digests, num_records = num_digests + (read != 0), num_records + len(logged)
        lists = [*logged, run.state] if num_steps == run.num_trained else logged
        found = [
            f"has {name} {each[name]}, and the plan {amount}"
            for each in lists
            for name, amount in seen.items()
            if each.get(name, amount) != amount
        ]
        if read not in (0, planned):
            found = [f"read other samples (digest {read:016x}) than the plan has ({planned:016x})"]
        if found:
            return Verified(num_steps, num_digests, num_records, f"step {step} (the log's {num_steps}) {found[0]}")
    lost = f"the checkpoint is of {run.num_trained} trained steps, and the plan has {num_steps} before it"
    return Verified(num_steps, num_digests, num_records, None if num_steps == run.num_trained else lost)


def _trained_steps(plans: StepLookup, *, stop: int) -> Iterator[tuple[int, PackRange, Sequence[str]]]:
    """Yield the number of each step before `stop` without skipped steps, its packs, and names of sources."""
    ends = [*(stretch.cursor.step for stretch in plans.stretches[1:]), stop]
    for stretch, end in zip(plans.stretches, ends, strict=True):
        cursor = stretch.cursor
        while cursor.step < min(end, stop):
            step = stretch.mixture.step(cursor, global_batch=stretch.global_batch)
            if not step.num_packs:
                return
            if not plans.is_skipped(cursor.step):
                yield cursor.step, stretch.mixture.packs(step.ranges), stretch.mixture.names
            cursor = step.after


def _digest_of(packs: PackRange, names: Sequence[str]) -> int:
    sources = np.repeat(packs.sources, np.diff(packs.offsets))
    each = (digest_of(names[source], packs.sample_ids[sources == source]) for source in np.unique(sources).tolist())
    return known_digest(sum(each))
