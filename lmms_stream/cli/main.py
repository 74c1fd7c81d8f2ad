"""`lmms-stream COMMAND`: which commands there are, and what becomes of their errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import LmmsStreamError
from ..version import VERSION
from . import convert, datasets, ledger, plan, profile, runs, simulate, unload, watch
from .command import CommandParser

if TYPE_CHECKING:
    from .command import Commands

    AddCommands = Callable[[Commands], None]

OUR_COMMANDS = (
    convert.add_commands, datasets.add_commands, plan.add_commands, runs.add_commands, watch.add_commands,
    profile.add_commands, ledger.add_commands, unload.add_commands, simulate.add_commands,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None, *, others: Sequence[AddCommands] = ()) -> int:
    """Run a command; errors a user can act on are one line on stderr and exit status 1. others: more commands."""
    parser = build_parser(others)
    words = convert.one_value_an_option(sys.argv[1:] if arguments is None else list(arguments))
    options, unknown = parser.parse_known_args(words)
    if options.command in ("train", "profile") and not any(each.startswith("-") for each in unknown):
        options.overrides += unknown  # argparse leaves those that follow an option
    elif unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except LmmsStreamError as error:
        from ..converters.stored.inspect.visible import visible

        sys.stderr.write(f"error: {visible(str(error))}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


def build_parser(others: Sequence[AddCommands] = ()) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lmms-stream",
        description="Datasets to MDS shards, full packs of samples from object storage, exact resumption.",
        epilog=f"example:\n  {convert.EXAMPLES[1]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=VERSION, help="show the release and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    for add in (*OUR_COMMANDS, *others):
        add(commands)
    return parser
