"""The commands for datasets that are there: `lmms-stream verify | inspect | merge`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..processors.base import Processor

EXAMPLES = {
    "verify": "lmms-stream verify s3://bucket/chats --deep --tokenizer path/to/tokenizer",
    "inspect": "lmms-stream inspect s3://bucket/chats -i -1 --tokenizer path/to/tokenizer --html chats.html",
    "merge": "lmms-stream merge s3://bucket/all s3://bucket/all/chats s3://bucket/all/code",
}


class AddCommand(Protocol):
    """Makes the parser of one command, with its example."""

    def __call__(
        self, commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str
    ) -> argparse.ArgumentParser: ...


def add_commands(commands: Any, *, add: AddCommand) -> None:
    _add_verify(commands, add)
    _add_inspect(commands, add)
    _add_merge(commands, add)


def _add_verify(commands: Any, add: AddCommand) -> None:
    parser = add(
        commands,
        "verify",
        _verify,
        "Check a dataset's files, and list all that is wrong; exit status 1 if anything is.",
    )
    parser.add_argument("remote", help="the dataset's folder or URL")
    parser.add_argument("--deep", action="store_true", help="also decode every sample and measure it again")
    parser.add_argument("--tokenizer", help="with --deep: folder or hub id of what measured the lengths index")
    parser.add_argument("--workers", type=int, metavar="N", help="shards checked at once; default: 8, deep: the cores")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of text")


def _add_inspect(commands: Any, add: AddCommand) -> None:
    parser = add(commands, "inspect", _inspect, "Show what a dataset holds: columns, sizes, lengths, samples.")
    parser.add_argument("remote", help="the dataset's folder or URL")
    parser.add_argument("-i", "--sample", type=int, default=0, metavar="N", help="show this one; -1 is the last")
    parser.add_argument("--samples", type=int, default=1, metavar="K", help="show K samples from N on; default 1")
    parser.add_argument("--tokenizer", help="folder or hub id: show the text that is trained on, and count tokens")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write all of it as one page")
    parser.add_argument("--save-media", type=Path, metavar="FOLDER", help="write the shown samples' media as files")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of text")


def _add_merge(commands: Any, add: AddCommand) -> None:
    parser = add(commands, "merge", _merge, "Make one dataset of those in folders below it, without copying shards.")
    parser.add_argument("target", help="the folder or URL above all sources, which gets the common index")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="folders or URLs of datasets below it, in order")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier merge (never a shard)")


def stored_processor(remote: str, tokenizer: str | None) -> Processor | None:
    """What reads a dataset's samples with a tokenizer; None without one."""
    from ..converters.stored import catalog

    return None if tokenizer is None else catalog.stored_processor(remote, tokenizer)


def _verify(options: argparse.Namespace) -> int:
    from ..converters.stored.verify import verify_dataset
    from .console import bar
    from .console_datasets import print_verification

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # samples are measured one by one
    with bar("verifying", unit="shards", shown=not options.json) as progress:
        report = verify_dataset(
            options.remote,
            deep=options.deep,
            processor=stored_processor(options.remote, options.tokenizer),
            num_workers=options.workers,
            on_start=progress.begin,
            on_shard=progress.advance,
        )
    print_verification(options.remote, report, as_json=options.json)
    return 1 if report.problems else 0


def _inspect(options: argparse.Namespace) -> int:
    from ..converters.stored.inspect.page import write_page
    from ..converters.stored.inspect.summary import inspect_dataset, save_media
    from .console import bar
    from .console_datasets import print_inspection

    with bar("reading", unit="shards", shown=not options.json) as progress:
        inspection = inspect_dataset(
            options.remote,
            first=options.sample,
            num_samples=options.samples,
            tokenizer=options.tokenizer,
            on_start=progress.begin,
            on_shard=progress.advance,
        )
    saved = save_media(inspection, options.save_media) if options.save_media else []
    print_inspection(inspection, saved, as_json=options.json)
    if options.html:
        write_page(inspection, options.html)
    return 0


def _merge(options: argparse.Namespace) -> int:
    from ..converters.stored.merge import merge_datasets
    from .console import bar, print_record
    from .console_datasets import print_notes

    with bar("reading", unit="sources") as progress:
        report = merge_datasets(
            options.target,
            options.sources,
            overwrite=options.overwrite,
            on_start=progress.begin,
            on_source=progress.advance,
        )
    print_record(options.target, report)
    print_notes(report.dropped)
    return 0
