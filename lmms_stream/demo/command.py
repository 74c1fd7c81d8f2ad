"""`lmms-stream demo`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..cli.command import add_command

if TYPE_CHECKING:
    from ..cli.command import Commands

EXAMPLE = "lmms-stream demo --output demo-output"


def add_commands(commands: Commands) -> None:
    summary = "Convert, stream from S3, train, kill and resume on this machine, and compare the runs step by step."
    parser = add_command(commands, "demo", _demo, summary, example=EXAMPLE)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        help="write all files here; default: %(default)s",
    )


def _demo(options: argparse.Namespace) -> int:
    from .run import run_demo

    return 0 if run_demo(options.output) else 1
