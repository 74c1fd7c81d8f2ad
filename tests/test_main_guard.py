"""Scripts that start workers outside of `if __name__ == "__main__":` get one error that says so."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from .conftest import run_command, write_tokens
from .processes import run_module
from .rounds import LONG, in_long_rounds

ROOT = Path(__file__).parent.parent
IMPORTS = """
import sys
from lmms_stream.converters.convert import convert
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor

def clean(row):
    return row

def read(method):
    dataset = PackedStreamingDataset("data", processor=TokensProcessor(), packing=PackingConfig(packing_length=64))
    return sum(1 for _ in PackedLoader(dataset, global_batch=1, num_workers=1, start_method=method, timeout_s=90))

def begin():
    run()
"""
STARTS = {
    "convert": 'convert("rows.jsonl", "out", num_workers=2)',
    "convert with a function of the script": 'convert("rows.jsonl", "out", num_workers=2, map=clean)',
    "spawn": 'read("spawn")',
    "forkserver": 'read("forkserver")',
}
SHORT = ("convert with a function of the script", "spawn")


def ran(folder: Path, code: str, *options: str) -> tuple[int, str, str]:
    """The exit status of a script, and what it says. options: of a new interpreter, in place of the script."""
    write_tokens(folder / "data", num_samples=20)
    (folder / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (folder / "script.py").write_text(IMPORTS + code)
    if options:
        done = run_command("env", f"PYTHONPATH={ROOT}", sys.executable, *options, cwd=folder)
    else:
        done = run_module(str(folder / "script.py"), timeout_s=120, cwd=folder)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("start", STARTS if LONG else SHORT)
def test_a_script_without_a_guard_gets_one_error_that_says_so(start: str, tmp_path: Path) -> None:
    code = f'print("begins")\ndef run():\n    {STARTS[start]}\nbegin()\nprint("ends")\n'
    status, said, errors = ran(tmp_path, code)
    assert (status, said) == (1, "begins\n")
    assert errors.count("Traceback") == 1
    line = IMPORTS.count("\n") + 4
    *_, last = errors.splitlines()
    assert last == (
        f"lmms_stream.errors.ConfigError: {tmp_path / 'script.py'}, line {line}, starts worker processes; they import "
        "this script and would run the line again: move it below `if __name__ == '__main__':`, or start no workers"
    )


GUARDED = {
    "a guard": 'if __name__ == "__main__":\n',
    "a guard with more": 'if __name__ == "__main__" and len(sys.argv) > 0:\n',
    "a guard of multiprocessing": 'import multiprocessing as mp\nif mp.current_process().name == "MainProcess":\n',
}


@pytest.mark.parametrize("start", STARTS if LONG else ["spawn"])
@pytest.mark.parametrize("guard", GUARDED if LONG else ["a guard"])
def test_a_script_whose_line_is_below_a_guard_runs(start: str, guard: str, tmp_path: Path) -> None:
    main = textwrap.indent(f"def run():\n    {STARTS[start]}\nbegin()\nprint('ends')\n", "    ")
    assert ran(tmp_path, GUARDED[guard] + main)[:2] == (0, "ends\n")


@in_long_rounds
@pytest.mark.parametrize("options", [("-m", "script"), ("-c", "import script")])
def test_a_module_without_a_guard_is_told_only_if_workers_import_it(options: tuple[str, ...], tmp_path: Path) -> None:
    status, said, errors = ran(tmp_path, f"{STARTS['convert']}\nprint('ends')\n", *options)
    if options[0] == "-m":
        assert status == 1
        assert "move it below `if __name__ == '__main__':`" in errors
    else:
        assert (status, said) == (0, "ends\n")
