from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lmms_stream.__main__ import main
from lmms_stream.cli.convert import one_value_an_option
from lmms_stream.cli.main import build_parser
from lmms_stream.converters.rows.kinds import KINDS, column_roles
from lmms_stream.converters.rows.speakers import ROLES
from lmms_stream.tools.demo.corpus import Corpus
from lmms_stream.train.__main__ import main as train

from ..conftest import run_cli

VERBS = {  # that help begins with; add the verb of a new option
    "change", "check", "compare", "compress", "count", "cut", "decode", "do", "draw", "end", "exit", "fill", "give",
    "join", "keep", "learn", "leave", "make", "measure", "merge", "mix", "name", "pack", "print", "put", "read",
    "replace", "report", "run", "say", "separate", "set", "share", "show", "shuffle", "spread", "start", "store",
    "take", "train", "use", "wait", "write",
}  # fmt: skip
COMMANDS = (
    "convert", "index", "verify", "inspect", "audit", "merge", "plan", "profile", "train", "plot", "export", "watch",
    "ledger", "simulate", "unload", "demo",
)  # fmt: skip


def subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def test_every_command_is_there() -> None:
    assert sorted(subparsers()) == sorted(COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], ["run.yaml", "-h"]])
def test_training_by_torchrun_has_help_with_an_example(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(arguments) == 0
    assert "example:\n  torchrun --nproc-per-node 2 -m lmms_stream.train run.yaml" in capsys.readouterr().out


def test_every_option_says_what_it_does_by_a_verb() -> None:
    for command, parser in subparsers().items():
        for action in parser._actions:
            assert action.help, f"{command} {action.dest} has no help"
            assert action.help.split()[0].rstrip(",:") in VERBS, f"{command} {action.dest}: {action.help}"


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["-c", "import lmms_stream"], set()),
        (["-m", "lmms_stream", "--help"], set()),
        (["-c", "import lmms_stream.converters.append, lmms_stream.converters.stored.verify"], {"pyarrow"}),
    ],
)
def test_importing_and_asking_for_help_load_no_heavy_library(arguments: list[str], needed: set[str]) -> None:
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    seconds = time.monotonic() - started
    imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert "lmms_stream" in imported
    heavy = {"torch", "transformers", "streaming", "pyarrow", "boto3", "matplotlib"}
    assert imported & heavy <= needed
    sys.stdout.write(f"{' '.join(arguments)}: {seconds:.2f} s\n")


TWO = {"split": ["train=.9", "validation=.1"]}


@pytest.mark.parametrize(
    ("line", "sources", "expected"),
    [
        ("--split train=.9 validation=.1 a.jsonl out", ["a.jsonl"], TWO),
        ("a.jsonl out --split train=.9 validation=.1", ["a.jsonl"], TWO),
        ("a.jsonl --split train=.9 --split validation=.1 out --overwrite", ["a.jsonl"], TWO),
        ("--split train=.9 validation=.1 data/day=3/a.jsonl b out", ["data/day=3/a.jsonl", "b"], TWO),
        ("--limit 3 --columns messages=chat images=jpg hf:x?split=train out", ["hf:x?split=train"],
         {"columns": ["messages=chat", "images=jpg"], "limit": 3}),
        ("--roles human=user a.jsonl out --roles gpt=assistant", ["a.jsonl"],
         {"roles": ["human=user", "gpt=assistant"]}),
        ("--keep id a.jsonl out", ["a.jsonl"], {"keep": ["id"]}),
        ("--keep id --keep lang a.jsonl b.jsonl out", ["a.jsonl", "b.jsonl"], {"keep": ["id", "lang"]}),
        ("a.jsonl out --keep id lang", ["a.jsonl"], {"keep": ["id", "lang"]}),
        ("--keep a.jsonl out", ["a.jsonl"], {"keep": [""]}),
        ("a.jsonl out --keep --overwrite", ["a.jsonl"], {"keep": [""], "overwrite": True}),
        ("a.jsonl out", ["a.jsonl"], {"keep": None, "split": None, "columns": [], "roles": []}),
    ],
)  # fmt: skip
def test_options_of_several_values_leave_what_follows_them(
    line: str, sources: list[str], expected: dict[str, object]
) -> None:
    words = one_value_an_option(["convert", *line.split()])
    options = build_parser().parse_args(words)
    assert (options.sources, options.target) == (sources, "out")
    assert {name: getattr(options, name) for name in expected} == expected


def test_a_command_whose_options_come_first_converts(corpus: Corpus, tmp_path: Path) -> None:
    command = ("convert", "--split", "train=.9", "validation=.1", str(corpus.functions), str(tmp_path / "out"))
    result = run_cli(*command)
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["train", "validation"]
    result = run_cli(*command)
    assert result.returncode == 0, result.stderr
    assert "is there already, of the same sources and options: nothing to do" in " ".join(result.stdout.split())


