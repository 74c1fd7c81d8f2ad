"""The processes of a run: their group, and how they end together."""

from __future__ import annotations

import atexit
import datetime
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...errors import LmmsStreamError, TrainingError
from ...types import World, nodes_of_ranks
from .flight_recorder import record_collectives
from .interface import set_interface
from .joining import join_ranks

_LOST_RANK = ("gloo/transport/", "Application timeout caused pair closure")  # gloo raises plain RuntimeErrors
_made: dist.ProcessGroup | None = None  # the process group that init_distributed made
_told: dist.ProcessGroup | None = None  # one that is somebody else's, whose other timeout was told
_beside: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None  # one without CPUs, and that of gloo beside it
logger = logging.getLogger("lmms_stream")
STOPPED_STATUS = 85  # exit status of a run that a signal told to stop, and that has saved a checkpoint


def init_distributed(
    timeout_s: float, *, replication: int = 1, traces: Path | None = None
) -> tuple[World, torch.device]:
    """Join torchrun's process group (or make one of this process alone): nccl with CUDA, else gloo.

    One that is there is taken as it is; a warning says where its timeout is another. Where it has no backend for CPUs
    (transformers' arguments make one of nccl alone), one of gloo is made beside it: see cpu_group. What is made here
    ends with end_distributed, or with the process. traces: a folder for what NCCL did when a collective times out.
    Raises TrainingError when a rank does not come within timeout_s, or is gone when others connect with it.
    """
    global _made, _told
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        if cuda and traces is not None:
            record_collectives(traces)
        _make_group("cpu:gloo,cuda:nccl" if cuda else "gloo", device, timeout_s)
        if _made is None:
            atexit.register(end_distributed)
        _made = dist.group.WORLD
    elif (found_s := group_timeout_s(dist.group.WORLD, device)) != timeout_s and dist.group.WORLD is not _told:
        _told = dist.group.WORLD
        if dist.get_rank() == 0:
            logger.warning(
                "the process group that is there has a timeout of %g s, and train.timeout_s is %g: its collectives "
                "wait for the former", found_s, timeout_s,
            )  # fmt: skip
    cpu_group(timeout_s)
    world_size = dist.get_world_size()
    local_sizes = gather([int(os.environ.get("LOCAL_WORLD_SIZE", world_size))], world_size).ravel().int().tolist()
    world = World(
        rank=dist.get_rank(),
        world_size=world_size,
        ranks_per_node=nodes_of_ranks(local_sizes),
        replication=replication,
    )
    return world, device


def _make_group(backend: str, device: torch.device, timeout_s: float) -> None:
    """The process group of torchrun's ranks, or of this process alone."""
    if "RANK" not in os.environ:
        timeout = datetime.timedelta(seconds=timeout_s)
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
        return
    set_interface(os.environ)
    tell_of_restarts(os.environ)
    try:
        join_ranks(backend, device, timeout_s=timeout_s)
    except LmmsStreamError:
        raise
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise TrainingError(
            f"rank {os.environ['RANK']} waited for another rank, which ended or did not come within {timeout_s:g} s "
            f"({' '.join(str(error).split())[:200]}): look for the first error of the others, or raise train.timeout_s"
        ) from error


def tell_of_restarts(environment: Mapping[str, str]) -> None:
    """Warn of a torchrun that keeps one store for the ranks of all starts, where there may be several."""
    restarts, shared = environment.get("TORCHELASTIC_MAX_RESTARTS", "0"), "TORCHELASTIC_USE_AGENT_STORE"
    if environment["RANK"] == "0" and restarts != "0" and environment.get(shared) == "True":
        logger.warning(
            "torchrun may start these ranks again, and keeps the addresses of those before them: start it as python -m "
            "lmms_stream.train.torchrun, or set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (docs/nodes.md)"
        )


def end_distributed() -> None:
    """End the process groups that init_distributed made; one that somebody else made stays."""
    global _made, _beside
    if _beside is not None and dist.is_initialized() and dist.group.WORLD is _beside[0]:
        dist.destroy_process_group(_beside[1])
    _beside = None
    if _made is not None and dist.is_initialized() and dist.group.WORLD is _made:
        dist.destroy_process_group()
    _made = None


def takes_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """Whether a group has a backend for tensors on the CPU."""
    return torch.device("cpu") in group._device_types


def cpu_group(timeout_s: float | None = None) -> dist.ProcessGroup:
    """All ranks, for tensors on the CPU: their process group, or one of gloo beside it, which the first call makes.

    All ranks call it first at the same point.
    """
    global _beside
    default = dist.group.WORLD
    assert default is not None
    if takes_cpu_tensors(default):
        return default
    if _beside is None or _beside[0] is not default:
        timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        made = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(made, dist.ProcessGroup)
        _beside = default, made
    return _beside[1]


def group_timeout_s(group: dist.ProcessGroup | None, device: torch.device) -> float:
    """How long the collectives of a group on this device wait for other ranks, in seconds."""
    assert group is not None
    options = group._get_backend(device).options
    return float(options._timeout.total_seconds())


def seed_step(seed: int, *, step: int, group: int) -> None:
    """Seed torch for a step, so that a resumed run draws the same (for dropout)."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, group]).generate_state(1, np.uint64)[0] >> np.uint64(1)))


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether torch raised this because another rank ended, or did not come to a collective in time."""
    return isinstance(error, dist.DistError) or any(words in str(error) for words in _LOST_RANK)


def gather_objects(value: object, world_size: int) -> list[Any]:
    """The value of every rank, in their order; all ranks call it. Values must be picklable."""
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, value, group=cpu_group())
    return everyone


def gather(values: Sequence[float], world_size: int) -> torch.Tensor:
    """The values of every rank: float64[world_size, len(values)], on the CPU; exact for counts below 2^53."""
    mine = torch.tensor(values, dtype=torch.float64)
    everyone = torch.empty(world_size * len(values), dtype=torch.float64)
    dist.all_gather_into_tensor(everyone, mine, group=cpu_group())
    return everyone.view(world_size, len(values))
