"""Functions of the user's own that choose rows and make others of them: loaded by name, counted, part of the resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream import ConvertOptions, SchemaOptions, convert
from lmms_stream.converters.convert import Progress
from lmms_stream.converters.report import ConvertReport
from lmms_stream.converters.writing.reading import LOOK_UNITS
from lmms_stream.errors import ConfigError, DataError, StorageError, WorkerError
from lmms_stream.mds.packed import PackedStreamingDataset

from ..conftest import run_cli, run_command
from ..rounds import LONG
from .test_convert_runs import written

NUM_ROWS = 1000
OWN = '''
import types

def loud(row):
    return {"text": row["text"].upper()}

def odd(row):
    return row["n"] % 2 == 1

def parts(row):
    """None, a row, several rows, or several from a generator, by the row's number."""
    return [None, {"text": row["text"]}, [{"text": "a"}, {"text": "b"}], more(row), []][row["n"] % 5]

def more(row):
    yield {"text": f"first of {row['text']}"}
    yield types.MappingProxyType({"text": f"second of {row['text']}"})

def raising(row):
    if row["n"] == 7:
        return {}["nothing"]
    return row

def one_of_a_hundred(row):
    return row["n"] % 100 == 99

def none_ever(row):
    return False

class Texts:
    @staticmethod
    def shout(row):
        return {"text": row["text"] + "!"}

def emptied(row):
    return {"text": ""} if row["n"] % 4 == 1 else None

def leaving(row): raise SystemExit(3)
def number(row): return 3
def text(row): return "text"
def numbers(row): return [row, 3]
def unnamed(row): return {1: row["text"]}
def true(row): return True
def tokens(row):
    import numpy
    return {"input_ids": numpy.arange(1, 5 + row["n"] % 3)}
