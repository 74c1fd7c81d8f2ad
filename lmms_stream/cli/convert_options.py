"""Options of `lmms-stream convert`, and lists for its help."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from textwrap import fill

from .command import add_on_dropped, add_processor_options, at_least, help_width, local_file

Group = argparse._ArgumentGroup  # argparse gives it no public name


def kinds_and_roles() -> str:
    """Return the valid names for --kind, --columns and --roles, for the help."""
    from ..converters.rows.kinds import KINDS, column_roles
    from ..converters.rows.speakers import ROLES

    width, columns = help_width(), max(map(len, KINDS)) + 4
    kinds = (
        fill(
            kind.needed or "only where --kind says so",
            width,
            initial_indent=f"  {name}".ljust(columns),
            subsequent_indent=" " * columns,
        )
        for name, kind in KINDS.items()
    )
    return "\n".join(
        [
            "kinds of rows (--kind), and the columns that one is found by:",
            *kinds,
            "\nroles of columns (--columns ROLE=COLUMN):",
            fill(", ".join(column_roles()), width, initial_indent="  ", subsequent_indent="  "),
            "\nroles of speakers (--roles NAME=ROLE):",
            f"  {', '.join(ROLES)}",
        ]
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all arguments of the command."""
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="read files, folders, globs, s3://bucket/prefix, hf:DATASET, MDS datasets, a YAML list of datasets, "
        "LLaMA-Factory's dataset_info.json#NAME; path@[0:1000] is a slice",
    )
    parser.add_argument("target", metavar="TARGET", help="write to a folder or a URL such as s3://bucket/prefix")
    parser.add_argument("--overwrite", action="store_true", help="replace the dataset, or half of one, at the target")
    parser.add_argument("--workers", type=at_least(1), metavar="N", help="use N processes; default: one for each core")
    parser.add_argument(
        "--work", type=local_file, metavar="FOLDER", help="keep in FOLDER what a later run goes on with"
    )
    _add_growth(parser)
    _add_engine(parser.add_argument_group("what does the work"))
    _add_rows(parser.add_argument_group("what the rows are (found out, unless it is said)"))
    _add_csv(parser.add_argument_group("how CSV and TSV are written"))
    _add_media(parser.add_argument_group("media"))
    _add_written(parser.add_argument_group("what is written"))
    _add_tokens(parser.add_argument_group("tokens"))
    _add_user_code(parser.add_argument_group("which rows, and what is made of them"))


def _add_growth(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--append",
        action="store_true",
        help="write the sources that the dataset at TARGET was not converted from yet beside its shards, and one index "
        "over both; options are to be those that it was converted with",
    )
    parser.add_argument(
        "--allow-repeats",
        action="store_true",
        help="store rows more than once if sources name them more than once, by links, copies, overlapping globs or "
        "slices; without it that is an error",
    )
    parser.add_argument(
        "--part",
        metavar="I/N",
        help="do part I of N, counted from 0, on a machine of its own; the same command without --part then makes the "
        "dataset of all parts, the same bytes as one machine's: sbatch --array=0-15 with --part "
        "$SLURM_ARRAY_TASK_ID/16",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="read the first 10,000 rows, show what would be stored of them, and how large and how long all of it will "
        "be; write nothing",
    )


def _add_engine(group: Group) -> None:
    from ..processes.engine import ENGINES, RAY_TIMEOUT_S

    group.add_argument(
        "--engine",
        choices=ENGINES,
        metavar="NAME",
        default="processes",
        help="use this machine (processes), or workers on a Ray cluster (ray), as many as it has CPUs; then "
        "all nodes must see --work, local sources and media, the tokenizer and a local TARGET under the same paths "
        "(object stores: each node needs access); default: %(default)s",
    )
    group.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="join the cluster that runs there, or with auto this node's; default: RAY_ADDRESS, or a cluster of this "
        "machine, started for the command and removed with its logs",
    )
    group.add_argument(
        "--ray-timeout",
        type=float,
        default=RAY_TIMEOUT_S,
        metavar="SECONDS",
        help="wait so long for the cluster to answer, and for a first worker to start; default: %(default)g",
    )


