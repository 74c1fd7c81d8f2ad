"""`lmms-stream COMMAND`: the commands, and the handling of their errors."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import ConfigError, LmmsStreamError, without_secrets
from ..extras import need
from ..registry import Registry
from ..signals import Terminated, raised_termination
from ..version import VERSION
from .command import CommandParser, HelpFormatter, help_width, shown_examples
from .convert import one_value_an_option

if TYPE_CHECKING:
    from .command import Commands

    AddCommands = Callable[[Commands], None]

# A command, and the function that adds this command, and others of its module, to the parser.
COMMANDS = Registry["AddCommands"](
    "commands",
    {
        name: f"{module}:add_commands"
        for module, names in {
            "cli.convert": ("convert",),
            "cli.datasets": ("index", "verify", "merge", "unload"),
            "tools.inspect.command": ("inspect",),
            "tools.audit.command": ("audit",),
            "tools.plan.command": ("plan",),
            "cli.runs": ("train", "plot", "export"),
            "tools.watch.command": ("watch",),
            "tools.profile.command": ("profile",),
            "tools.ledger.command": ("ledger",),
            "tools.simulate.command": ("simulate",),
            "tools.demo.command": ("demo",),
        }.items()
        for name in names
    },
)
DESCRIPTION = (
    "Turn any dataset into MDS shards in object storage, stream them during training as full packs of samples, and "
    "resume in the middle of an epoch, exactly."
)
GROUPS = {  # of the overview, in the order of work
    "make a dataset": ("convert", "index", "merge"),
    "look into a dataset": ("inspect", "audit", "verify", "unload"),
    "plan a run": ("plan", "simulate", "profile"),
    "train": ("train", "watch", "plot", "ledger", "export"),
    "try all of it on this machine": ("demo",),
}
RESUMED = ("convert", "index")  # commands that keep their work for the same command,
ANEW = {"--overwrite", "--dry-run"}  # unless it has one of these options
PATHS = ("CHECKPOINT", "DATASET", "FILE", "FOLDER", "PATH", "RUN", "RUN.yaml", "SOURCE", "TARGET")  # completed as such
FIRST_STEPS = (
    "lmms-stream convert chats.jsonl chats --tokenizer path/to/tokenizer",
    "lmms-stream plan chats --packing-length 4096 --overlong drop",
    "lmms-stream train run.yaml",
)


class MainParser(CommandParser):
    """Parser of all commands; the help groups commands by purpose."""

    def format_help(self) -> str:
        commands = _commands(self)
        indent = 2 + max(map(len, commands)) + 2
        parts = ["usage: lmms-stream COMMAND [OPTION ...]", textwrap.fill(DESCRIPTION, help_width())]
        grouped = {name for names in GROUPS.values() for name in names}
        others = [name for name in commands if name not in grouped]
        for group, names in {**GROUPS, **({"added by other packages": others} if others else {})}.items():
            lines = [
                textwrap.fill(
                    str(commands[name].description),
                    help_width(),
                    initial_indent=f"  {name}".ljust(indent),
                    subsequent_indent=" " * indent,
                )
                for name in names
                if name in commands
            ]
            parts.append("\n".join([f"{group}:", *lines]))
        parts.append(shown_examples(FIRST_STEPS))
        parts.append("lmms-stream COMMAND --help tells all of a command, and has examples of it.")
        parts.append('eval "$(lmms-stream --completion bash)" completes commands and options (or zsh).')
        parts.append("more: docs/start.md (five minutes, from a file of chats to a trained model)")
        return "\n\n".join(parts) + "\n"


class Completion(argparse.Action):
    """Print a script for a shell's completion of commands, options and paths, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, shell: Any, option: str | None = None) -> None:
        try:
            shtab = need("shtab", by="completions")
        except ConfigError as error:
            parser.exit(1, f"error: {error}\n")

        for each in (parser, *_commands(parser).values()):
            for action in each._actions:
                if action.metavar in PATHS:
                    action.complete = shtab.DIRECTORY if action.metavar == "FOLDER" else shtab.FILE  # type: ignore[attr-defined]
        sys.stdout.write(shtab.complete(parser, shell) + "\n")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; an error that a user can correct is a line on stderr and exit status 1.

    Without arguments, print the overview.
    """
    try:
        with checked_output():
            return _run(sys.argv[1:] if arguments is None else list(arguments))
    except OutputError as error:
        discard_output()
        if error.is_closed:
            return 141
        sys.stderr.write(f"error: {error}\n")
        return 1


def _run(words: Sequence[str]) -> int:
    try:
        parser = build_parser(words[0] if words else None)
    except ConfigError as error:  # of a package that adds a command
        sys.stderr.write(f"error: {error}\n")
        return 1
    if not words:
        parser.print_help()
        return 0
    _check_command(parser, words[0])
    options, unknown = parser.parse_known_args(one_value_an_option(words))
    if options.command in ("train", "profile") and not any(each.startswith("-") for each in unknown):
        options.overrides += unknown  # argparse leaves words after an option
    elif unknown:
        _commands(parser)[options.command].refuse(unknown)
    try:
        run: Callable[[argparse.Namespace], int] = options.run
        with raised_termination(), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return run(options)
    except LmmsStreamError as error:
        from .console import visible

        sys.stderr.write(f"error: {visible(str(error))}\n")
        return 1
    except KeyboardInterrupt as interrupt:
        is_terminated = isinstance(interrupt, Terminated)
        what = "terminated" if is_terminated else "interrupted"
        is_resumed = options.command in RESUMED and not ANEW.intersection(words)
        resumes = f": lmms-stream {shlex.join(words)} resumes" if is_resumed else ""
        sys.stderr.write(f"{what}{resumes}\n")
        return 143 if is_terminated else 130


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any
) -> None:
    """Show our warnings in a line, and others with their place in the code."""
    is_ours = filename == "lmms_stream"
    text = f"warning: {message}\n" if is_ours else warnings.formatwarning(message, category, filename, lineno)
    sys.stderr.write(without_secrets(text))


def build_parser(command: str | None = None) -> MainParser:
    """Return the parser of a command and the commands added with it; for any other word, of all commands."""
    parser = MainParser(prog="lmms-stream", formatter_class=HelpFormatter)
    parser.add_argument("--version", action="version", version=VERSION, help="show the release and exit")
    parser.add_argument(
        "--completion",
        action=Completion,
        choices=("bash", "zsh"),
        metavar="SHELL",
        help='complete commands, options and paths in bash or zsh: eval "$(lmms-stream --completion bash)"',
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    if command and command in COMMANDS.ours:
        COMMANDS[command](commands)
        return parser
    for add in dict.fromkeys(COMMANDS[name] for name in COMMANDS.ours):
        add(commands)
    for name in COMMANDS.others:
        try:
            COMMANDS[name](commands)
        except Exception as error:  # of another package: go on without its command
            told = (
                error
                if isinstance(error, ConfigError)
                else ConfigError(
                    f"the command {name} of {COMMANDS.origin(name)} cannot be added ({type(error).__name__}: {error}): "
                    "correct that package, or uninstall it"
                )
            )
            if name == command:
                raise told from error
            sys.stderr.write(f"warning: {told}\n")
    return parser


def _commands(parser: argparse.ArgumentParser) -> dict[str, CommandParser]:
    """Return the parser of each command, by name."""
    (action,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return dict(action.choices)


def _check_command(parser: MainParser, word: str) -> None:
    """Exit with an error for a wrong command; suggest a similar command."""
    commands = _commands(parser)
    if word.startswith("-") or word in commands:
        return
    meant = difflib.get_close_matches(word, commands, n=1)
    parser.error(f"there is no command {word}{f' (did you mean {meant[0]}?)' if meant else ''}")


# Standard output of a command, with errors separate from errors of the command's files.


class OutputError(Exception):
    """Standard output cannot be written; not an OSError, because handlers treat an OSError as an error of the disk."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"standard output cannot be written ({cause.strerror}): free some room, or write elsewhere")
        self.is_closed = isinstance(cause, BrokenPipeError)  # by its reader, for example head


class _Output:
    """A stream that raises OutputError, and writes escapes for characters outside of its encoding."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            return self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            raise OutputError(error) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputError(error) from error


@contextmanager
def checked_output() -> Iterator[None]:
    """Let standard output raise OutputError inside, and at the end for the rest of the buffer."""
    stream = sys.stdout
    output = _Output(stream)
    sys.stdout = output
    try:
        yield
    except OutputError:
        raise
    except BaseException:
        output.flush()
        raise
    else:
        output.flush()
    finally:
        sys.stdout = stream


def discard_output() -> None:
    """Discard buffered output: otherwise the interpreter would try to write the rest at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
