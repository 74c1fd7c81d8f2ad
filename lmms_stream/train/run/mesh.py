"""Ranks -> coordinates: the copy of the model, the shard, the part of a pack's tokens, the part of the matrices.

The layout is [copy, shard, sp, tp], tp fastest: ranks of a tensor parallel group are consecutive and on the same node.
Example: among 8 ranks with shard_ranks 2, sequence_parallel 1 and tensor_parallel 2, rank 5 is
(copy 1, shard 0, sp 0, tp 1). Rank 5 reads rank 4's packs, holds the other half of the matrices, and shares this half
with rank 7. Within a copy, each expert_parallel consecutive ranks hold different experts and read different packs.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ConfigError
from ...types import World
from .distributed import STACKS, init_distributed
from .settings import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Meshes:
    """The groups of this rank. All their collectives wait for timeout_s.

    fsdp: ranks that shard a copy of the model and average gradients, including sequence parallel ranks: ("shard",), or
    ("copy", "shard") with copies (HSDP). sp: ranks with parts of a pack's tokens; tp: ranks with parts of a copy's
    matrices; ep: ranks with different experts of a copy; experts: ranks sharding the same experts, like fsdp for all
    other parameters. sp, tp, ep and experts are None if not used.
    """

    fsdp: DeviceMesh
    sp: DeviceMesh | None = None
    tp: DeviceMesh | None = None
    ep: DeviceMesh | None = None
    experts: DeviceMesh | None = None


def join_world(config: TrainConfig) -> tuple[World, torch.device]:
    """Join the process group, see init_distributed; replication is config.group_ranks.

    Raises ConfigError for degrees that do not divide the world size.
    """
    world, device = init_distributed(config.timeout_s, traces=Path(config.output_dir) / STACKS)
    _shard_ranks(config, world.world_size)
    return replace(world, replication=config.group_ranks), device


def build_meshes(device: torch.device, *, world_size: int, config: TrainConfig) -> Meshes:
    """Create the groups; every rank calls this. Degrees divide the ranks, see join_world."""
    tp, sp = config.tensor_parallel, config.sequence_parallel
    timeout = datetime.timedelta(seconds=config.timeout_s)
    shard_ranks = _shard_ranks(config, world_size)
    ranks = torch.arange(world_size).view(-1, shard_ranks, tp)  # [copy, shard and sp, tp]
    of_sp = None
    if sp > 1:
        rows = ranks.view(-1, sp, tp).transpose(1, 2).reshape(-1, sp)
        of_sp = DeviceMesh.from_group(_group(rows, timeout), device.type, mesh_dim_names=("sp",))
    if tp > 1:
        fsdp, of_tp = _with_parts(ranks, "tp", device, timeout)
        return Meshes(fsdp=fsdp, sp=of_sp, tp=of_tp)
    fsdp = _fsdp(ranks[:, :, 0], device, timeout)
    if (ep := config.expert_parallel) == 1:
        return Meshes(fsdp=fsdp, sp=of_sp)
    experts, of_ep = _with_parts(ranks.view(len(ranks), -1, ep), "ep", device, timeout)
    return Meshes(fsdp=fsdp, sp=of_sp, ep=of_ep, experts=experts)


def _with_parts(
    ranks: torch.Tensor, name: str, device: torch.device, timeout: datetime.timedelta
) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh of ranks with the same part, and the mesh of ranks with the parts of a tensor.

    ranks: [copy, shard, parts]. FSDP needs the same root for both meshes.
    """
    names = ("copy", "shard") if len(ranks) > 1 else ("shard",)
    groups = [_group(ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]), timeout) for dim in range(3)]
    if len(ranks) == 1:
        ranks, groups = ranks[0], groups[1:]
    root = DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=(*names, name))
    return root[names], root[name]


def _shard_ranks(config: TrainConfig, world_size: int) -> int:
    """Return the number of ranks per copy of the model; a tensor parallel group counts as a single rank."""
    tp, sp = config.tensor_parallel, config.sequence_parallel
    if world_size % tp:
        raise ConfigError(f"train.tensor_parallel {tp} does not divide the world size {world_size}: choose a divisor")
    if (world_size // tp) % sp:
        raise ConfigError(
            f"train.sequence_parallel {sp} does not divide the world size {world_size}"
            f"{f' by tensor_parallel {tp}' if tp > 1 else ''}: choose a divisor"
        )
    shard_ranks = config.shard_ranks or world_size // tp
    if (world_size // tp) % shard_ranks:
        raise ConfigError(
            f"train.shard_ranks {shard_ranks} does not divide the world size {world_size}"
            f"{f' by tensor_parallel {tp}' if tp > 1 else ''}: choose a divisor"
        )
    if shard_ranks % sp:
        raise ConfigError(
            f"train.shard_ranks {shard_ranks} is not a multiple of sequence_parallel {sp}, whose ranks share a copy of "
            f"the model: choose a multiple of {sp}"
        )
    if shard_ranks % config.expert_parallel:
        raise ConfigError(
            f"train.expert_parallel {config.expert_parallel} does not divide the {shard_ranks} ranks that share one "
            "copy of the model: choose a divisor"
        )
    return shard_ranks


def _fsdp(ranks: torch.Tensor, device: torch.device, timeout: datetime.timedelta) -> DeviceMesh:
    """Return the mesh of int[copies, shards]: 1D for a single copy, otherwise 2D.

    Groups created by a DeviceMesh have torch's default timeout; groups created here have the run's timeout.
    """
    if len(ranks) == 1:
        assert dist.group.WORLD is not None
        return DeviceMesh.from_group(dist.group.WORLD, device.type, mesh_dim_names=("shard",))
    groups = [_group(rows, timeout) for rows in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("copy", "shard"))


def _group(rows: torch.Tensor, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Create a group per row; return the group of this rank."""
    group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)  # each rank is in one of the groups
    return group
