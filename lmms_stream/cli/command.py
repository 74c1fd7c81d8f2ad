"""What every command of the command line is made with."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["CommandParser"]  # argparse gives it no public name


class CommandParser(argparse.ArgumentParser):
    """A parser whose help ends with what `more` gives, which is asked for when help is."""

    more: Callable[[], str] | None = None

    def format_help(self) -> str:
        shown = super().format_help()
        return f"{shown}\n{self.more()}" if self.more else shown


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    *,
    example: str | Sequence[str],
) -> CommandParser:
    """The parser of a command; `run` gives its exit status. example: a command line, or several."""
    lines = [example] if isinstance(example, str) else example
    heading = "example" if len(lines) == 1 else "examples"
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog="\n  ".join([f"{heading}:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser
