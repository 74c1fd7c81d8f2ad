"""The processes of a run: their group, their mesh, and how they end together."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...errors import ConfigError
from ...types import World

_LOST_RANK = ("gloo/transport/", "Application timeout caused pair closure")  # gloo raises plain RuntimeErrors
STOPPED_STATUS = 85  # exit status of a run that a signal told to stop, and that has saved a checkpoint


def init_distributed(timeout_s: float, *, replication: int = 1) -> tuple[World, torch.device]:
    """Join torchrun's process group (or make one of this process alone): nccl with CUDA, else gloo."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        options: dict[str, Any] = {}
        if "RANK" not in os.environ:
            options = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
        backend: Literal["cpu:gloo,cuda:nccl", "gloo"] = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s), **options)
    world_size = dist.get_world_size()
    num_nodes = world_size // int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    world = World(rank=dist.get_rank(), world_size=world_size, num_nodes=num_nodes, replication=replication)
    return world, device


def build_mesh(device: torch.device, *, world_size: int, shard_ranks: int | None) -> DeviceMesh:
    """All ranks in a row, or, with fewer shard_ranks, copies of the model by ranks that share one (HSDP)."""
    if shard_ranks is None or shard_ranks == world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    if world_size % shard_ranks:
        raise ConfigError(
            f"train.shard_ranks {shard_ranks} does not divide the world size {world_size}: choose a divisor"
        )
    return init_device_mesh(device.type, (world_size // shard_ranks, shard_ranks), mesh_dim_names=("copy", "shard"))


def seed_step(seed: int, *, step: int, group: int) -> None:
    """Seed torch for a step, so that a resumed run draws the same (for dropout)."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, group]).generate_state(1, np.uint64)[0] >> np.uint64(1)))


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether torch raised this because another rank ended, or did not come to a collective in time."""
    return isinstance(error, dist.DistError) or any(words in str(error) for words in _LOST_RANK)


def gather(values: Sequence[float], world_size: int) -> torch.Tensor:
    """The values of every rank: float64[world_size, len(values)], on the CPU; exact for counts below 2^53."""
    mine = torch.tensor(values, dtype=torch.float64)
    everyone = torch.empty(world_size * len(values), dtype=torch.float64)
    dist.all_gather_into_tensor(everyone, mine)
    return everyone.view(world_size, len(values))
