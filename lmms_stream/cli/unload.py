"""`lmms-stream unload`: datasets as files of rows."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .command import add_command

if TYPE_CHECKING:
    from .command import Commands

UNLOAD = "lmms-stream unload s3://bucket/chats chats-as-rows --format parquet"
FORMATS = ("parquet", "jsonl", "webdataset")


def _add_unload(commands: Commands) -> None:
    summary = "Write a dataset's samples as Parquet, JSON lines or WebDataset, which convert reads back."
    parser = add_command(commands, "unload", _unload, summary, example=UNLOAD, page="converting.md")
    parser.add_argument("remote", metavar="DATASET", help="read the dataset in this folder or URL")
    parser.add_argument(
        "out", metavar="TARGET", help="write to this folder or URL, which is empty, or holds a part of the same export"
    )
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="write this; default: %(default)s")


def _unload(options: argparse.Namespace) -> int:
    from ..converters.exporting.export import export_dataset
    from .console import bar, print_next, print_record

    with bar("exporting", unit="samples") as progress:
        report = export_dataset(
            options.remote,
            options.out,
            format=options.format,
            on_start=progress.begin,
            on_samples=progress.advance,
        )
    print_record(options.out, report, left_out=["back"], labels={"num_skipped": "files there before"})
    if report.back is not None:
        print_next(report.back)
    return 0
