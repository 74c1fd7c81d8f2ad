"""Ranks of a job, started as torchrun starts them, but forked from a server that has imported what they use.

torchrun and each of its ranks take some seconds to import torch and transformers. Here they are forked
(tests/processes.py), each in a session of its own, with the environment that torchrun gives (test_launcher.py compares
the two) and a store that the process of the tests serves, as torchrun's does. A rank that fails ends the others.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lmms_stream.types import World
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..processes import ROOT, Job, start_module


@contextmanager
def start_job(
    nproc: int,
    module: str,
    *arguments: str,
    num_nodes: int = 1,
    ranks_per_node: Sequence[int] = (),
    cwd: Path = ROOT,
) -> Iterator[Job]:
    """A job of `nproc` ranks that run a module with its arguments; nothing of it is left at the end.

    num_nodes: that the environment of ranks names, of equal size; ranks_per_node: of nodes of unequal size.
    """
    world = World(world_size=nproc, num_nodes=num_nodes, ranks_per_node=ranks_per_node)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="errors-") as name:
        ranks = [_of_rank(replace(world, rank=rank), port=store.port, folder=Path(name)) for rank in range(nproc)]
        with start_module(module, arguments, ranks, cwd=cwd) as job:
            yield job


def run_job(
    nproc: int,
    module: str,
    *arguments: str,
    timeout_s: float,
    num_nodes: int = 1,
    ranks_per_node: Sequence[int] = (),
    cwd: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run a job to its end, whatever its exit status."""
    with start_job(nproc, module, *arguments, num_nodes=num_nodes, ranks_per_node=ranks_per_node, cwd=cwd) as job:
        return job.complete(timeout_s)


def environment_of(world: World) -> dict[str, str]:
    """The variables by which torchrun tells a rank its place among ranks and nodes."""
    rank, nproc = world.rank, world.world_size
    return {
        **{name: str(rank) for name in ("RANK", "ROLE_RANK")},
        **{name: str(nproc) for name in ("WORLD_SIZE", "ROLE_WORLD_SIZE")},
        "LOCAL_RANK": str(rank - world.first_ranks[world.node]),
        "LOCAL_WORLD_SIZE": str(world.nodes[world.node]),
        "GROUP_RANK": str(world.node),
        "GROUP_WORLD_SIZE": str(world.num_nodes),
    }


def _of_rank(world: World, *, port: int, folder: Path) -> dict[str, str]:
    """What torchrun adds to the environment of a rank."""
    return {
        **environment_of(world),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCHELASTIC_ERROR_FILE": str(folder / f"error-{world.rank}.json"),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": folder.name,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