'''


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of rows, beside own.py in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (tmp_path / "own.py").write_text(OWN)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": n, "text": f"text {n}"}) + "\n" for n in range(NUM_ROWS)))
    return path


def texts(target: str | Path) -> list[str]:
    return [sample["text"] for sample in PackedStreamingDataset(target)[:]]


def converted(source: Any, name: str = "out", **options: Any) -> ConvertReport:
    return convert(source, name, **({"num_workers": 1, "unit_bytes": 3000} | options))


# What becomes of rows


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_map_gives_one_row_or_several_or_none_and_a_filter_chooses_before_it(rows: Path, num_workers: int) -> None:
    report = converted(rows, map="own:parts", filter="own.py:odd", num_workers=num_workers)
    expected = []
    for n in range(1, NUM_ROWS, 2):
        made = [[], [f"text {n}"], ["a", "b"], [f"first of text {n}", f"second of text {n}"], []]
        expected += made[n % 5]
    assert texts("out") == expected
    assert (report.num_left_out_by_filter, report.num_left_out_by_map) == (500, 200)
    described = json.loads(Path("out/_lmms/dataset.json").read_text())
    assert (described["num_left_out_by_filter"], described["num_left_out_by_map"]) == (500, 200)
    again = converted(rows, map="own:parts", filter="own.py:odd")
    assert (again.num_rows, again.num_left_out_by_filter, again.num_left_out_by_map) == (len(expected), 500, 200)


def test_the_command_takes_functions_of_the_current_folder(rows: Path) -> None:
    command = ("convert", str(rows), "out", "--map", "own:Texts.shout", "--filter", "own.py:one_of_a_hundred")
    result = run_cli(*command, "--workers", "2")
    assert result.returncode == 0, result.stderr
    assert texts("out") == [f"text {n}!" for n in range(99, NUM_ROWS, 100)]
    assert "990 rows that --filter left out" in result.stdout


def test_the_kind_is_that_of_the_rows_that_the_map_makes(rows: Path) -> None:
    report = converted(rows, map="own:tokens")
    assert report.kind.startswith("tokens")
    assert np.array_equal(PackedStreamingDataset("out")[2]["input_ids"], np.arange(1, 7))


def test_units_of_which_the_filter_leaves_nothing_are_passed_over(rows: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"n": 0, "text": "no"}\n' * 200)
    with rows.open("a") as file:
        file.write("{broken\n" * 60)
    report = converted(
        [empty, rows, empty], filter="own:one_of_a_hundred", unit_bytes=1000, on_error="skip", allow_repeats=True
    )
    assert texts("out") == [f"text {n}" for n in range(99, NUM_ROWS, 100)]
    assert (report.num_left_out_by_filter, report.num_rejected) == (400 + 990, 60)
    with pytest.raises(DataError, match="--filter and --map leave no row of any source: correct them"):
        converted([empty], "none", filter="own:none_ever")
    with pytest.raises(
        DataError, match=rf"leave no row of the first {LOOK_UNITS} units of .*rows\.jsonl, so the columns"
    ):
        converted([rows], "none", filter="own:none_ever", unit_bytes=100)


def test_the_limit_counts_samples_and_what_was_left_out_before_the_last(rows: Path) -> None:
    reports = [converted(rows, f"out-{size}", map="own:parts", limit=8, unit_bytes=size) for size in (100, 100_000)]
    assert [(report.num_rows, report.num_left_out_by_map) for report in reports] == [(8, 3)] * 2
    assert texts("out-100") == texts("out-100000")


def test_where_all_is_left_out_the_error_says_by_what(rows: Path) -> None:
    message = r"no sample is left .*\(the text of 250 is empty; --filter left out 500; --map left out 250\)"
    with pytest.raises(DataError, match=message):
        converted(rows, filter="own:odd", map="own:emptied")


# What is wrong


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"map": "own:raising"},
            r"rows\.jsonl:8: --map own:raising raised KeyError: 'nothing' \(line 20\): correct it",
        ),
        ({"map": "own:leaving"}, r"the first: --map own:leaving raised SystemExit: 3 \(line \d+\): correct it"),
        ({"map": "own:number"}, r"--map own:number gave 3 \(int\), expected a row \(a dict\), several of them"),
        ({"map": "own:text"}, r"--map own:text gave 'text' \(str\), expected a row"),
        ({"map": "own:numbers"}, r"--map own:numbers gave a list that holds 3 \(int\), expected only rows \(dicts\)"),
        ({"map": "own:unnamed"}, "--map own:unnamed gave a row with the column 1, whose name is not text"),
        ({"filter": "own:number"}, r"--filter own:number gave 3 \(int\), expected True or False"),
        ({"filter": "own:raising"}, r"--filter own:raising gave \{'n': 0, .* \(dict\), expected True or False"),
    ],
)
def test_what_a_function_raises_or_gives_wrong_is_named(options: dict[str, str], message: str, rows: Path) -> None:
    with pytest.raises(DataError, match=message):
        converted(rows, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"map": "own"}, "--map 'own' names no function: write it as module:function or path/to/file.py:function"),
        ({"map": "own:nothing"}, "--map own:nothing: own has no function 'nothing': correct the name"),
        (
            {"map": "not_there:f"},
            "--map not_there:f: module not_there cannot be imported .*: install it, or name its f",
        ),
        ({"filter": "not_there.py:f"}, r"--filter not_there.py:f: there is no file .*not_there\.py: correct the path"),
        ({"map": "wrong:f"}, r"--map wrong:f: module wrong cannot be imported \(ZeroDivisionError.*\): correct it"),
        ({"map": "wrong.py:f"}, r"--map wrong.py:f: .*wrong\.py cannot be run \(ZeroDivisionError.*\): correct it"),
        ({"map": "math:sqrt"}, "--map math:sqrt: math has no source file, so its changes would not be detected"),
        (
            {"map": lambda row: row},
            "map=<function .*lambda.* cannot be loaded by other processes: pass a function that",
        ),
        (
            {"map": json.JSONEncoder()},
            "map=<json.*> cannot be loaded by other processes: pass a function that a module",
        ),
    ],
)
def test_a_function_that_no_process_could_load_is_refused(options: dict[str, Any], message: str, rows: Path) -> None:
    Path("wrong.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=message):
        converted(rows, **options)


def test_a_name_that_leads_to_another_function_is_refused(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def inner(row: dict[str, Any]) -> None: ...

    inner.__qualname__ = "texts"
    with pytest.raises(
        ConfigError,
        match=r"map=<function .*: .*:texts is another object: pass an object that the module itself defines",
    ):
        converted(rows, map=inner)
    inner.__module__ = "__main__"
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(
        ConfigError, match="map=texts is a function of a notebook or a prompt, which other processes can"
    ):
        converted(rows, map=inner)


def test_rows_that_a_function_does_not_take_are_rejected_and_counted(rows: Path) -> None:
    report = converted(rows, map="own:raising", on_error="skip")
    assert (report.num_rows, report.num_rejected) == (NUM_ROWS - 1, 1)
    reject = json.loads(Path("out/_lmms/rejects.jsonl").read_text())
    assert (reject["source"], reject["row"]) == (str(rows), 8)
    assert reject["reason"] == "--map own:raising raised KeyError: 'nothing' (line 20): correct it"


def test_a_map_that_takes_rows_which_it_left_out_before_is_an_error(rows: Path) -> None:
    Path("fickle.py").write_text(FICKLE)
    with rows.open("a") as file:
        file.write('{"n": 1, "text": "again"}\n')
    with pytest.raises(
        WorkerError, match="left out all rows before, and now keep a row: their results must depend only on"
    ):
        converted(rows, map="fickle:f", unit_bytes=10_000)


FICKLE = """
seen = set()

def f(row):
    is_new = row["n"] not in seen
    seen.add(row["n"])
    return None if is_new else row
"""


# Another code is another conversion


SCRIPT = """
import os
import sys
import time
from multiprocessing import parent_process
from pathlib import Path

from lmms_stream import convert

def shorten(row):
    if row["n"] == 700 and Path("kill").exists():
        while not list(Path(sys.argv[2]).glob("shard.*")):  # another worker makes it
            time.sleep(0.05)
        os.kill(parent_process().pid if sys.argv[1] == "2" else os.getpid(), 9)  # the process that converts
    text = row["text"] + " shortened"
    return [{"text": text}, {"text": [7] if row["n"] % 10 == 0 else text}] if row["n"] % 3 else None

if __name__ == "__main__":
    sizes = {"unit_bytes": 3000, "shard_bytes": 2000}
    workers, target = int(sys.argv[1]), sys.argv[2]
    report = convert("rows.jsonl", target, map=shorten, on_error="skip", num_workers=workers, **sizes)
    print(report.num_rows, report.num_left_out_by_map, report.num_rejected)
"""


@pytest.mark.parametrize("num_workers", ["2", *(["1"] if LONG else [])])
def test_a_script_that_is_killed_goes_on_to_the_same_bytes_and_refuses_changed_code(
    rows: Path, num_workers: str
) -> None:
    Path("script.py").write_text(SCRIPT)
    Path("kill").touch()
    killed = run_command(sys.executable, "script.py", num_workers, "out", timeout_s=120)
    assert killed.returncode == -9
    assert list(Path("out").glob("shard.*"))
    assert not Path("out/index.json").exists()
    Path("kill").unlink()
    Path("script.py").write_text(SCRIPT.replace(" shortened", " cut"))
    changed = run_command(sys.executable, "script.py", num_workers, "out", timeout_s=120)
    assert "holds an unfinished conversion with other code of " in changed.stderr
    assert "script.py:shorten: restore that code and run the same command, or pass --overwrite" in changed.stderr
    Path("script.py").write_text(SCRIPT)
    resumed = run_command(sys.executable, "script.py", num_workers, "out", timeout_s=120)
    assert resumed.stdout.split() == ["1200", "334", "66"], resumed.stderr
    unkilled = run_command(sys.executable, "script.py", "1", "once", timeout_s=120)
    assert unkilled.returncode == 0, unkilled.stderr
    assert written("out") == written("once")


def test_what_is_finished_is_done_again_where_the_code_has_changed_and_that_is_wanted(rows: Path) -> None:
    converted(rows, map="own.py:loud")
    assert texts("out")[0] == "TEXT 0"
    Path("own.py").write_text(OWN.replace(".upper()", ".title()"))
    with pytest.raises(StorageError, match="holds a dataset already: choose another target, or pass --overwrite"):
        converted(rows, map="own.py:loud")
    converted(rows, map="own.py:loud", overwrite=True)
    assert texts("out")[0] == "Text 0"


def test_a_module_that_was_changed_after_its_import_is_not_taken_for_the_new_one(rows: Path) -> None:
    converted(rows, map="own:loud")
    Path("own.py").write_text(OWN.replace(".upper()", ".title()"))
    with pytest.raises(ConfigError, match="--map own:loud: its file was changed after its import: restart"):
        converted(rows, "other", map="own:loud")


def test_code_that_changes_while_rows_are_given_to_it_ends_the_conversion(rows: Path) -> None:
    def change(found: object) -> None:
        Path("own.py").write_text(Path("own.py").read_text() + "\n")

    with pytest.raises(
        WorkerError, match=r"the code of --map own\.py:loud was changed during the conversion: restore it"
    ):
        converted(rows, map="own.py:loud", num_workers=2, progress=Progress(say=change))
    with pytest.raises(
        DataError, match=r"the code of own\.py:odd was changed while rows were given to it: start again"
    ):
        converted(rows, "other", filter="own.py:odd", progress=Progress(begin=change))


def test_changes_of_the_file_that_defines_a_function_count_where_another_file_names_it(rows: Path) -> None:
    Path("shown.py").write_text("from own import loud\n")
    converted(rows, map="shown.py:loud")
    assert texts("out")[1] == "TEXT 1"
    Path("own.py").write_text(OWN.replace(".upper()", ".title()"))
    with pytest.raises(ConfigError, match=r"--map shown\.py:loud: its file was changed after its import"):
        converted(rows, map="shown.py:loud")


def test_options_are_public_and_functions_may_stand_in_them(rows: Path) -> None:
    options = ConvertOptions(schema=SchemaOptions(map="own:loud", filter="own:odd"), limit=3)
    assert converted(rows, options=options).num_rows == 3
    assert texts("out") == ["TEXT 1", "TEXT 3", "TEXT 5"]