def _add_rows(group: Group) -> None:
    group.add_argument(
        "--format", metavar="FORMAT", help="read all sources as this: jsonl, json, csv, tsv, parquet, arrow, …"
    )
    group.add_argument(
        "--kind",
        "--schema",
        dest="kind",
        metavar="KIND",
        help="read all rows as of this kind: messages, sharegpt, alpaca, prompt-response, text, tokens, …",
    )
    group.add_argument(
        "--columns", action="append", default=[], metavar="ROLE=COLUMN", help="name columns that have unusual names"
    )
    group.add_argument(
        "--keep",
        nargs="?",
        const="",
        action="append",
        metavar="COLUMN",
        help="keep COLUMN as it is (repeat it for others), or without COLUMN all; COLUMN:json where values may be null "
        "or of several types, COLUMN:bytes for bytes that some rows lack",
    )
    group.add_argument("--system", metavar="TEXT", help="give TEXT to conversations without a system prompt")
    group.add_argument(
        "--roles",
        action="append",
        default=[],
        metavar="NAME=ROLE",
        help="say who a speaker is that the data calls NAME",
    )
    group.add_argument(
        "--tags",
        action="append",
        default=[],
        metavar="TAG=NAME",
        help="say what keys of a message and its speakers are called, by LLaMA-Factory's tags: role_tag=from "
        "content_tag=value user_tag=human assistant_tag=gpt",
    )
    group.add_argument(
        "--learn",
        choices=("assistant", "last", "each"),
        default="assistant",
        help="learn all messages of the assistant, or the last one, or make a sample for each, which ends with it; "
        "default: %(default)s",
    )
    group.add_argument(
        "--on-error",
        choices=("fail", "skip"),
        default="fail",
        help="end at a row that does not fit, or leave it out and count it; default: %(default)s",
    )
    add_on_dropped(group)


def _add_csv(group: Group) -> None:
    group.add_argument(
        "--delimiter",
        metavar="CHARACTER",
        help="take CHARACTER, or tab, for what stands between fields; default: comma in CSV, tab in TSV",
    )
    group.add_argument(
        "--quote",
        metavar="QUOTE",
        help="take QUOTE for what fields may stand in: none, double, or a character; default: double in CSV, none in "
        "TSV",
    )
    group.add_argument("--encoding", metavar="NAME", help="decode as NAME: latin-1, utf-16, …; default: utf-8")
    group.add_argument(
        "--header",
        metavar="NAMES",
        help="name the columns of a file without a header: id,text; first: the first row names the columns",
    )


def _add_media(group: Group) -> None:
    group.add_argument(
        "--media-root", metavar="FOLDER", help="start paths of media from FOLDER; default: where their source lies"
    )
    group.add_argument(
        "--max-image-pixels", type=at_least(1), metavar="PIXELS", help="make images of more than so many PIXELS smaller"
    )
    group.add_argument(
        "--check-media",
        choices=("header", "decode"),
        default="header",
        help="read headers alone, where they tell what is stored of media, or decode all media to find what is broken; "
        "default: %(default)s",
    )


def _add_written(group: Group) -> None:
    _add_sizes(group)
    group.add_argument("--compression", metavar="KIND", help="compress shards as zstd, zstd:7, gz, …")
    group.add_argument(
        "--limit",
        type=at_least(1),
        metavar="N",
        help="write N samples, and all samples of the row that holds the last of them",
    )
    group.add_argument(
        "--shuffle-seed", type=at_least(0), metavar="SEED", help="put all samples in the random order of SEED"
    )
    group.add_argument(
        "--split",
        action="append",
        metavar="NAME=SHARE",
        help="write several datasets below the target: --split train=0.99 validation=0.01",
    )
    group.add_argument(
        "--split-seed",
        type=at_least(0),
        default=0,
        metavar="SEED",
        help="draw the splits by SEED; default: %(default)s",
    )


def _add_sizes(group: Group) -> None:
    group.add_argument("--shard-size", metavar="SIZE", help="fill shards up to SIZE, as 256mb; default: 64mb")
    group.add_argument("--num-shards", type=at_least(1), metavar="N", help="write N shards of equally many samples")
    group.add_argument(
        "--samples-per-shard", type=at_least(1), metavar="N", help="write shards of N samples, the last of fewer"
    )
    group.add_argument(
        "--ids",
        metavar="FILE",
        help="take the samples of an MDS dataset whose ids stand in FILE, one a line or as a .npy array",
    )


