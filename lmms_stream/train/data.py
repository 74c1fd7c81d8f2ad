"""The opened datasets of a run: batches for training and for evaluations."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError, LmmsStreamError
from ..loader.bad_samples import BadSamples
from ..loader.batch_maker import Collator
from ..loader.delivery import joined_state
from ..loader.loader import PackedLoader, by_step
from ..loader.workers import is_of_worker_code
from ..mds.core import core_of, gives_packs, opens_loader, processor_of
from ..processors.base import Processor
from ..processors.not_shown import counts_text
from ..registry import imported
from ..types import Batch, World
from .report.left_out import LEFT_OUT_FOLDER, RunLeftOut, tell_beyond_positions, tell_overlong
from .run.distributed import address_for_others, gather_objects
from .run.settings import Datasets, Packed, TrainConfig

EVAL_NAME = "eval_dataset"  # name of the source in errors
logger = logging.getLogger("lmms_stream")


def named_evaluations(dataset: Datasets | None) -> dict[str, Any]:
    """Return the datasets to evaluate by name; a single dataset has an empty name."""
    if dataset is None:
        return {}
    return dict(dataset) if isinstance(dataset, Mapping) else {"": dataset}


def eval_source(name: str) -> str:
    """Return the source name of a dataset to evaluate."""
    return f"{EVAL_NAME} {name}" if name else EVAL_NAME


def _bad_samples(config: TrainConfig) -> BadSamples:
    folder = str(Path(config.output_dir) / LEFT_OUT_FOLDER)
    bad = config.bad_samples
    return BadSamples(
        on_bad_sample="quarantine" if bad.quarantine else "error", sample_timeout_s=bad.timeout_s, folder=folder
    )


def check_evaluated(loader: PackedLoader) -> None:
    """Raise ConfigError for a loader with endless packs."""
    if loader.packs_left is None:
        raise ConfigError(
            f"the {loader.sources[0]} is packed in lanes, without an end: write its lengths index with lmms-stream "
            "index, and set its packing_mode to auto"
        )


class RunData:
    """Loaders of a run's datasets. Errors of all datasets are raised at creation, not at first use.

    open_rows: makes packs of a dataset of rows passed later, to evaluate.
    """

    def __init__(
        self,
        config: TrainConfig,
        train_dataset: Datasets | None,
        eval_dataset: Datasets | None,
        *,
        collator: Collator,
        world: World,
        open_rows: Callable[[Any], Any],
    ):
        self.config, self._collator, self._world = config, collator, world
        self._open_rows = open_rows
        if train_dataset is None:
            raise ConfigError("train_dataset is missing: give a dataset, or several by name")
        self.train_dataset = train_dataset
        self.evaluations = named_evaluations(eval_dataset)
        _share_shards([*named_evaluations(train_dataset).values(), *self.evaluations.values()], world)
        self.loader = self.train_loader(num_workers=config.num_workers)
        self.left_out = RunLeftOut(config, self.loader, world=world)
        self._tell_overlong(self.loader)
        for name, dataset in self.evaluations.items():
            loader = self.eval_loader(name, dataset)
            check_evaluated(loader)
            self._tell_overlong(loader)
        self._check_strategies()

    @property
    def processors(self) -> list[Processor | None]:
        """Processors of all datasets, with evaluation datasets last."""
        trained_on = named_evaluations(self.train_dataset).values()
        return [processor_of(each) for each in (*trained_on, *self.evaluations.values())]

    @property
    def has_epochs(self) -> bool:
        """Whether the data has finite epochs: not with weights, and not in lanes."""
        is_weighted = self.config.weights is not None and self.config.mixing == "packs"
        return not is_weighted and not self.loader.state_is_per_rank

    @property
    def epoch(self) -> float:
        """Number of delivered epochs, with the share of the last, of the source with the fewest; 0 in lanes."""
        return min(self.loader.epochs.values(), default=0.0)

    def train_loader(self, *, num_workers: int) -> PackedLoader:
        """Return a loader of the batches to train on, from the beginning."""
        config = self.config
        options: dict[str, Any] = {}
        if config.bad_samples.leaves_out or config.bad_samples.timeout_s is not None:
            if opens_loader(self.train_dataset):
                raise ConfigError(
                    "train.bad_samples is for datasets of shards: leave quarantine, timeout_s and drop out, or convert "
                    "the sources"
                )
            options = {"bad": _bad_samples(config), "drop": config.bad_samples.drop}
        return self._loader(
            self.train_dataset,
            weights=config.weights,
            max_epochs=config.max_epochs,
            balance=config.balance,
            mixing=config.mixing,
            num_workers=num_workers,
            **options,
        )

    def to_evaluate(self, given: Any) -> dict[str, Any]:
        """Return datasets of packs by name: given datasets, a named evaluation dataset of the run, or all of them.

        All ranks call this; rows become tokens like rows of the run's eval_dataset.
        """
        if given is None:
            return self.evaluations
        if isinstance(given, str):
            if given not in self.evaluations:
                names = ", ".join(self.evaluations) or "none"
                raise ConfigError(f"there is no eval_dataset {given!r}: name one of {names}")
            return {"": self.evaluations[given]}
        return {
            name: each if gives_packs(each) else self._open_rows(each)
            for name, each in named_evaluations(given).items()
        }

    def one_to_evaluate(self, given: Any) -> tuple[str, Any]:
        """Return name and dataset of the only result of to_evaluate; ConfigError unless there is exactly one."""
        named = self.to_evaluate(given)
        if len(named) != 1:
            raise ConfigError(f"there are {len(named)} datasets to evaluate: name one of {', '.join(named) or 'none'}")
        return next(iter(named.items()))

    def eval_loader(self, name: str, dataset: Packed) -> PackedLoader:
        """Return a loader of the batches of a dataset to evaluate, from the beginning."""
        return self._loader(
            {eval_source(name): dataset}, global_batch=self._world.num_groups, num_workers=self.config.num_workers
        )

    def steps_of(self, batches: Iterator[Batch]) -> Iterator[list[Batch]]:
        """Return the batches of the loader by step."""
        return by_step(batches, self.loader.micro_batches)

    def cursor(self) -> dict[str, Any]:
        """Return the position of training, for any number of ranks; all ranks call this."""
        return joined_state(self.loader, partial(gather_objects, world_size=self._world.world_size))

    @contextmanager
    def worker_errors(self) -> Iterator[None]:
        """Name the dead loader worker in an error of torch, raised by a signal handler at any line inside."""
        try:
            yield
        except LmmsStreamError:
            raise
        except RuntimeError as error:
            if "DataLoader worker" not in str(error) or is_of_worker_code(error):
                raise
            raise self.loader.worker_error(error) from error

    def _check_strategies(self) -> None:
        config = self.config
        for name in ("save_steps", "eval_steps", "logging_steps"):
            if getattr(config, name) == "epoch" and not self.has_epochs:
                raise ConfigError(
                    f"train.{name} is epoch, and packs of lanes, or of train.weights, have no epochs that end: set it "
                    "to a number of steps"
                )
        asked = [f"best.{name}" for name in ("load", "metric") if getattr(config.best, name)]
        asked += ["save_steps best"] * (config.save_steps == "best")
        if asked and not self.evaluations:
            raise ConfigError(f"train.{asked[0]} needs evaluations: give an eval_dataset, or leave it out")

    def _loader(self, dataset: Datasets, **options: Any) -> PackedLoader:
        config = self.config
        settings: dict[str, Any] = {
            "global_batch": config.global_batch,
            **options,
            "world": self._world,
            "pad_to": config.pad_to,
            "timeout_s": config.timeout_s,
            "start_method": "server",
            "collator": self._collator,
        }
        if opens_loader(dataset):
            if settings.pop("mixing", "packs") != "packs":
                raise ConfigError("mixing: samples is for datasets of shards: convert the sources, or leave it out")
            loader: PackedLoader = dataset.open_loader(**settings)
        else:
            loader = PackedLoader(dataset, **settings)  # type: ignore[arg-type]  # mappings open no loader
        loader.agreement.gather(
            loader.deal_settings, self._world, partial(gather_objects, world_size=loader.world.world_size)
        )
        return loader

    def usual_lengths(self) -> list[int]:
        """Return the tokens of the samples of the run's first pack; [] in lanes, whose packs are unknown."""
        if self.loader.state_is_per_rank:
            return []
        mixture = self.loader.mixture
        lengths: list[int] = mixture.packs(mixture.step(mixture.start(), global_batch=1).ranges).lengths.tolist()
        return lengths

    def tell_positions(self, positions: int | None) -> None:
        """Warn once of samples longer than the model's number of positions; None for a model without a limit."""
        if self._world.rank == 0 and not self.loader.state_is_per_rank:
            tell_beyond_positions(self.loader.mixture.plans, positions)

    def _tell_overlong(self, loader: PackedLoader) -> None:
        """Warn once of samples longer than a pack, and of dropped content. (In lanes both are unknown in advance.)"""
        if self._world.rank == 0 and not loader.state_is_per_rank:
            tell_overlong(loader.mixture.plans)
            tell_not_shown(loader.mixture.plans)


def tell_not_shown(plans: Mapping[str, Any]) -> None:
    """Warn of each source's content that the chat template leaves out, by the counts stored beside the lengths.

    plans: source -> PackPlan.
    """
    for name, plan in plans.items():
        if counts := getattr(plan.index, "not_shown", None):
            logger.warning("%s: %s (lmms-stream audit shows samples)", name, counts_text(counts))


def _share_shards(datasets: Iterable[Any], world: World) -> None:
    """Let nodes take shards from each other for datasets with `fetch: {peers: true}`; all ranks call this function.

    The first rank of each node starts the node's server. The server ends with the datasets, or with the rank.
    """
    cores = [core_of(each) for each in datasets if not opens_loader(each)]
    sharing = [core for core in cores if core.fetch.peers]
    if not sharing or world.num_nodes == 1:
        return
    gather = partial(gather_objects, world_size=dist.get_world_size())
    meet_peers = imported("plugins.peers.nodes:meet_peers")
    meet_peers(sharing, host=address_for_others(os.environ), gather=gather, world=world)
    if world.rank == 0:
        logger.info("%d nodes take shards from each other", world.num_nodes)
