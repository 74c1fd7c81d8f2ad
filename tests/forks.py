"""Scripts that run in forks of one new interpreter, which has imported libraries, but no module of this project.

So many scripts pay once for the import of torch and transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from .processes import ENVIRONMENT

# Of tests whose fixture runs many scripts: on a busy machine they take minutes.
limited = pytest.mark.timeout(1200)

# Processes end without taking their modules apart, which takes longer than some scripts.
PROGRAM = """
import atexit, importlib, json, os, sys, traceback

def end(status):
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

asked = json.load(sys.stdin)
for name in asked["imports"]:
    importlib.import_module(name)
statuses = []
for number, script in enumerate(asked["scripts"]):
    if not (child := os.fork()):
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{asked['folder']}/{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        try:
            exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
        except SystemExit as exit:
            end(exit.code or 0)
        except BaseException:
            traceback.print_exc()
            end(1)
        end(0)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(statuses))
end(0)
"""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a script: its exit status, standard output and standard error."""

    status: int
    stdout: str
    stderr: str


def command(*words: str) -> str:
    """Return the script of `lmms-stream` with its words."""
    return f"import sys\nfrom lmms_stream.__main__ import main\nsys.argv[1:] = {list(words)}\nsys.exit(main())"


def run_forks(
    scripts: Mapping[str, str],
    folder: Path,
    *,
    imports: Sequence[str] = ("torch", "transformers"),
    python: Path | str = sys.executable,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 900,
) -> dict[str, Ended]:
    """Run each script to its end, one after the other, with `folder` as the current one; return their ends by name."""
    output = folder / "output-of-forks"
    output.mkdir(exist_ok=True)
    done = subprocess.run(
        [str(python), "-c", PROGRAM], cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False,
        input=json.dumps({"imports": list(imports), "scripts": list(scripts.values()), "folder": str(output)}),
        env=os.environ | ENVIRONMENT if environment is None else dict(environment),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {
        name: Ended(
            status=status,
            stdout=(output / f"{number}.stdout").read_text(),
            stderr=(output / f"{number}.stderr").read_text(),
        )
        for number, (name, status) in enumerate(zip(scripts, json.loads(done.stdout), strict=True))
    }
