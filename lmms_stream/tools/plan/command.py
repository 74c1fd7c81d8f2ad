"""`lmms-stream plan`."""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ...cli.command import add_command, add_processor_options, at_least, given_options, local_file, stored_processor
from ...errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...cli.command import Commands
    from ...mds.core import PackedDataset
    from ...plan.mixture import Mixture
    from ...processors.base import Processor
    from ...types import World
    from ..ledger.opening import PlannedRun

DEFAULT_GLOBAL_BATCH = 64
EXAMPLES = (
    "lmms-stream plan s3://bucket/chats --packing-length 4096 --world-size 8 --compare --plot plan.png",
    "lmms-stream plan run.yaml train.max_steps=400 --world-size 16 --num-nodes 2",
    "lmms-stream plan run.yaml --from runs/chats --weights chats=3,code=1 --max-epochs code=2",
)
OF_CHANGES = ("max_epochs", "steps")
IN_RUN_FILES = (  # options that the YAML file of a run has settings for
    "packing_length", "strategy", "overlong", "max_samples_per_pack", "canonical_nodes", "seed", "weights",
    "tokenizer", "processor", "setting",
)  # fmt: skip
# What --from takes from the YAML file, or does not report.
OF_DATASETS = ("compare", "plot", "epochs", *(name for name in IN_RUN_FILES if name != "weights"))


def add_commands(commands: Commands) -> None:
    summary = "Say what packs and steps amount to: efficiency, overlong samples, reach, balance, text and media."
    parser = add_command(commands, "plan", _plan, summary, example=EXAMPLES, page="packing.md")
    add = parser.add_argument
    add(
        "remotes",
        nargs="+",
        metavar="DATASET",
        help="read the lengths of these datasets, in folders or at URLs; or the YAML file of a run, which --from "
        "needs; words after the file change its settings, as train.max_steps=100",
    )
    add(
        "--packing-length",
        type=at_least(1),
        metavar="TOKENS",
        help="fill packs up to so many tokens; needed for datasets",
    )
    add(
        "--tokenizer",
        metavar="PATH",
        help="take the lengths that this folder or hub id measured; default: those written last",
    )
    add_processor_options(parser)
    add(
        "--strategy",
        metavar="NAME",
        help="pack by best_fit, even_fit, first_fit, next_fit or window_N; default: best_fit",
    )
    add(
        "--overlong",
        choices=("error", "drop", "truncate", "split", "keep"),
        help="do this with samples that are longer than a pack; default: error",
    )
    add("--max-samples-per-pack", type=at_least(1), metavar="N", help="put at most N samples into a pack")
    add(
        "--global-batch",
        type=at_least(1),
        metavar="PACKS",
        help=f"read so many packs a step; default: {DEFAULT_GLOBAL_BATCH}, or that of the run",
    )
    add(
        "--world-size",
        type=at_least(1),
        default=1,
        metavar="RANKS",
        help="share a step among so many ranks; default: %(default)s",
    )
    add(
        "--num-nodes",
        type=at_least(1),
        default=1,
        metavar="N",
        help="spread the ranks over N nodes; default: %(default)s",
    )
    add(
        "--canonical-nodes",
        type=at_least(1),
        metavar="C",
        help="cut the order into C canonical nodes; default: by its size",
    )
    add(
        "--weights",
        nargs="+",
        type=_weight,
        metavar="W",
        help="mix by these shares of the tokens, one for each DATASET; with --from NAME=W,…",
    )
    add("--epochs", type=at_least(1), metavar="N", help="report N epochs; default: 1")
    add("--seed", type=at_least(0), metavar="SEED", help="shuffle by this seed; default: 0")
    add("--compare", action="store_true", help="compare all packing strategies, and ranks with balance: window")
    add("--plot", type=local_file, metavar="FILE", help="draw lengths and fill as .png, .svg or .pdf")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    _add_change(parser)


