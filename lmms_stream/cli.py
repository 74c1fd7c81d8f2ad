"""The command line: `lmms-stream convert | index | plan | train | demo`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .errors import LmmsStreamError

if TYPE_CHECKING:
    from .processors.base import Processor

EXAMPLES = {
    "convert": "lmms-stream convert chats.jsonl more.parquet s3://bucket/chats --tokenizer path/to/tokenizer",
    "index": "lmms-stream index s3://bucket/chats --tokenizer path/to/tokenizer",
    "plan": "lmms-stream plan s3://bucket/chats --packing-length 4096 --global-batch 64 --plot plan.png",
    "train": "lmms-stream train run.yaml train.max_steps=100 --nproc 2",
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
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_convert, _add_index, _add_plan, _add_train, _add_demo):
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
    parser = _add(commands, "convert", _convert, "Write JSONL and Parquet files as MDS shards.")
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE", help=".jsonl or .parquet files, in order")
    parser.add_argument("target", help="a folder or a URL such as s3://bucket/prefix")
    parser.add_argument("--tokenizer", help="folder or hub id: also write a lengths index measured by it")
    parser.add_argument("--tokenize", action="store_true", help="store tokens and loss spans in place of messages")
    parser.add_argument("--shard-size", type=int, default=1 << 26, metavar="BYTES", help="default: %(default)s")
    parser.add_argument("--on-error", choices=("fail", "skip"), default="fail", help="for rows that fit no schema")
    parser.add_argument("--overwrite", action="store_true", help="replace the dataset at the target")


def _add_index(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "index", _index, "Measure a dataset's samples and write its lengths index.")
    parser.add_argument("remote", help="the dataset's folder or URL")
    parser.add_argument("--tokenizer", help="folder or hub id (not for a tokenized dataset)")


def _add_plan(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "plan", _plan, "Say what an epoch's packs amount to: steps, efficiency, overlong samples.")
    parser.add_argument("remote", help="the dataset's folder or URL")
    parser.add_argument("--packing-length", type=int, required=True, metavar="TOKENS")
    parser.add_argument("--tokenizer", help="use the lengths it measured (default: the index written last)")
    parser.add_argument("--strategy", default="best_fit", help="best_fit, first_fit, next_fit or window_N")
    parser.add_argument("--overlong", choices=("error", "drop", "truncate", "split"), default="error")
    parser.add_argument("--global-batch", type=int, default=1, metavar="PACKS", help="packs a step; default 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw lengths and fill as .png, .svg or .pdf")


def _add_train(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "train", _train, "Train with FSDP2 on this machine, through torchrun.")
    parser.add_argument("config", type=Path, help="YAML with the sections dataset, model, train")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    parser.add_argument("--nproc", type=int, default=1, help="processes (GPUs); default 1")


def _add_demo(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "demo",
        _demo,
        "Convert, stream from S3, train, kill and resume on this machine, and compare the runs step by step.",
    )
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="default: %(default)s")


def _processor(tokenizer: str | None) -> Processor | None:
    if tokenizer is None:
        return None
    from .processors.chat import ChatProcessor

    return ChatProcessor.from_pretrained(tokenizer)


def _convert(options: argparse.Namespace) -> int:
    from .console import counter, print_record
    from .converters.convert import convert

    with counter("converting", unit="rows") as advance:
        report = convert(
            options.sources,
            options.target,
            processor=_processor(options.tokenizer),
            tokenize=options.tokenize,
            shard_bytes=options.shard_size,
            on_error=options.on_error,
            overwrite=options.overwrite,
            on_row=advance,
        )
    print_record(options.target, report)
    return 0


def _index(options: argparse.Namespace) -> int:
    from .console import counter, print_record
    from .converters.index import index_dataset
    from .processors.text import TokensProcessor

    with counter("measuring", unit="samples") as advance:
        report = index_dataset(options.remote, _processor(options.tokenizer) or TokensProcessor(), on_sample=advance)
    print_record(options.remote, report)
    return 0


def _plan(options: argparse.Namespace) -> int:
    from .console import print_record
    from .dataset import PackedStreamingDataset
    from .order import OrderConfig
    from .packing import PackingConfig
    from .report import plot_plan, report_plan

    dataset = PackedStreamingDataset(
        options.remote,
        processor=_processor(options.tokenizer),
        packing=PackingConfig(
            packing_length=options.packing_length, strategy=options.strategy, overlong=options.overlong
        ),
        order=OrderConfig(seed=options.seed),
    )
    print_record(options.remote, report_plan(dataset.plan, epoch=options.epoch, global_batch=options.global_batch))
    if options.plot:
        plot_plan(dataset.plan, options.plot, epoch=options.epoch)
    return 0


def _train(options: argparse.Namespace) -> int:
    from .train import torchrun_command

    command = torchrun_command(options.config, options.overrides, nproc=options.nproc)
    os.execv(command[0], command)


def _demo(options: argparse.Namespace) -> int:
    from .demo.run import run_demo

    return 0 if run_demo(options.output) else 1
