"""`lmms-stream demo`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ...cli.command import add_command, local_file

if TYPE_CHECKING:
    from ...cli.command import Commands

EXAMPLE = "lmms-stream demo --output demo-output"


def add_commands(commands: Commands) -> None:
    summary = "Convert, stream from S3, train, kill and resume on this machine, and compare the runs step by step."
    parser = add_command(commands, "demo", _demo, summary, example=EXAMPLE, page="start.md")
    parser.add_argument(
        "--kind",
        choices=("text", "vision"),
        default="text",
        help="run it with a model of text, or with one that reads charts, pictures and videos; default: %(default)s",
    )
    parser.add_argument(
        "--output",
        type=local_file,
        default=Path("demo-output"),
        metavar="FOLDER",
        help="write all files here; default: %(default)s",
    )


def _demo(options: argparse.Namespace) -> int:
    from ...cli.console import console
    from .run import run_demo

    is_equal = run_demo(options.output, kind=options.kind)
    if options.kind == "text":
        console.print("with images and videos: lmms-stream demo --kind vision")
    return 0 if is_equal else 1
