"""Help and errors of all commands: one voice, in terminals of any width, with and without colour."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
from lmms_stream.__main__ import main
from lmms_stream.cli.command import CommandParser
from lmms_stream.cli.convert import one_value_an_option
from lmms_stream.cli.main import GROUPS, build_parser
from lmms_stream.train.__main__ import USAGE

from ..arrows import ROOT
from ..processes import start_module
from ..rounds import in_long_rounds
from .terminals import in_terminal

COLOR = re.compile(r"\x1b\[(?:\d+;)*(?:3\d|4\d|9\d|10\d)(?:;\d+)*m")
ESCAPE = "\x1b"
OTHER_WORDS = {  # what the architecture's table has another word for
    "place": "cursor, position or offset", "bucket of": "pack", "bin": "pack", "row group": "unit", "document id": "id",
    "minibatch": "micro-batch", "microbatch": "micro-batch", "world size": "ranks", "process group": "ranks",
}  # fmt: skip


PARSER = build_parser()


def commands() -> dict[str, CommandParser]:
    (action,) = (each for each in PARSER._actions if isinstance(each, argparse._SubParsersAction))
    return dict(action.choices)


def help_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, pytest.param(200, marks=in_long_rounds)])
@pytest.mark.parametrize("command", [None, *commands()])
def test_help_fits_the_terminal_and_has_examples_that_parse(
    command: str | None, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = help_of([command] if command else [], capsys)
    assert max(map(len, shown.splitlines())) <= min(columns, 100)
    assert ESCAPE not in shown
    examples = re.split(r"^examples?:\n", shown, flags=re.MULTILINE)[1].split("\n\n")[0]
    lines = examples.replace("\\\n", " ").splitlines()
    assert lines
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "lmms-stream"
        options = PARSER.parse_args(one_value_an_option(words))
        assert command is None or options.command == command
    (page,) = re.findall(r"^more: (docs/\S+\.md)", shown, flags=re.MULTILINE)
    assert (ROOT / page).exists()


def test_without_arguments_every_command_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(commands())
    assert re.findall(r"^  ([a-z]+)  ", shown, flags=re.MULTILINE) == [
        name for each in GROUPS.values() for name in each
    ]


def test_options_say_their_unit_and_their_default_in_the_same_way() -> None:
    for command, parser in commands().items():
        for action in parser._actions:
            where, text = f"{command} {action.dest}", str(action.help)
            takes_value = action.nargs != 0 and not isinstance(action, argparse._HelpAction)
            if takes_value and action.choices is None:
                assert re.fullmatch(r"[A-Z][\w.]*(?:[=:/][A-Z]+)*(?:,…|,\.\.\.)?", str(action.metavar)), where
            if action.default not in (None, [], False, argparse.SUPPRESS, 0) and takes_value and action.option_strings:
                assert "default: " in text, where
            assert not re.search(r"default [^:]|\((?!default\))default|\.$", text.replace("%(default)", "")), where
            assert text[0].islower(), where


def test_help_uses_the_words_of_the_documentation() -> None:
    for command, parser in commands().items():
        shown = " ".join(parser.format_help().split()).lower()
        for word, ours in OTHER_WORDS.items():
            assert not re.search(rf"\b{word}\b", shown), f"{command} says {word!r}: say {ours}"


def test_training_by_torchrun_has_help_that_fits_80_columns() -> None:
    assert max(map(len, USAGE.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["covert", "a", "b"], "there is no command covert (did you mean convert?): see lmms-stream --help"),
        (["convert", "a", "b", "--tokeniser", "c"],
         "unrecognized arguments: --tokeniser c (did you mean --tokenizer?): see lmms-stream convert --help"),
        (["plan", "run.yaml", "--seed", "1", "train.max_steps=2"],
         "unrecognized arguments: train.max_steps=2 (a SETTING=VALUE can only follow the YAML file of a run directly, "
         "before all options): see lmms-stream plan --help"),
        (["plan"], "the following arguments are required: DATASET: see lmms-stream plan --help"),
        (["merge", "all"],
         "the following arguments are required: SOURCE: list the datasets in the order of their samples: lmms-stream "
         "merge all all/chats all/code: see lmms-stream merge --help"),
        (["plan", "a", "--epochs", "many"],
         "argument --epochs: expected a whole number of at least 1, got 'many': see lmms-stream plan --help"),
        (["convert", "a", "b", "--over"],
         "unrecognized arguments: --over (did you mean --overwrite?): see lmms-stream convert --help"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_an_error_of_one_line(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize("columns", [80, pytest.param(200, marks=in_long_rounds)])
def test_tables_fit_the_terminal_and_have_colours_only_where_they_are_wanted(
    columns: int, dataset_folder: Path, tokenizer: Path
) -> None:
    command = ("inspect", str(dataset_folder), "--tokenizer", str(tokenizer))
    coloured = in_terminal(*command, columns=columns)
    assert COLOR.search(coloured)
    plain = in_terminal(*command, columns=columns, environment={"NO_COLOR": "1"})
    assert not COLOR.search(plain)
    assert "⟦" in plain  # marks stand for colours
    assert "⟦" not in coloured
    tables = [line for line in re.sub(r"\x1b\[[\d;?]*\w", "", plain).splitlines() if line[:1] in "┏┃┡│└├"]
    assert tables
    assert max(map(len, tables)) <= columns


def test_what_is_piped_has_no_escapes(dataset_folder: Path) -> None:
    command = ["plan", str(dataset_folder), "--packing-length", "1024", "--overlong", "drop", "--compare"]
    with start_module("lmms_stream", command, [{"COLUMNS": ""}]) as job:  # its output is a file, not a terminal
        done = job.complete(120)
    assert done.returncode == 0, done.stderr
    assert ESCAPE not in done.stdout + done.stderr
    tables, _, what_next = done.stdout.partition("next: ")
    assert max(map(len, tables.splitlines())) <= 80
    assert len(what_next.splitlines()) == 1  # so that it can be copied