def test_help_of_convert_lists_kinds_of_rows_and_roles(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    shown = capsys.readouterr().out
    for name in KINDS:
        assert f"\n  {name} " in shown
    for role in (*column_roles(), *ROLES):
        assert re.search(rf"\b{role}\b", shown[shown.index("kinds of rows") :])


def test_a_conversion_says_what_was_left_out_and_what_to_do_next(tokenizer: Path, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"text": f"row {number}"} for number in range(2000)]
    rows += [{"text": ""}, {"text": ["a list"]}]
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = tmp_path / "out"
    shown = run_cli("convert", str(source), str(target), "--on-error", "skip").stdout
    assert "2,000" in shown
    assert "1 row of empty text" in shown
    assert "1 row with values that do not fit, listed in _lmms/rejects.jsonl" in shown
    assert "not counted" in shown
    assert "KiB in 1 shard " in shown
    assert f"next: lmms-stream index {target} --tokenizer PATH" in shown

    command = ("convert", str(source), str(target), "--on-error", "skip", "--tokenizer", str(tokenizer))
    shown = run_cli(*command, "--processor", "text", "--overwrite").stdout
    assert " a sample" in shown
    assert f"next: lmms-stream plan {target} --packing-length 4096 --overlong split" in shown


def test_commands_report_what_they_did(corpus: Corpus, tokenizer: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    result = run_cli("convert", str(corpus.functions), target, "--tokenizer", str(tokenizer))
    assert result.returncode == 0, result.stderr
    assert "samples" in result.stdout
    assert f"{corpus.num_functions:,}" in result.stdout
    plot = tmp_path / "plan.svg"
    result = run_cli("plan", target, "--packing-length", "1024", "--overlong", "drop", "--plot", str(plot))
    assert result.returncode == 0, result.stderr
    assert "efficiency" in result.stdout
    assert "%" in result.stdout
    assert plot.read_text().startswith("<?xml")
    result = run_cli("index", target, "--tokenizer", str(tokenizer))
    assert result.returncode == 0, result.stderr
    assert "fingerprint" in result.stdout


def test_errors_are_one_line_and_a_failure(corpus: Corpus, tokenizer: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps({"messages": []}) + "\n")
    converted = str(tmp_path / "out")
    assert run_cli("convert", str(corpus.functions), converted, "--tokenizer", str(tokenizer)).returncode == 0
    for arguments, message in (
        (["convert", str(empty), str(tmp_path / "x")], "empty.jsonl is empty (0 bytes): leave it out"),
        (["convert", str(broken), str(tmp_path / "x")], "broken.jsonl:1: expected a list of messages"),
        (["convert", str(empty), str(tmp_path / "x"), "--tokenize"], "--tokenize needs a tokenizer"),
        (["plan", converted, "--packing-length", "64"], "are longer than packing_length 64"),
        (["plan", converted, "--packing-length", str(1 << 40)], "packing_length must be from 1 to"),
        (["plan", str(tmp_path / "none"), "--packing-length", "8"], "holds no dataset"),
    ):
        result = run_cli(*arguments)
        assert result.returncode == 1
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
        assert message in line


def test_unknown_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["plan", "x", "--packing-length", "8", "more"], ["train", "x.yaml", "--nproc", "2", "--smell"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            ["--world-size", "8", "--num-nodes", "3"],
            "3 nodes cannot have equal shares of 8 ranks: choose a divisor of 8",
        ),
    ],
)
def test_numbers_of_a_plan_that_make_no_sense_are_named(
    option: list[str], message: str, dataset_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(dataset_folder), "--packing-length", "2048", "--overlong", "drop", *option]) == 1
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_numbers_below_their_least_are_errors_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Of every option that is a whole number, but for an offset that may count from the end."""
    tried = 0
    for command, parser in subparsers().items():
        for action in parser._actions:
            name = action.option_strings[-1] if action.option_strings else ""
            if getattr(action.type, "__qualname__", "").startswith("at_least"):
                tried += 1
                with pytest.raises(SystemExit) as stop:
                    main([command, name, "-1"])
                assert stop.value.code == 2, name
                assert f"{name}: expected a whole number of at least" in capsys.readouterr().err
            assert action.type is not int or name == "--sample", f"{command} {name}"
    assert tried > 40


def test_output_that_cannot_be_written_is_an_error_and_a_closed_one_is_not_damage(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "some words"}\n')
    assert run_cli("convert", str(rows), str(tmp_path / "out")).returncode == 0
    command = [sys.executable, "-m", "lmms_stream"]
    for unbuffered in ("", "1"):
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        for words in (["--help"], ["verify", str(tmp_path / "out")]):
            with Path("/dev/full").open("w") as full:
                result = subprocess.run(
                    [*command, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=environment
                )
            assert result.returncode == 1
            assert result.stderr.startswith("error: standard output cannot be written (No space left on device): free")
            assert len(result.stderr.splitlines()) == 1
        reading, writing = os.pipe()
        os.close(reading)
        verify = [*command, "verify", str(tmp_path / "out")]
        result = subprocess.run(verify, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, env=environment)
        os.close(writing)
        assert (result.returncode, result.stderr) == (141, "")


def test_bash_completes_commands_options_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--completion", "bash"])
    assert stop.value.code == 0
    script = capsys.readouterr().out
    for words, completed in (
        (["con"], "convert"), (["convert", "--over"], "--overwrite"), (["convert", "--engine", ""], "processes ray"),
    ):  # fmt: skip
        line = " ".join(f"'{word}'" for word in ("lmms-stream", *words))
        ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_lmms_stream; echo ${{COMPREPLY[@]}}"
        result = subprocess.run(
            ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=60, check=True
        )
        assert result.stdout.strip() == completed
    with pytest.raises(SystemExit):
        main(["--completion", "zsh"])
    assert capsys.readouterr().out.startswith("#compdef lmms-stream")
