"""The command that starts a run on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # what torchrun tells a rank


def torchrun_command(config: Path, overrides: Sequence[str] = (), *, nproc: int) -> list[str]:
    """The command that trains with `nproc` processes on this machine."""
    return _torchrun("lmms_stream.train", [str(config), *overrides], nproc=nproc)


def train_command(config: Path, overrides: Sequence[str] = (), *, nproc: int) -> list[str]:
    """The same, but one process needs no torchrun, which imports torch for itself before it starts the rank.

    So it takes half as long to the first step, and its exit status and signals are those of the run itself.
    """
    return module_command("lmms_stream.train", [str(config), *overrides], nproc=nproc)


def module_command(module: str, arguments: Sequence[str], *, nproc: int) -> list[str]:
    """The command that runs a module in one process, or in ranks of torchrun."""
    if nproc == 1:
        return [sys.executable, "-m", module, *arguments]
    return _torchrun(module, arguments, nproc=nproc)


def _torchrun(module: str, arguments: Sequence[str], *, nproc: int) -> list[str]:
    torchrun = [sys.executable, "-m", "lmms_stream.train.torchrun", "--standalone", f"--nproc-per-node={nproc}"]
    return [*torchrun, "-m", module, *arguments]


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a process is no rank of another job's."""
    return {name: value for name, value in environment.items() if name not in _RANK_VARIABLES}


def start(config: Path, overrides: Sequence[str] = (), *, nproc: int, environment: Mapping[str, str]) -> NoReturn:
    """Become the command that trains; it does not return."""
    command = train_command(config, overrides, nproc=nproc)
    sys.stdout.flush()
    os.execve(command[0], command, without_rank(environment))
