"""The command line: `lmms-stream convert | index | verify | inspect | merge | plan | train | plot | export | demo`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, LmmsStreamError
from ..version import VERSION
from . import convert as cli_convert
from . import datasets as cli_datasets

if TYPE_CHECKING:
    from ..plan.pack_plan import PackPlan

EXAMPLES = {
    "convert": cli_convert.EXAMPLE,
    "index": "lmms-stream index s3://bucket/chats --tokenizer path/to/tokenizer",
    **cli_datasets.EXAMPLES,
    "plan": "lmms-stream plan s3://bucket/chats --packing-length 4096 --world-size 8 --compare --plot plan.png",
    "train": "lmms-stream train run.yaml train.max_steps=100 --nproc 2",
    "plot": "lmms-stream plot runs/a runs/b --output runs.png --metrics loss,grad_norm --x tokens --smooth 20",
    "export": "lmms-stream export runs/chat/checkpoints/step-00001000 chat-model --dtype bfloat16",
    "demo": "lmms-stream demo --output demo-output",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; errors a user can act on are one line on stderr and exit status 1."""
    parser = build_parser()
    options, others = parser.parse_known_args(arguments)
    if options.command == "train" and not any(other.startswith("-") for other in others):
        options.overrides += others  # argparse leaves those that follow an option
    elif others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except LmmsStreamError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lmms-stream",
        description="Datasets to MDS shards, full packs of samples from object storage, exact resumption.",
        epilog=f"example:\n  {EXAMPLES['demo']}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        _add_convert,
        _add_index,
        partial(cli_datasets.add_commands, add=_add),
        _add_plan,
        _add_train,
        _add_plot,
        _add_export,
        _add_demo,
    ):
        add(commands)
    return parser


Commands = argparse._SubParsersAction  # argparse gives it no public name


def _add(
    commands: Commands[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"example:\n  {EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _add_convert(commands: Commands[argparse.ArgumentParser]) -> None:
    cli_convert.add_arguments(_add(commands, "convert", cli_convert.run, cli_convert.DESCRIPTION))


def _add_index(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "index", _index, "Measure a dataset's samples and write its lengths index.")
    parser.add_argument("remote", help="the dataset's folder or URL")
    parser.add_argument("--tokenizer", help="folder or hub id (not for a tokenized dataset)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that measure; default: one for each core")
    parser.add_argument(
        "--work",
        type=Path,
        metavar="FOLDER",
        help="keep what a run that was ended had measured here (default: in the system's temporary folder)",
    )


def _add_plan(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands, "plan", _plan, "Say what packs and steps amount to: efficiency, overlong samples, reach, balance."
    )
    parser.add_argument("remotes", nargs="+", metavar="REMOTE", help="the datasets' folders or URLs")
    parser.add_argument("--packing-length", type=int, required=True, metavar="TOKENS")
    parser.add_argument("--tokenizer", help="use the lengths it measured (default: the index written last)")
    parser.add_argument("--strategy", default="best_fit", help="best_fit, first_fit, next_fit or window_N")
    parser.add_argument("--overlong", choices=("error", "drop", "truncate", "split"), default="error")
    parser.add_argument("--max-samples-per-pack", type=int, metavar="N")
    parser.add_argument("--global-batch", type=int, default=64, metavar="PACKS", help="packs a step; default 64")
    parser.add_argument("--world-size", type=int, default=1, metavar="RANKS", help="default 1")
    parser.add_argument("--num-nodes", type=int, default=1, help="nodes of world-size / num-nodes ranks; default 1")
    parser.add_argument("--canonical-nodes", type=int, metavar="C", help="default: by the number of samples")
    parser.add_argument("--weights", nargs="+", type=float, metavar="W", help="one per REMOTE: shares of the tokens")
    parser.add_argument("--epochs", type=int, default=1, help="epochs to report; default 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="table all strategies")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw lengths and fill as .png, .svg or .pdf")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of tables")


def _add_train(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "train", _train, "Train with FSDP2 on this machine, in one process or by torchrun.")
    parser.add_argument("config", type=Path, help="read this YAML file, with the sections dataset, model, train")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="change settings of the file")
    parser.add_argument("--nproc", type=int, default=1, help="run so many processes, one for each GPU; default 1")


def _add_plot(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "plot", _plot, "Draw what training runs logged: loss, rates and shares, side by side.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's output_dir, or its log")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="a .png, .svg or .pdf")
    parser.add_argument(
        "--metrics",
        type=lambda names: names.split(","),
        metavar="NAME,...",
        help="figures of the log; default: loss, learning rate, gradient norm, tokens/s, packing efficiency, waiting",
    )
    parser.add_argument("--x", choices=("step", "tokens", "samples", "epoch", "hours"), default="step")
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help="draw means of N records; default 1")


