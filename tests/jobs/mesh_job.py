"""A job: the meshes of some shard_ranks, and how long their groups wait. Its argument is a folder for `<rank>.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lmms_stream.train.run.distributed import build_mesh, end_distributed, group_timeout_s, init_distributed

TIMEOUT_S = 17.0


def main() -> None:
    world, device = init_distributed(TIMEOUT_S)
    made = {}
    for shard_ranks in (None, 1, 2):
        mesh = build_mesh(device, world_size=world.world_size, shard_ranks=shard_ranks, timeout_s=TIMEOUT_S)
        timeouts = [group_timeout_s(group, device) for group in mesh.get_all_groups()]
        made[str(shard_ranks)] = {"ranks": mesh.mesh.tolist(), "names": mesh.mesh_dim_names, "timeouts": timeouts}
    Path(sys.argv[1], f"{world.rank}.json").write_text(json.dumps(made))
    end_distributed()


if __name__ == "__main__":
    main()