def _add_tokens(group: Group) -> None:
    group.add_argument(
        "--tokenizer", metavar="PATH", help="measure samples with it (a folder or hub id), for a lengths index"
    )
    add_processor_options(group, default="chat")
    group.add_argument("--tokenize", action="store_true", help="store tokens and loss spans instead of the samples")
    group.add_argument(
        "--concat",
        type=at_least(2),
        metavar="TOKENS",
        help="store the tokens of all documents end to end, as samples of so many TOKENS, the last of fewer, with "
        "where documents begin; options that choose, count or shuffle samples are then about documents; between texts "
        "stand the special tokens of --tokenizer, or what --setting text_prefix=TEXT text_suffix=TEXT says",
    )
    group.add_argument(
        "--drop-tail",
        action="store_true",
        help="leave out what remains after the last whole sample of --concat, and count it",
    )
    group.add_argument(
        "--min-tokens", type=at_least(0), metavar="TOKENS", help="leave out shorter samples, and count them"
    )
    group.add_argument(
        "--max-tokens", type=at_least(1), metavar="TOKENS", help="leave out longer samples, and count them"
    )


def _add_user_code(group: Group) -> None:
    group.add_argument(
        "--filter",
        metavar="MODULE:FUNCTION",
        help="take the rows alone of which your function says True; it is given each row as a dict, and its module is "
        "found from the current folder, or named as path/to/file.py:function",
    )
    group.add_argument(
        "--map",
        metavar="MODULE:FUNCTION",
        help="read what your function makes of each row that is taken: a row (a dict), several (a list), or None to "
        "leave it out",
    )
    group.add_argument(
        "--drop",
        metavar="FILE",
        help="leave out the rows that FILE names, a line each, as FILE:ROW, or as a run names samples: SOURCE:ID, or "
        "the lines of its left_out.jsonl",
    )
    group.add_argument(
        "--drop-source",
        action="append",
        default=[],
        metavar="SOURCE=URL",
        help="take samples of SOURCE in --drop for those of the dataset at URL, which the run read, and leave out the "
        "rows that they were made of",
    )
    group.add_argument(
        "--dedup",
        choices=("exact",),
        help="leave out samples of which all that is stored equals an earlier one's, and count them; takes 16 bytes of "
        "memory a sample",
    )


# Options of several values: each value gets its own option, and the words after the values are left alone.
#
# In argparse and tyro such an option takes all words up to the next option, also sources and target; neither tyro nor
# cyclopts reads SOURCE … TARGET.

_NUMBER = re.compile(r"-\.?\d")


def is_pair(word: str) -> bool:
    """Return whether a word has the form NAME=VALUE, and is no path or URL."""
    name, separator, _ = word.partition("=")
    return bool(name and separator) and not re.search(r"[/:?*\\]", name)


def one_value_each(
    words: Sequence[str],
    *,
    flags: Collection[str],
    pairs: Collection[str],
    lists: Mapping[str, str],
    num_positional: int,
) -> list[str]:
    """Return the words with each option of several values repeated, with a value each.

    flags: options without a value; may be () if lists is empty. pairs: options with values NAME=VALUE, up to the first
    word of another form. lists: options with any values, and the value for an option without values. They take all
    words up to the next option if the line has num_positional other words. Otherwise they take at most one word, and
    leave the missing positional words.

    >>> line = ["--split", "a=.9", "b=.1", "rows.jsonl", "out"]
    >>> one_value_each(line, flags=(), pairs=("--split",), lists={}, num_positional=2)
    ['--split=a=.9', '--split=b=.1', 'rows.jsonl', 'out']
    """
    parts = list(_parts(words, flags, {**dict.fromkeys(pairs, is_pair), **dict.fromkeys(lists, lambda word: True)}))
    num_missing = num_positional - sum(option is None for option, _ in parts)
    made: list[str] = []
    for option, values in parts:
        if option is None or option not in {*pairs, *lists}:
            made += [*([option] if option else []), *values]
            continue
        num_taken = len(values)
        if option in lists and 0 < num_missing <= len(values):
            num_taken = min(1, len(values) - num_missing)
        taken = values[:num_taken] or ([lists[option]] if option in lists else [])
        made += [f"{option}={value}" for value in taken] if taken else [option]
        made += values[num_taken:]
    return made


def _parts(
    words: Sequence[str], flags: Collection[str], several: Mapping[str, Callable[[str], bool]]
) -> Iterator[tuple[str | None, list[str]]]:
    """Yield each option with its values, and each other word by itself."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word == "--":
            yield word, []
            yield from ((None, [each]) for each in words[index:])
            return
        if not _is_option(word):
            yield None, [word]
        elif word in several:
            end = index
            while end < len(words) and not _is_option(words[end]) and (end == index or several[word](words[end])):
                end += 1
            yield word, list(words[index:end])
            index = end
        else:
            has_value = word not in flags and "=" not in word and index < len(words) and not _is_option(words[index])
            num_values = int(has_value)
            yield word, list(words[index : index + num_values])
            index += num_values


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NUMBER.match(word)
