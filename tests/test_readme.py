"""What the README says to type is typed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.arrows import files
from tests.conftest import last_words
from tests.processes import run_module
from tests.rounds import LONG

ROOT = Path(__file__).parent.parent


def bash_blocks() -> list[list[str]]:
    text = (ROOT / "README.md").read_text()
    return [block.strip().splitlines() for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)]


def test_the_first_block_is_the_makefiles_commands() -> None:
    assert bash_blocks()[0] == ["make demo", "make test"]
    for command in bash_blocks()[0]:
        subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True, timeout=60)


def test_every_other_command_runs_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    scripts = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{scripts}:{os.environ['PATH']}"}
    commands = [command for block in bash_blocks()[1:] for command in block]
    assert len(commands) > 5
    for number, command in enumerate(commands):
        words = shlex.split(command)
        is_forked = not LONG and words[0] in ("lmms-stream", "python") and "--nproc" not in words and number > 1
        if is_forked:  # from a process that has its imports: the same command, some seconds earlier
            program, *arguments = words[1:] if words[0] == "python" else ["lmms_stream", *words[1:]]
            result = run_module(program, *arguments, timeout_s=200, cwd=tmp_path)
        else:
            result = subprocess.run(
                words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
            )
        assert result.returncode == 0, f"{command}\n{last_words(result.stdout)}\n{last_words(result.stderr)}"
    for name in ("plan.png", "run.png"):
        assert (tmp_path / "build" / name).read_bytes().startswith(b"\x89PNG")
    log = (tmp_path / "build" / "run" / "train_log.jsonl").read_text().splitlines()
    assert len(log) == 6


def test_every_folder_of_the_tree_is_named() -> None:
    tree = (ROOT / "README.md").read_text().split("## Where things are")[1].split("##")[0]
    named = set(re.findall(r"(?:converters|lmms_stream)(?:/\w+)*(?=/)", tree))
    assert named == {str(path.parent.relative_to(ROOT)) for path in files().values()}
