"""A job: the meshes of some degrees, and how long their groups wait. Its argument is a folder for `<rank>.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lmms_stream.errors import ConfigError
from lmms_stream.train.run.distributed import end_distributed, group_timeout_s
from lmms_stream.train.run.mesh import Meshes, build_meshes, join_world
from lmms_stream.train.run.optimizers import clip_gradients
from lmms_stream.train.run.settings import TrainConfig
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

TIMEOUT_S = 17.0
CASES: dict[str, dict[str, int]] = {
    "one": {},
    "copies": {"shard_ranks": 1},
    "pairs": {"shard_ranks": 2},
    "tp": {"tensor_parallel": 2},
    "tp copies": {"tensor_parallel": 2, "shard_ranks": 1},
    "tp 3": {"tensor_parallel": 3},
    "sp": {"sequence_parallel": 2},
    "sp copies": {"sequence_parallel": 2, "shard_ranks": 2},
    "sp tp": {"sequence_parallel": 2, "tensor_parallel": 2},
    "ep": {"expert_parallel": 2},
    "ep copies": {"expert_parallel": 2, "shard_ranks": 2},
    "sp ep": {"sequence_parallel": 2, "expert_parallel": 4},
    "ep 3": {"expert_parallel": 3},
    "ep shards": {"expert_parallel": 4, "shard_ranks": 2},
    "sp 3": {"sequence_parallel": 3},
    "sp 4 tp 2": {"sequence_parallel": 4, "tensor_parallel": 2},
    "sp 2 shards 1": {"sequence_parallel": 2, "shard_ranks": 1},
    "tp 2 shards 4": {"tensor_parallel": 2, "shard_ranks": 4},
}


def gradients(*meshes: DeviceMesh) -> list[torch.nn.Parameter]:
    """Parameters of these meshes, and plain ones, with the same gradients at each call."""
    random = torch.Generator().manual_seed(7)
    made = []
    for mesh in (*meshes, None):
        for scale in (1.0, 1e3):
            values, gradient = (torch.randn(8, 4, generator=random) * scale for _ in range(2))
            if mesh is not None:
                values, gradient = (distribute_tensor(each, mesh, [Shard(0)]) for each in (values, gradient))
            made.append(torch.nn.Parameter(values))
            made[-1].grad = gradient
    return made


def clipped(meshes: Meshes) -> dict[str, Any]:
    """What clip_gradients makes of parameters of one mesh, and of several; and what torch makes of them."""
    assert meshes.tp is not None
    one, by_torch = gradients(meshes.fsdp)[:-2], gradients(meshes.fsdp)[:-2]
    norm, expected = clip_gradients(one, 3.0), torch.nn.utils.clip_grad_norm_(by_torch, 3.0)
    several = gradients(meshes.fsdp, meshes.tp)
    plain = [torch.nn.Parameter(torch.zeros(8, 4)) for _ in several]
    for each, of in zip(plain, several, strict=True):
        each.grad = whole(of.grad).clone()
    joined, of_plain = clip_gradients(several, 3.0), torch.nn.utils.clip_grad_norm_(plain, 3.0)
    pairs = [*zip(one, by_torch, strict=True), *zip(several, plain, strict=True)]
    return {
        "one": [float(norm), float(whole(expected))],
        "several": [float(joined), float(of_plain)],
        "gradients": [float((whole(first.grad) - whole(second.grad)).abs().max()) for first, second in pairs],
        "none": float(clip_gradients([], 3.0)),
    }


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    made: dict[str, Any] = {}
    for name, degrees in CASES.items():
        config = TrainConfig(output_dir="out", global_batch=4, max_steps=1, timeout_s=TIMEOUT_S)
        for degree, value in degrees.items():
            object.__setattr__(config, degree, value)
        try:
            world, device = join_world(config)
        except ConfigError as error:
            made[name] = str(error)
            continue
        meshes = build_meshes(device, world_size=world.world_size, config=config)
        found = {"fsdp": meshes.fsdp, "sp": meshes.sp, "tp": meshes.tp, "ep": meshes.ep}
        found["experts"] = meshes.experts
        timeouts = {
            group_timeout_s(group, device) for mesh in found.values() if mesh for group in mesh.get_all_groups()
        }
        made[name] = {"group": world.group, "timeouts": sorted(timeouts)}
        if name == "tp":
            made[name]["clipped"] = clipped(meshes)
        made[name] |= {
            key: [mesh.mesh.tolist(), list(mesh.mesh_dim_names or ())] for key, mesh in found.items() if mesh
        }
    Path(sys.argv[1], f"{world.rank}.json").write_text(json.dumps(made))
    end_distributed()


if __name__ == "__main__":
    main()
