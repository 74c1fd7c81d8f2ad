"""`lmms-stream plan`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .command import add_command
from .processor import add_options, stored_processor

if TYPE_CHECKING:
    from ..plan.pack_plan import PackPlan
    from .command import Commands

EXAMPLE = "lmms-stream plan s3://bucket/chats --packing-length 4096 --world-size 8 --compare --plot plan.png"


def add_commands(commands: Commands) -> None:
    summary = "Say what packs and steps amount to: efficiency, overlong samples, reach, balance."
    parser = add_command(commands, "plan", _plan, summary, example=EXAMPLE)
    add = parser.add_argument
    add("remotes", nargs="+", metavar="REMOTE", help="read the lengths of these datasets: folders or URLs")
    add("--packing-length", type=int, required=True, metavar="TOKENS", help="fill packs up to so many tokens")
    add("--tokenizer", metavar="PATH", help="take the lengths that it measured (default: those written last)")
    add_options(parser)
    add("--strategy", default="best_fit", help="pack by best_fit (default), first_fit, next_fit or window_N")
    add(
        "--overlong",
        choices=("error", "drop", "truncate", "split"),
        default="error",
        help="do this with samples that are longer than a pack; default: error",
    )
    add("--max-samples-per-pack", type=int, metavar="N", help="put at most N samples into a pack")
    add("--global-batch", type=int, default=64, metavar="PACKS", help="read so many packs a step; default 64")
    add("--world-size", type=int, default=1, metavar="RANKS", help="share a step among so many ranks; default 1")
    add("--num-nodes", type=int, default=1, metavar="N", help="spread the ranks over N nodes; default 1")
    add("--canonical-nodes", type=int, metavar="C", help="cut the order into C canonical nodes (default: by its size)")
    add("--weights", nargs="+", type=float, metavar="W", help="mix by these shares of the tokens, one for each REMOTE")
    add("--epochs", type=int, default=1, metavar="N", help="report N epochs; default 1")
    add("--seed", type=int, default=0, metavar="SEED", help="shuffle by this seed; default 0")
    add("--compare", action="store_true", help="compare all packing strategies")
    add("--plot", type=Path, metavar="FILE", help="draw lengths and fill as .png, .svg or .pdf")
    add("--json", action="store_true", help="print one JSON object instead of tables")


def _plan(options: argparse.Namespace) -> int:
    from ..plan.mixture import Mixture
    from ..types import World
    from .console import print_plan
    from .plan_report import COMPARED_STRATEGIES, plot_plans, report_epoch, report_steps, with_strategy

    if options.epochs < 1:
        raise ConfigError(f"--epochs must be at least 1, got {options.epochs}")
    world = World(world_size=options.world_size, num_nodes=options.num_nodes)
    plans = _open_plans(options)
    if options.weights and len(options.weights) != len(plans):
        raise ConfigError(f"{len(options.weights)} weights for {len(plans)} datasets: give one for each")
    weights = dict(zip(plans, options.weights, strict=True)) if options.weights else None
    steps = report_steps(Mixture(plans, weights=weights), global_batch=options.global_batch, world=world)
    epochs = [
        report_epoch(plan, source=name, epoch=epoch) for name, plan in plans.items() for epoch in range(options.epochs)
    ]
    compared = {}
    if options.compare:
        compared = {
            f"{name} {strategy}" if len(plans) > 1 else strategy: with_strategy(plan, strategy)
            for name, plan in plans.items()
            for strategy in COMPARED_STRATEGIES
        }
    comparison = [report_epoch(plan, source=name, epoch=0) for name, plan in compared.items()]
    print_plan(epochs, steps, comparison, as_json=options.json)
    if options.plot:
        plot_plans(compared or plans, options.plot)
    return 0


def _open_plans(options: argparse.Namespace) -> dict[str, PackPlan]:
    """The plan of each remote, by the last name in its path, with a number where that stands twice."""
    from ..mds.core import PackedDataset
    from ..mds.streams import StreamConfig
    from ..plan.order import OrderConfig
    from ..plan.packing import PackingConfig

    packing = PackingConfig(
        packing_length=options.packing_length,
        strategy=options.strategy,
        overlong=options.overlong,
        max_samples_per_pack=options.max_samples_per_pack,
    )
    order = OrderConfig(seed=options.seed, num_canonical_nodes=options.canonical_nodes)
    plans: dict[str, PackPlan] = {}
    for remote in options.remotes:
        processor = stored_processor(remote, options)
        dataset = PackedDataset([StreamConfig(remote=remote)], processor=processor, packing=packing, order=order)
        name = remote.rstrip("/").rsplit("/", 1)[-1]
        plans[f"{name} ({len(plans) + 1})" if name in plans else name] = dataset.plan
    return plans