def _add_export(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands, "export", _export, "Make a checkpoint a transformers folder: weights, config, tokenizer, processor."
    )
    parser.add_argument("checkpoint", help="one step-NNNNNNNN of a run, in a folder or an object store")
    parser.add_argument("out", type=Path, help="a folder that is new, empty, or an earlier export")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as it was trained")


def _add_demo(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "demo",
        _demo,
        "Convert, stream from S3, train, kill and resume on this machine, and compare the runs step by step.",
    )
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="default: %(default)s")


def _index(options: argparse.Namespace) -> int:
    from ..converters.stored.index import index_dataset
    from ..processors.text import TokensProcessor
    from .console import bar, console, print_record

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # samples are measured one by one
    processor = cli_datasets.stored_processor(options.remote, options.tokenizer) or TokensProcessor()
    with bar("measuring", unit="samples") as progress:

        def begin(shards: Sequence[int], missing: Sequence[int]) -> None:
            progress.begin(sum(shards), done=sum(shards) - sum(missing))
            if len(missing) < len(shards):
                console.print(f"{len(shards) - len(missing)} of {len(shards)} shards were measured before")

        report = index_dataset(
            options.remote,
            processor,
            num_workers=options.workers,
            work=options.work,
            on_start=begin,
            on_samples=progress.advance,
        )
    print_record(options.remote, report)
    return 0


def _plan(options: argparse.Namespace) -> int:
    from ..plan.mixture import Mixture
    from ..types import World
    from .console import print_plan
    from .plan_report import COMPARED_STRATEGIES, plot_plans, report_epoch, report_steps, with_strategy

    plans = _open_plans(options)
    if options.weights and len(options.weights) != len(plans):
        raise ConfigError(f"{len(options.weights)} weights for {len(plans)} datasets: give one for each")
    weights = dict(zip(plans, options.weights, strict=True)) if options.weights else None
    world = World(world_size=options.world_size, num_nodes=options.num_nodes)
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
    """The plan of each remote, by the last part of its path, with a number where that stands twice."""
    from ..mds.dataset import PackedStreamingDataset
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
        processor = cli_datasets.stored_processor(remote, options.tokenizer)
        dataset = PackedStreamingDataset(remote, processor=processor, packing=packing, order=order)
        name = remote.rstrip("/").rsplit("/", 1)[-1]
        plans[f"{name} ({len(plans) + 1})" if name in plans else name] = dataset.plan
    return plans


def _train(options: argparse.Namespace) -> int:
    from ..train.launch import start

    start(options.config, options.overrides, nproc=options.nproc, environment=os.environ)


def _plot(options: argparse.Namespace) -> int:
    from .figure import save_figure
    from .run_plot import draw_runs

    figure = draw_runs(options.runs, metrics=options.metrics, x=options.x, smooth=options.smooth)
    save_figure(figure, options.output)
    sys.stdout.write(f"{', '.join(map(str, options.runs))} -> {options.output}\n")
    return 0


def _export(options: argparse.Namespace) -> int:
    from ..train.checkpoint.export import export_checkpoint

    out = export_checkpoint(options.checkpoint, options.out, dtype=options.dtype)
    sys.stdout.write(f"{options.checkpoint} -> {out}\n")
    return 0


def _demo(options: argparse.Namespace) -> int:
    from ..demo.run import run_demo

    return 0 if run_demo(options.output) else 1
