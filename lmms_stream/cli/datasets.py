"""Commands for existing datasets: `lmms-stream index | verify | merge | unload`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING

from .command import add_command, add_on_dropped, add_processor_options, at_least, local_file, stored_processor

if TYPE_CHECKING:
    from .command import Commands

INDEX = "lmms-stream index s3://bucket/chats --tokenizer path/to/tokenizer"
VERIFY = "lmms-stream verify s3://bucket/chats --deep --tokenizer path/to/tokenizer"
MERGE = "lmms-stream merge s3://bucket/all s3://bucket/all/chats s3://bucket/all/code"
UNLOAD = "lmms-stream unload s3://bucket/chats chats-as-rows --format parquet"
FORMATS = ("parquet", "jsonl", "webdataset")  # of unload


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexReport:
    """Measurements of `index`. seconds: duration of this command, without earlier measurements."""

    num_samples: int
    num_tokens: int
    seconds: float
    fingerprint: str
    content_hash: str


def add_commands(commands: Commands) -> None:
    _add_index(commands)
    _add_verify(commands)
    _add_merge(commands)
    _add_unload(commands)


def _add_index(commands: Commands) -> None:
    summary = "Measure a dataset's samples and write its lengths index."
    parser = add_command(commands, "index", _index, summary, example=INDEX, page="streaming.md")
    parser.add_argument("remote", metavar="DATASET", help="measure the dataset in this folder or URL")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="measure with this folder or hub id; a tokenized dataset needs none"
    )
    add_processor_options(parser)
    add_on_dropped(parser)
    parser.add_argument(
        "--workers", type=at_least(1), metavar="N", help="measure in N processes; default: one for each core"
    )
    parser.add_argument(
        "--work",
        type=local_file,
        metavar="FOLDER",
        help="keep in FOLDER what a later run goes on with; default: one in the system's temporary folder",
    )


def _add_verify(commands: Commands) -> None:
    summary = "Check a dataset's files, and list all that is wrong; exit status 1 if anything is."
    parser = add_command(commands, "verify", _verify, summary, example=VERIFY, page="start.md")
    parser.add_argument("remote", metavar="DATASET", help="check the dataset in this folder or URL")
    parser.add_argument("--deep", action="store_true", help="decode, measure and process every sample, too")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="measure with this folder or hub id, by which the lengths index was made (with --deep)",
    )
    add_processor_options(parser)
    parser.add_argument(
        "--workers",
        type=at_least(1),
        metavar="N",
        help="check N shards at once; default: 8, with --deep one for each core",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def _add_merge(commands: Commands) -> None:
    summary = "Make one dataset of several datasets in folders below TARGET, without copying shards."
    parser = add_command(commands, "merge", _merge, summary, example=MERGE, page="growing.md")
    parser.if_missing = "list the datasets in the order of their samples: lmms-stream merge all all/chats all/code"
    parser.add_argument(
        "target", metavar="TARGET", help="write the common index to this folder or URL, which lies above all sources"
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="merge these datasets below TARGET, each listed, in this order; not parts of convert --part: the same "
        "convert command without --part makes their dataset",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier merge (never a shard)")


def _index(options: argparse.Namespace) -> int:
    from ..mds.measuring import index_dataset
    from ..processors.base import cut_media
    from ..processors.not_shown import counts_text
    from ..processors.text import TextProcessor, TokensProcessor
    from ..processors.tokenizers import tokenize_in_one_thread
    from .console import bar, console, print_found, print_next, print_record
    from .console_datasets import plan_command

    started = time.monotonic()
    tokenize_in_one_thread()
    processor = stored_processor(options.remote, options) or TokensProcessor()
    with bar("measuring", unit="samples") as progress:

        def begin(shards: Sequence[int], missing: Sequence[int]) -> None:
            progress.begin(sum(shards), done=sum(shards) - sum(missing))
            if len(missing) < len(shards):
                console.print(f"{len(shards) - len(missing)} of {len(shards)} shards were measured before")

        index = index_dataset(
            options.remote,
            processor,
            num_workers=options.workers,
            work=options.work,
            on_start=begin,
            on_samples=progress.advance,
            on_dropped=options.on_dropped,
        )
    report = IndexReport(
        num_samples=len(index.lengths),
        num_tokens=index.num_tokens,
        seconds=time.monotonic() - started,
        fingerprint=index.fingerprint,
        content_hash=index.content_hash,
    )
    print_record(options.remote, report)
    if index.num_cut:
        print_found(cut_media(index.num_cut))
    if index.not_shown:
        print_found(counts_text(index.not_shown))
    print_next(plan_command(options.remote, of_texts=isinstance(processor, TextProcessor)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from ..converters.stored.verify import verify_dataset
    from ..processors.tokenizers import tokenize_in_one_thread
    from .console import bar
    from .console_datasets import print_verification

    tokenize_in_one_thread()
    with bar("verifying", unit="shards", shown=not options.json) as progress:
        report = verify_dataset(
            options.remote,
            deep=options.deep,
            processor=stored_processor(options.remote, options),
            num_workers=options.workers,
            on_start=progress.begin,
            on_shard=progress.advance,
        )
    print_verification(options.remote, report, as_json=options.json)
    return 1 if report.problems else 0


def _merge(options: argparse.Namespace) -> int:
    from ..converters.stored.merge import merge_datasets
    from .console import bar, print_next, print_record
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
    print_next(f"lmms-stream verify {quote(options.target)}")
    return 0


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
