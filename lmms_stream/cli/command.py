"""Parts of every command: its parser, help and examples, its errors, and options for the processor of samples."""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from ..checks import local_path
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..processors import ProcessorChoice
    from ..processors.base import Processor


if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["CommandParser"]  # argparse has no public name for it

MAX_WIDTH = 100  # columns of help: longer lines are hard to read


def help_width() -> int:
    """Return the number of columns for help: the terminal's, at most MAX_WIDTH; without a terminal COLUMNS, or 80."""
    return min(shutil.get_terminal_size().columns, MAX_WIDTH)


class HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=help_width())

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Wrap an option's help without breaks inside names of options."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class CommandParser(argparse.ArgumentParser):
    """Parser with help in the terminal's width, with examples at the end, and with errors in one line.

    examples: command lines. more: returns additional text for the help, called only for help. page: page of the command
    in docs/. if_missing: remedy if arguments are missing.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)  # --over would be --overwrite

    examples: Sequence[str] = ()
    more: Callable[[], str] | None = None
    page: str | None = None
    if_missing: str = ""

    def format_usage(self) -> str:
        self.usage = _usage(self)
        return super().format_usage()

    def format_help(self) -> str:
        self.usage = _usage(self)
        parts = [super().format_help().rstrip("\n")]
        if self.more:
            parts.append(self.more())
        parts.append(shown_examples(self.examples))
        if self.page:
            parts.append(f"more: docs/{self.page}")
        return "\n\n".join(part for part in parts if part) + "\n"

    def error(self, message: str) -> NoReturn:
        """Print one line on stderr and exit with status 2."""
        if self.if_missing and message.startswith("the following arguments are required"):
            message = f"{message}: {self.if_missing}"
        self.exit(2, f"error: {message}: see {self.prog} --help\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write like argparse, but raise errors of the write; argparse ignores errors."""
        (file or sys.stderr).write(message)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with an error for unknown arguments; suggest a similar option, or the position of settings."""
        known = [name for action in self._actions for name in action.option_strings]
        meant = [name for word in unknown for name in difflib.get_close_matches(word.partition("=")[0], known, n=1)]
        hint = f" (did you mean {meant[0]}?)" if meant else ""
        if all("=" in word and not word.startswith("-") for word in unknown):
            hint = " (a SETTING=VALUE can only follow the YAML file of a run directly, before all options)"
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def local_file(text: str) -> Path:
    """Return the local path of an argument: a path or a file URL."""
    try:
        return local_path("the path", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def at_least(minimum: int) -> Callable[[str], int]:
    """Return the type of an option for whole numbers of at least `minimum`."""

    def number(text: str) -> int:
        with suppress(ValueError):
            if int(text) >= minimum:
                return int(text)
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {minimum}, got {text!r}")

    return number


def given_options(options: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return the options with these names in a command line, in typed form. None, [] and False: not given.

    >>> given_options(argparse.Namespace(seed=0, block_size=None, setting=[]), ["seed", "block_size", "setting"])
    ['--seed']
    """
    values = {name: getattr(options, name) for name in names}
    return [
        f"--{name.replace('_', '-')}"
        for name, value in values.items()
        if value not in (None, []) and value is not False
    ]


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    *,
    example: str | Sequence[str],
    page: str | None = None,
) -> CommandParser:
    """Add the parser of a command. run: returns the exit status. example: one or more command lines. page: of docs/."""
    parser = commands.add_parser(name, help=summary, description=summary, formatter_class=HelpFormatter)
    parser.set_defaults(run=run)
    parser.examples = [example] if isinstance(example, str) else example
    parser.page = page
    return parser


def shown_examples(examples: Sequence[str]) -> str:
    """Return command lines below a heading; long lines are continued after a backslash."""
    if not examples:
        return ""
    heading = "example:" if len(examples) == 1 else "examples:"
    return "\n".join([heading, *(shown_command(each, width=help_width()) for each in examples)])


def shown_command(command: str, *, width: int) -> str:
    r"""Return a command line wrapped to at most `width` columns, in the form of continued lines for a shell.

    >>> print(shown_command("lmms-stream train run.yaml train.max_steps=100", width=32))
      lmms-stream train run.yaml \
          train.max_steps=100
    """
    wrapper = textwrap.TextWrapper(
        width=width - 2, break_long_words=False, break_on_hyphens=False, initial_indent="  ", subsequent_indent="      "
    )
    return " \\\n".join(wrapper.wrap(command))


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return the usage line of a parser: required arguments by name, all options as [OPTION ...]."""
    words = [parser.prog]
    for action in parser._actions:
        name = str(action.metavar or action.dest)
        if not action.option_strings:
            words.append({"+": f"{name} [{name} ...]", "*": f"[{name} ...]"}.get(str(action.nargs), name))
        elif action.required:
            words.append(f"{action.option_strings[-1]} {name}")
    return " ".join([*words, "[OPTION ...]"]).replace("%", "%%")


# Options for the processor of samples: --tokenizer, --processor, --setting.


PROCESSOR_PAIRS = ("--setting",)  # options with values NAME=VALUE


class Options(Protocol):
    """Parser or argument group."""

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action: ...


def add_processor_options(
    parser: Options, *, default: str = "what the dataset holds, texts, chats or answers to compare"
) -> None:
    """Add --processor and --setting. default: the processor without these options, in words."""
    parser.add_argument(
        "--processor",
        choices=("chat", "text", "tokens", "vision", "audio", "omni", "image", "bagel", "preference"),
        help="read samples as this; vision, audio, omni: chats with media, where --tokenizer names a processor's "
        "folder or hub id; tokens and image (images that are to be made): without --tokenizer; bagel: chats with "
        f"images to see and to make; preference: answers to compare; default: {default}",
    )
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set what a run sets in its section processor, for the same lengths: image_max_pixels=200704, fps=1, …",
    )
    parser.add_argument(
        "--learn-stop",
        action="append_const",
        dest="setting",
        const="learn_stop=true",
        help="train also on the next token that the chat template writes after an answer, in templates without a token "
        "of their own that ends answers, as GLM's; short for --setting learn_stop=true",
    )


def processor_choice(tokenizer: str | None, kind: str | None, settings: Sequence[str]) -> ProcessorChoice | None:
    """Return the choice of a processor from the options; None without options. ConfigError for incompatible options."""
    if tokenizer is None and kind is None and not settings:
        return None
    from ..converters.options import nested_settings
    from ..processors import ProcessorChoice

    return ProcessorChoice(tokenizer=tokenizer, type=kind, settings=nested_settings(settings))


def add_on_dropped(parser: Options) -> None:
    """Add --on-dropped."""
    parser.add_argument(
        "--on-dropped",
        choices=("error", "warn"),
        default="error",
        help="take rows whose tools or tool calls the chat template does not show for errors, or only count them; "
        "default: %(default)s",
    )


def stored_processor(remote: str, options: argparse.Namespace) -> Processor | None:
    """Return the processor of a dataset's samples, from the options and the samples; None without options."""
    choice = processor_choice(options.tokenizer, options.processor, options.setting)
    if choice is None:
        return None
    from ..converters.stored import catalog

    return catalog.stored_processor(remote, choice)
