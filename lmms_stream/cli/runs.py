"""The commands for training runs: `lmms-stream train | plot | export`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from .command import add_command, at_least, local_file

if TYPE_CHECKING:
    from .command import Commands

TRAIN = "lmms-stream train run.yaml train.max_steps=100 --nproc 2"
PLOT = "lmms-stream plot runs/a runs/b --output runs.png --metrics loss,grad_norm --x tokens --smooth 20"
EXPORT = "lmms-stream export runs/chat/checkpoints/step-00001000 chat-model --dtype bfloat16"


def add_commands(commands: Commands) -> None:
    _add_train(commands)
    _add_plot(commands)
    _add_export(commands)


def _add_train(commands: Commands) -> None:
    parser = add_command(
        commands,
        "train",
        _train,
        "Train with FSDP2 on this machine; the same command goes on where a run was ended.",
        example=TRAIN,
        page="training.md",
    )
    parser.add_argument(
        "config", type=local_file, metavar="RUN.yaml", help="run what this YAML file says: dataset, model, train"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="SETTING=VALUE", help="change a setting of the file, as train.max_steps=100"
    )
    parser.add_argument(
        "--nproc",
        type=at_least(1),
        metavar="N",
        help="start N processes, a GPU each; default: 1, or the rank as which torchrun starts the command",
    )


def _add_plot(commands: Commands) -> None:
    summary = "Draw what training runs logged: loss, rates and shares, side by side."
    parser = add_command(commands, "plot", _plot, summary, example=PLOT, page="run_log.md")
    parser.add_argument(
        "runs", nargs="+", type=local_file, metavar="RUN", help="draw these runs: an output_dir, or its log"
    )
    parser.add_argument(
        "--output", type=local_file, required=True, metavar="FILE", help="write this .png, .svg or .pdf"
    )
    parser.add_argument(
        "--metrics",
        type=lambda names: names.split(","),
        metavar="NAME,...",
        help="draw these figures of the log; default: loss, learning rate, gradient norm, tokens/s, packing "
        "efficiency, waiting",
    )
    parser.add_argument(
        "--x",
        choices=("step", "tokens", "samples", "epoch", "hours"),
        default="step",
        help="draw them over this; default: %(default)s",
    )
    parser.add_argument(
        "--smooth", type=at_least(1), default=1, metavar="N", help="draw means of N records; default: %(default)s"
    )


def _add_export(commands: Commands) -> None:
    summary = "Make a checkpoint a transformers folder: weights, config, tokenizer, processor."
    parser = add_command(commands, "export", _export, summary, example=EXPORT, page="checkpoints.md")
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="take this step-NNNNNNNN of a run, in a folder or an object store"
    )
    parser.add_argument(
        "out", type=local_file, metavar="FOLDER", help="write this folder, which is new, empty, or an earlier export"
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="write the whole model, the weights of an adapter added to those of its base",
    )
    parser.add_argument("--ema", action="store_true", help="write the average of the weights that ema_decay keeps")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python files of a model that has its own; they are in the checkpoint",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="store the weights so; default: as trained",
    )


def _train(options: argparse.Namespace) -> int:
    from ..train.torchrun import start

    start(options.config, options.overrides, nproc=options.nproc, environment=os.environ)


def _plot(options: argparse.Namespace) -> int:
    from .plots import draw_runs, save_figure

    figure = draw_runs(options.runs, metrics=options.metrics, x=options.x, smooth=options.smooth)
    save_figure(figure, options.output)
    sys.stdout.write(f"{', '.join(map(str, options.runs))} -> {options.output}\n")
    return 0


def _export(options: argparse.Namespace) -> int:
    from ..train.checkpoint.export import export_checkpoint

    out = export_checkpoint(
        options.checkpoint,
        options.out,
        dtype=options.dtype,
        merge=options.merge,
        average=options.ema,
        trust_remote_code=options.trust_remote_code,
    )
    sys.stdout.write(f"{options.checkpoint} -> {out}\n")
    return 0
