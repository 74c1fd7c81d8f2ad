"""`lmms-stream convert`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .command import add_command

if TYPE_CHECKING:
    from ..converters.options import ConvertOptions
    from ..processors.base import Processor
    from .command import Commands

EXAMPLE = "lmms-stream convert chats.jsonl 'more/*.parquet' s3://bucket/chats --tokenizer path/to/tokenizer"
DESCRIPTION = "Write datasets of any kind as MDS shards; the same command goes on where a run was ended."


def add_commands(commands: Commands) -> None:
    _add_arguments(add_command(commands, "convert", _run, DESCRIPTION, example=EXAMPLE))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="files, folders, globs, s3://bucket/prefix, hf:DATASET, a YAML list of datasets; path@[0:1000] is a part",
    )
    parser.add_argument("target", metavar="TARGET", help="a folder or a URL such as s3://bucket/prefix")
    parser.add_argument("--overwrite", action="store_true", help="replace the dataset, or half of one, at the target")
    parser.add_argument("--workers", type=int, metavar="N", help="processes; default: one for each core")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="for what a later run goes on with")
    _add_engine(parser.add_argument_group("what does the work"))
    _add_rows(parser.add_argument_group("what the rows are (found out, unless it is said)"))
    _add_media(parser.add_argument_group("media"))
    _add_written(parser.add_argument_group("what is written"))
    _add_tokens(parser.add_argument_group("tokens"))


Group = argparse._ArgumentGroup  # argparse gives it no public name


def _add_engine(group: Group) -> None:
    from ..converters.engines.engine import ENGINES, RAY_TIMEOUT_S

    group.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="processes of this machine, or workers on a Ray cluster, as many as it has CPUs; then all nodes must see "
        "--work, local sources and media, the tokenizer and a local TARGET under the same paths (object stores: each "
        "node needs access)",
    )
    group.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="of a cluster that runs, or auto for this node's; default: RAY_ADDRESS, or a cluster of this machine, "
        "started for the command and removed with its logs",
    )
    group.add_argument(
        "--ray-timeout",
        type=float,
        default=RAY_TIMEOUT_S,
        metavar="SECONDS",
        help="in which the cluster must answer, and a first worker start; default: %(default)g",
    )


def _add_rows(group: Group) -> None:
    group.add_argument("--format", help="of all sources: jsonl, json, csv, parquet, arrow, …")
    group.add_argument("--schema", help="of the rows: messages, sharegpt, alpaca, prompt-response, text, tokens, …")
    group.add_argument("--columns", nargs="+", default=[], metavar="ROLE=COLUMN", help="of other names")
    group.add_argument("--keep", nargs="*", metavar="COLUMN", help="keep these columns, or all, as they are")
    group.add_argument("--system", metavar="TEXT", help="prompt of conversations that have none")
    group.add_argument("--roles", nargs="+", default=[], metavar="NAME=ROLE", help="what the data calls a speaker")
    group.add_argument("--learn", choices=("assistant", "last"), default="assistant", help="all answers, or the last")
    group.add_argument("--on-error", choices=("fail", "skip"), default="fail", help="for rows that do not fit")


def _add_media(group: Group) -> None:
    group.add_argument("--media-root", metavar="FOLDER", help="that paths of media start from (default: the source's)")
    group.add_argument("--max-image-pixels", type=int, metavar="N", help="larger images are made smaller")


def _add_written(group: Group) -> None:
    group.add_argument("--shard-size", default="64mb", metavar="BYTES", help="at most; default: %(default)s")
    group.add_argument("--compression", metavar="KIND", help="zstd, zstd:7, gz, …")
    group.add_argument("--limit", type=int, metavar="N", help="samples at most")
    group.add_argument("--shuffle-seed", type=int, metavar="SEED", help="put all samples in a random order")
    group.add_argument(
        "--split", nargs="+", metavar="NAME=SHARE", help="datasets below the target: --split train=0.99 validation=0.01"
    )
    group.add_argument("--split-seed", type=int, default=0, metavar="SEED")


def _add_tokens(group: Group) -> None:
    group.add_argument("--tokenizer", metavar="PATH", help="folder or hub id: write a lengths index, too")
    group.add_argument("--processor", choices=("chat", "text"), default="chat", help="what it tokenizes; default: chat")
    group.add_argument("--tokenize", action="store_true", help="store tokens and loss spans in place of the samples")
    group.add_argument("--min-tokens", type=int, metavar="N", help="leave out shorter samples, and count them")
    group.add_argument("--max-tokens", type=int, metavar="N", help="leave out longer samples, and count them")


def _run(options: argparse.Namespace) -> int:
    from ..converters.convert import Progress, convert
    from ..processors.parallelism import tokenize_in_one_thread
    from .console import bar, console, print_record, print_records

    tokenize_in_one_thread()
    with bar("converting", unit="bytes") as shown:
        report = convert(
            options.sources,
            options.target,
            num_workers=options.workers,
            overwrite=options.overwrite,
            work=options.work,
            engine=options.engine,
            ray_address=options.ray_address,
            ray_timeout_s=options.ray_timeout,
            progress=Progress(begin=shown.begin, advance=shown.advance, rows=shown.count_rows, say=console.print),
            options=_options(options),
        )
    print_record(options.target, report)
    if report.splits:
        print_records("splits", list(report.splits.items()))
    return 0


def _options(options: argparse.Namespace) -> ConvertOptions:
    from ..converters.options import ConvertOptions
    from ..converters.rows.mapper import SchemaOptions
    from ..storage.sizes import parse_bytes

    keep: bool | tuple[str, ...] = ()
    if options.keep is not None:
        keep = tuple(options.keep) or True
    schema = SchemaOptions(
        schema=options.schema,
        columns=_pairs(options.columns, "--columns"),
        keep=keep,
        system=options.system,
        roles=_pairs(options.roles, "--roles"),
        learn=options.learn,
        media_root=options.media_root,
        max_image_pixels=options.max_image_pixels,
    )
    return ConvertOptions(
        format=options.format,
        schema=schema,
        processor=_processor(options.tokenizer, options.processor),
        tokenize=options.tokenize,
        shard_bytes=parse_bytes(options.shard_size, name="--shard-size"),
        compression=options.compression,
        on_error=options.on_error,
        limit=options.limit,
        shuffle_seed=options.shuffle_seed,
        splits=_shares(options.split),
        split_seed=options.split_seed,
        shortest=options.min_tokens,
        longest=options.max_tokens,
    )


def _processor(tokenizer: str | None, kind: str) -> Processor | None:
    if tokenizer is None:
        return None
    if kind == "text":
        from ..processors.text import TextProcessor

        return TextProcessor.from_pretrained(tokenizer)
    from ..processors.chat import ChatProcessor

    return ChatProcessor.from_pretrained(tokenizer)


def _pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    wrong = [text for text, (name, separator, _) in zip(texts, pairs, strict=True) if not (name and separator)]
    if wrong:
        raise ConfigError(f"{option} {wrong[0]}: expected NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _shares(texts: Sequence[str] | None) -> dict[str, float] | None:
    if texts is None:
        return None
    try:
        shares = {name: float(share) for name, share in _pairs(texts, "--split").items()}
    except ValueError as error:
        raise ConfigError(f"--split {' '.join(texts)}: {error}; expected NAME=SHARE such as train=0.99") from error
    unsafe = [name for name in shares if not name.replace("_", "").replace("-", "").isalnum()]
    if unsafe:
        raise ConfigError(f"--split {unsafe[0]}: names of datasets are letters, digits, - and _")
    return shares
