"""A job: the meshes of some degrees, and how long their groups wait. Its argument is a folder for `<rank>.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lmms_stream.errors import ConfigError
from lmms_stream.train.run.distributed import end_distributed, group_timeout_s
from lmms_stream.train.run.mesh import build_meshes, join_world
from lmms_stream.train.run.settings import TrainConfig

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
    "sp 3": {"sequence_parallel": 3},
    "sp 4 tp 2": {"sequence_parallel": 4, "tensor_parallel": 2},
    "sp 2 shards 1": {"sequence_parallel": 2, "shard_ranks": 1},
    "tp 2 shards 4": {"tensor_parallel": 2, "shard_ranks": 4},
}


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
        found = {"fsdp": meshes.fsdp, "sp": meshes.sp, "tp": meshes.tp}
        timeouts = {
            group_timeout_s(group, device) for mesh in found.values() if mesh for group in mesh.get_all_groups()
        }
        made[name] = {"group": world.group, "timeouts": sorted(timeouts)}
        made[name] |= {
            key: [mesh.mesh.tolist(), list(mesh.mesh_dim_names or ())] for key, mesh in found.items() if mesh
        }
    Path(sys.argv[1], f"{world.rank}.json").write_text(json.dumps(made))
    end_distributed()


if __name__ == "__main__":
    main()
