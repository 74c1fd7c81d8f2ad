"""`lmms-stream inspect`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ...cli.command import add_command, add_processor_options, at_least, given_options, local_file, stored_processor
from ...errors import ConfigError

if TYPE_CHECKING:
    from ...cli.command import Commands

EXAMPLE = "lmms-stream inspect s3://bucket/chats -i -1 --tokenizer path/to/tokenizer --html chats.html"


def add_commands(commands: Commands) -> None:
    summary = "Show what a dataset holds: columns, sizes, lengths, samples."
    parser = add_command(commands, "inspect", _inspect, summary, example=EXAMPLE, page="start.md")
    parser.add_argument("remote", metavar="DATASET", help="show the dataset in this folder or URL")
    parser.add_argument("-i", "--sample", type=int, metavar="N", help="show sample N, -1 for the last; default: 0")
    parser.add_argument("--samples", type=at_least(1), metavar="K", help="show K samples from N on; default: 1")
    parser.add_argument(
        "--source", metavar="FILE:ROW", help="show what was made of this row of this source, counted from 1"
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="show the text that is trained on, and count tokens: folder or hub id"
    )
    add_processor_options(parser)
    parser.add_argument("--html", type=local_file, metavar="FILE", help="write all of it as one page, too")
    parser.add_argument(
        "--save-media", type=local_file, metavar="FOLDER", help="write the shown samples' media as files"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def _inspect(options: argparse.Namespace) -> int:
    from ...cli.console import bar
    from .page import print_inspection, write_page
    from .summary import inspect_dataset, save_media

    if options.source is not None and (given := given_options(options, ("sample", "samples"))):
        raise ConfigError(f"--source selects the shown samples: leave {given[0]} out")
    with bar("reading", unit="shards", shown=not options.json) as progress:
        inspection = inspect_dataset(
            options.remote,
            first=options.sample or 0,
            num_samples=options.samples or 1,
            source=options.source,
            tokenizer=options.tokenizer,
            processor=stored_processor(options.remote, options) if options.processor or options.setting else None,
            on_start=progress.begin,
            on_shard=progress.advance,
        )
    saved = save_media(inspection, options.save_media) if options.save_media else []
    print_inspection(inspection, saved, as_json=options.json)
    if options.html:
        write_page(inspection, options.html)
    return 0