def _add_change(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("a run that goes on with other settings").add_argument
    add(
        "--from",
        dest="checkpoint",
        metavar="RUN",
        help="say what the YAML file, changed by --weights, --max-epochs and --global-batch, reads, repeats and leaves "
        "unread from this checkpoint on, or from the latest of this output_dir",
    )
    add("--max-epochs", nargs="+", metavar="NAME=N,…", help="end sources after so many epochs, with --from")
    add(
        "--steps",
        type=at_least(1),
        metavar="N",
        help="report N steps from the checkpoint on; default: to the run's end",
    )


def _weight(text: str) -> str:
    """A share, or NAME=SHARE and more with commas; ValueError for what is neither."""
    for each in text.split(","):
        float(each.rpartition("=")[2])
    return text


def _plan(options: argparse.Namespace) -> int:
    options.run, options.overrides = run_and_settings(options.remotes)
    _check_options(options)
    if options.checkpoint is not None:
        from .console import plan_change

        return plan_change(options)
    return _plan_datasets(options)


def _check_options(options: argparse.Namespace) -> None:
    """ConfigError for options that do not go together."""
    for option in given_options(options, OF_CHANGES if options.checkpoint is None else OF_DATASETS):
        how = "needs" if options.checkpoint is None else "is not taken together with"
        raise ConfigError(f"{option} {how} --from, the checkpoint of a run: see lmms-stream plan --help")
    if options.checkpoint is not None:
        if options.run is None:
            raise ConfigError(f"with --from name the YAML file of one run, got {' '.join(options.remotes)}")
    elif options.run is not None:
        refuse_given(options, IN_RUN_FILES, options.run)
    elif options.packing_length is None:
        raise ConfigError("--packing-length is missing: say how many tokens a pack holds, or name a run's YAML file")


def refuse_given(options: argparse.Namespace, names: Sequence[str], run: Path) -> None:
    """Raise ConfigError for a given option that the YAML file of a run sets."""
    if given := given_options(options, names):
        raise ConfigError(
            f"{run} already sets this: leave {given[0]} out, or change the setting by SETTING=VALUE after the file"
        )


def _plan_datasets(options: argparse.Namespace) -> int:
    from ...cli.console import print_next
    from ...mds.mixed import streams_of
    from ..ledger.opening import model_positions
    from .console import print_plan
    from .report import (
        COMPARED_STRATEGIES,
        by_length,
        compare_balances,
        plot_plans,
        report_epoch,
        report_kinds,
        report_run,
        report_steps,
        report_streams,
        report_trained,
        with_strategy,
    )

    run = _open_run(options)
    datasets: Mapping[str, PackedDataset]
    if run is None:
        datasets, global_batch = _open_datasets(options), options.global_batch or DEFAULT_GLOBAL_BATCH
        mixture = _mixture(options, datasets)
        world = _world(options)
        steps = report_steps(mixture, global_batch=global_batch, world=world)
    else:
        datasets, mixture, world, global_batch = run.datasets, run.mixture, run.world, run.train.global_batch
        steps = report_run(report_steps(mixture, global_batch=global_batch, world=world), mixture, run.train)
    if options.compare:
        steps = compare_balances(steps, mixture, global_batch=global_batch, world=world)
    plans = mixture.plans
    num_epochs = options.epochs or 1
    positions = None if options.run is None else model_positions(options.run, options.overrides)
    epochs = [
        report_epoch(each, source=label, epoch=epoch, positions=positions)
        for name, plan in plans.items()
        for label, each in by_length(name, plan).items()
        for epoch in range(num_epochs)
    ]
    compared = {}
    if options.compare:
        compared = {
            f"{name} {strategy}" if len(plans) > 1 else strategy: with_strategy(plan, strategy)
            for name, plan in plans.items()
            for strategy in COMPARED_STRATEGIES
        }
    comparison = [report_epoch(plan, source=name, epoch=0) for name, plan in compared.items()]
    kinds = [report for name, plan in plans.items() if (report := report_kinds(plan, source=name)) is not None]
    streams = [report for name, plan in plans.items() for report in report_streams(plan, source=name)]
    alone = {
        name if each is one else stream: each
        for name, one in datasets.items()
        for stream, each in streams_of(one).items()
    }
    num_sources = len(alone)
    trained = [
        report_trained(each, _reading(each), source=name, num_sources=num_sources) for name, each in alone.items()
    ]
    is_weighted = mixture.schedule is not None
    print_plan(epochs, steps, comparison, kinds, trained, streams, is_weighted=is_weighted, as_json=options.json)
    if options.plot:
        plot_plans(compared or plans, options.plot)
    if not options.json:
        print_next(_next_step(options))
    return 0


def _open_run(options: argparse.Namespace) -> PlannedRun | None:
    """Open the run of a YAML file; None for datasets."""
    if options.run is None:
        return None
    from ..ledger.opening import open_run
    from .console import settings_of

    return open_run(options.run, world=_world(options), overrides=settings_of(options), is_stored=True)


def _world(options: argparse.Namespace) -> World:
    from ...types import World

    return World(world_size=options.world_size, num_nodes=options.num_nodes)


def _mixture(options: argparse.Namespace, datasets: Mapping[str, PackedDataset]) -> Mixture:
    from ...mds.mixed import plans_of
    from ...plan.mixture import Mixture

    plans = plans_of(datasets)
    if options.weights and len(options.weights) != len(plans):
        raise ConfigError(f"{len(options.weights)} weights for {len(plans)} datasets: give one for each")
    weights = dict(zip(plans, map(_share, options.weights), strict=True)) if options.weights else None
    return Mixture(plans, weights=weights)


def run_and_settings(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """YAML file of a run, None for datasets, and the settings after the file; ConfigError for misplaced words."""
    from ..ledger.opening import CONFIG_SUFFIXES

    first, *settings = words
    if first.endswith(CONFIG_SUFFIXES):
        for each in settings:
            if "=" not in each:
                raise ConfigError(
                    f"{first} is the file of a run, which already names its datasets: leave {each} out; only settings "
                    "(SETTING=VALUE) follow the file"
                )
        return Path(first), settings
    for each in words:
        if "=" in each and "://" not in each and not Path(each).exists():
            raise ConfigError(
                f"{each}: there is no such dataset, and a setting (SETTING=VALUE) can only follow the YAML file of a "
                "run: check the path, or name the YAML file first"
            )
        if each.endswith(CONFIG_SUFFIXES):
            raise ConfigError(
                f"{each} is the file of a run, which already names its datasets: leave the other datasets out"
            )
    return None, []


def _next_step(options: argparse.Namespace) -> str:
    """Next command, for training on the planned packs."""
    if options.run is not None:
        from .console import settings_of

        return " ".join(map(quote, ["lmms-stream", "train", str(options.run), *settings_of(options)]))
    settings = {
        "packing_length": options.packing_length,
        "overlong": options.overlong or "error",
        "packing_strategy": options.strategy,
        "max_samples_per_pack": options.max_samples_per_pack,
        "seed": options.seed,
        "num_canonical_nodes": options.canonical_nodes,
    }
    packed = ", ".join(f"{name}: {value}" for name, value in settings.items() if value is not None)
    sections = [f"{{remote: {remote}, {packed}, processor: …}}" for remote in options.remotes]
    section = f"dataset: {sections[0]}" if len(sections) == 1 else f"datasets: {{NAME: {sections[0]}, …}}"
    return f"lmms-stream train run.yaml (docs/start.md), where run.yaml has {section}"


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--weights {text}: names are taken with --from; give a number for each dataset") from None


def _open_datasets(options: argparse.Namespace) -> dict[str, PackedDataset]:
    """The dataset of each remote, by the last name in its path, with a number where that stands twice."""
    from ...mds.core import PackedDataset
    from ...mds.streams import StreamConfig
    from ...plan.order import OrderConfig
    from ...plan.packing import PackingConfig

    packing = PackingConfig(
        packing_length=options.packing_length,
        strategy=options.strategy or "best_fit",
        overlong=options.overlong or "error",
        max_samples_per_pack=options.max_samples_per_pack,
    )
    order = OrderConfig(seed=options.seed or 0, num_canonical_nodes=options.canonical_nodes)
    datasets: dict[str, PackedDataset] = {}
    for remote in options.remotes:
        processor = stored_processor(remote, options)
        dataset = PackedDataset([StreamConfig(remote=remote)], processor=processor, packing=packing, order=order)
        name = remote.rstrip("/").rsplit("/", 1)[-1]
        datasets[f"{name} ({len(datasets) + 1})" if name in datasets else name] = dataset
    return datasets


def _reading(dataset: PackedDataset) -> Processor | None:
    """Return the processor of a dataset's samples; without a processor, the processor of stored tokens."""
    from ...converters.stored.catalog import schema_of
    from ...processors.text import TokensProcessor

    if dataset.processor is None and schema_of(list(dataset.one.shards[:1])) == TokensProcessor.schema:
        return TokensProcessor()
    return dataset.processor
