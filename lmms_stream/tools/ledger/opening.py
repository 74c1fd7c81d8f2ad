"""What the user names -> the history of a run: from its checkpoint, or from the config of one that has not begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, ConfigError
from ...storage.storage import open_storage
from ...train.checkpoint.store import Checkpoint, checkpoints_url, open_target, read_checkpoint, split_path
from ...types import World
from .planned import CONFIG_SUFFIXES, open_run


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
