"""The torchrun command, extended: SIGUSR1 is passed on to ranks, and nodes may return.

Plain torchrun does neither: SIGUSR1 ends plain torchrun without a save. torch 2.15 has a single store for all starts of
a job: ranks find the addresses of ended ranks, and a returning node waits for ever. With restarts, therefore, each
start gets a new store, served by rank 0. Without restarts torchrun's store is kept: it outlives rank 0, and other ranks
can read how rank 0 ended.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ..errors import ConfigError
from ..processes.family import end_process

OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # each start of the ranks has its own store
TOLD_STATUS = 1  # exit status of torchrun ended by a signal


def main() -> int:
    """Run torchrun with this process's arguments and return the exit status.

    If all ranks were told to stop, and saved, this is their status, 85.
    """
    try:
        gc.disable()  # objects of imports are kept; searching them for garbage takes 0.1 s or more
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main as torchrun

        gc.enable()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted before a rank was started\n")
        return 130
    if starts_again(sys.argv[1:]):
        os.environ.setdefault(OWN_STORES, "1")
    signal.signal(signal.SIGUSR1, _tell_ranks)
    try:
        torchrun()
    except SignalException as told:  # the ranks received the signal and have ended
        sys.stderr.write(f"torchrun: {told.sigval.name} ended the ranks\n")
        return TOLD_STATUS
    except ChildFailedError as failed:
        from .run.distributed import STOPPED_STATUS

        # A rank that ends later than another one gets torchrun's SIGTERM: all have saved by then.
        if {failure.exitcode for failure in failed.failures.values()} - {-signal.SIGTERM} != {STOPPED_STATUS}:
            raise
        sys.stderr.write("torchrun: the ranks were told to stop, and have saved\n")
        return STOPPED_STATUS
    except KeyboardInterrupt:  # torchrun had no handler yet
        sys.stderr.write("interrupted before all ranks were started\n")
        return 130
    return 0


def starts_again(arguments: Sequence[str]) -> bool:
    """Whether torchrun may start ranks again: the arguments allow restarts, or a range of nodes."""
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=True):
        name, separator, value = argument.replace("_", "-").partition("=")
        value = value if separator else following
        if (name == "--max-restarts" and value != "0") or (name == "--nnodes" and ":" in value):
            return True
        if name == "-m":  # the script's arguments follow
            break
    return False


def _tell_ranks(number: int, _: FrameType | None) -> None:
    for listed in Path("/proc/self/task").glob("*/children"):
        for child in listed.read_text().split():
            with suppress(ProcessLookupError, FileNotFoundError):  # the process has ended meanwhile
                if b"lmms_stream.train" in Path("/proc", child, "cmdline").read_bytes().split(b"\0"):
                    os.kill(int(child), number)


# The command that starts a run on this machine.

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # set by torchrun for a rank


def train_command(config: Path, overrides: Sequence[str] = (), *, nproc: int) -> list[str]:
    """Return the command to train with `nproc` processes on this machine.

    A single process starts without torchrun, because torchrun imports torch before starting the rank: the first step
    comes in half the time, and exit status and signals belong to the run itself.
    """
    return module_command("lmms_stream.train", [str(config), *overrides], nproc=nproc)


def module_command(module: str, arguments: Sequence[str], *, nproc: int) -> list[str]:
    """Return the command to run a module in a single process, or in ranks of torchrun."""
    if nproc == 1:
        return [sys.executable, "-m", module, *arguments]
    torchrun = [sys.executable, "-m", "lmms_stream.train.torchrun", "--standalone", f"--nproc-per-node={nproc}"]
    return [*torchrun, "-m", module, *arguments]


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of a torchrun rank."""
    return {name: value for name, value in environment.items() if name not in _RANK_VARIABLES}


def start(
    config: Path, overrides: Sequence[str] = (), *, nproc: int | None, environment: Mapping[str, str]
) -> NoReturn:
    """Replace this process by the training command; never return.

    nproc: processes to start; None: a single process, or this process's rank of torchrun.
    """
    if nproc is not None:
        check_not_in_torchrun(environment, remedy=f"leave out --nproc {nproc}")
    is_rank = _is_rank_of_torchrun(environment)
    if not is_rank and environment.get("WORLD_SIZE", "1") != "1":
        sys.stderr.write(
            f"WORLD_SIZE={environment['WORLD_SIZE']} is not used: this command trains alone. For one of several ranks, "
            "start `python -m lmms_stream.train RUN.yaml`\n"
        )
    command = train_command(config, overrides, nproc=nproc or 1)
    sys.stdout.flush()
    os.execve(command[0], command, dict(environment) if is_rank else without_rank(environment))


def check_not_in_torchrun(environment: Mapping[str, str], *, remedy: str) -> None:
    """Raise ConfigError if torchrun started this process as a rank among several."""
    if _is_rank_of_torchrun(environment):
        rank, size = environment.get("RANK"), environment["WORLD_SIZE"]
        raise ConfigError(f"torchrun started this command as rank {rank} of {size}: {remedy}")


def _is_rank_of_torchrun(environment: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in environment and environment.get("WORLD_SIZE", "1") != "1"


if __name__ == "__main__":
    end_process(main())
