"""`lmms-stream convert`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, LmmsStreamError
from .command import PROCESSOR_PAIRS, add_command, processor_choice
from .convert_options import add_arguments, kinds_and_roles, one_value_each

if TYPE_CHECKING:
    from ..converters.options import ConvertOptions
    from .command import Commands

EXAMPLES = (
    "lmms-stream convert chats.jsonl chats --tokenizer path/to/tokenizer",
    "lmms-stream convert chats.jsonl 'more/*.parquet' s3://bucket/chats --tokenizer path/to/tokenizer",
    "lmms-stream convert 'hf:path/to/dataset?split=train' chats --columns messages=dialogue --keep id --on-error skip",
    "lmms-stream convert photos.csv photos --kind caption --media-root pictures --max-image-pixels 1000000",
    "lmms-stream convert 'texts/*.parquet' tokens --processor text --tokenizer path/to/tokenizer --concat 4096",
    "lmms-stream convert 'chats/*.jsonl' s3://bucket/chats --tokenizer path/to/tokenizer --part 3/16",
    "lmms-stream convert chats.jsonl chats --split train=0.99 validation=0.01 --shuffle-seed 1 --compression zstd",
)
DESCRIPTION = "Write datasets of any kind as MDS shards; the same command goes on where a run was ended."


def add_commands(commands: Commands) -> None:
    parser = add_command(commands, "convert", _run, DESCRIPTION, example=EXAMPLES, page="converting.md")
    parser.more = kinds_and_roles
    add_arguments(parser)


def one_value_an_option(arguments: Sequence[str]) -> Sequence[str]:
    """Return a command line for the parser, with options of several values repeated, a value each.

    `convert` has several options of this kind, other commands only --setting.
    """
    if arguments[:1] != ["convert"]:
        return one_value_each(arguments, flags=(), pairs=PROCESSOR_PAIRS, lists={}, num_positional=0)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = {name for action in parser._actions if action.nargs == 0 for name in action.option_strings}
    pairs = ("--columns", "--roles", "--tags", "--split", *PROCESSOR_PAIRS)
    return ["convert", *one_value_each(arguments[1:], flags=flags, pairs=pairs, lists={"--keep": ""}, num_positional=2)]


def _run(options: argparse.Namespace) -> int:
    from ..converters.append import append
    from ..converters.convert import Progress, convert
    from ..converters.part import convert_part
    from ..processors.tokenizers import tokenize_in_one_thread
    from .console import bar, print_found, print_next, print_record
    from .console_datasets import print_notes, print_summary

    tokenize_in_one_thread()
    check_part(options)
    if options.dry_run:
        return _dry_run(options)
    with bar("converting", unit="bytes") as shown:
        asked: dict[str, Any] = {
            "num_workers": options.workers,
            "overwrite": options.overwrite,
            "work": options.work,
            "progress": Progress(begin=shown.begin, advance=shown.advance, rows=shown.count_rows, say=print_found),
            "options": _options(options),
        }
        on_engine = {
            "engine": options.engine, "ray_address": options.ray_address, "ray_timeout_s": options.ray_timeout
        }  # fmt: skip
        if options.part is not None:
            part = convert_part(options.sources, options.target, options.part, **asked, **on_engine)
        elif options.append:
            added = append(options.sources, options.target, **asked, **on_engine)
        else:
            report = convert(options.sources, options.target, **asked, **on_engine)
    if options.part is not None:
        print_record(options.target, part)
        print_next("the other parts; when all are there, the same command without --part")
        return 0
    if not options.append:
        print_summary(options.target, report, packing_length=options.concat)
        return 0
    if added.converted is not None:
        print_summary(options.target, added.converted, packing_length=options.concat)
    print_record(options.target, added)
    print_notes(added.dropped)
    return 0


def check_part(options: argparse.Namespace) -> None:
    """Raise ConfigError for options incompatible with one part of a conversion."""
    others = {
        "--append": options.append,
        "--dry-run": options.dry_run,
    }
    wrong = [name for name, is_given in others.items() if is_given]
    if options.part is not None and wrong:
        raise ConfigError(f"--part cannot be combined with {wrong[0]}: leave one of them out")


def _dry_run(options: argparse.Namespace) -> int:
    from ..converters.dry_run import dry_runs
    from .console_datasets import print_dry_run

    found = dry_runs(
        options.sources,
        options=_options(options),
        num_workers=options.workers,
        append_to=options.target if options.append else None,
        target=options.target,
    )
    for name, each in found.items():
        print_dry_run(each, on_error=options.on_error, name=f"{options.target.rstrip('/')}/{name}" if name else "")
    return 0


def _options(options: argparse.Namespace) -> ConvertOptions:
    from ..checks import parse_bytes
    from ..converters.options import DEFAULT_SHARD_BYTES, ConvertOptions
    from ..converters.rows.options import SchemaOptions

    keep: bool | tuple[str, ...] = ()
    if options.keep is not None:
        keep = True if "" in options.keep else tuple(options.keep)
    schema = SchemaOptions(
        kind=options.kind,
        columns=_pairs(options.columns, "--columns"),
        keep=keep,
        system=options.system,
        roles=_pairs(options.roles, "--roles"),
        learn=options.learn,
        media_root=options.media_root,
        max_image_pixels=options.max_image_pixels,
        check_media=options.check_media,
        map=options.map,
        filter=options.filter,
        tags=_pairs(options.tags, "--tags"),
    )
    return ConvertOptions(
        format=options.format,
        quote=options.quote,
        schema=schema,
        choice=processor_choice(options.tokenizer, options.processor, options.setting),
        tokenize=options.tokenize,
        shard_bytes=parse_bytes(options.shard_size or DEFAULT_SHARD_BYTES, name="--shard-size"),
        compression=options.compression,
        on_error=options.on_error,
        on_dropped=options.on_dropped,
        limit=options.limit,
        shuffle_seed=options.shuffle_seed,
        splits=_shares(options.split),
        split_seed=options.split_seed,
        shortest=options.min_tokens,
        longest=options.max_tokens,
        num_shards=options.num_shards,
        samples_per_shard=options.samples_per_shard,
        ids=options.ids,
        dedup=options.dedup,
        delimiter=options.delimiter,
        encoding=options.encoding,
        header=options.header,
        drop_tail=options.drop_tail,
        concat=options.concat,
        drop=options.drop,
        drop_sources=_pairs(options.drop_source, "--drop-source"),
        allow_repeats=options.allow_repeats,
    )


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
    except LmmsStreamError:
        raise
    except ValueError as error:
        raise ConfigError(f"--split {' '.join(texts)}: {error}; expected NAME=SHARE such as train=0.99") from error
    unsafe = [name for name in shares if not name.replace("_", "").replace("-", "").isalnum()]
    if unsafe:
        raise ConfigError(f"--split {unsafe[0]}: names of datasets are letters, digits, - and _")
    return shares
