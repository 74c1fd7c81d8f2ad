"""A job: each rank reads one epoch of a dataset in a loop of its own, with torch's process group or without.

Arguments: the dataset, a folder for `<rank>.json` with the sample ids of each step, "group" or "none", and what the
last rank has otherwise: "nothing", "seed", "batch", "state", or "loaded", a state that is loaded behind a first batch,
or "alone", such a state of this rank alone. With "looked" the first rank looks at a batch, and then all load a state;
with "glanced" it looks at less than a step, with "peeked" at a step, and none loads a state.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
import torch.distributed as dist
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.types import World


def main() -> None:
    data, folder, group, otherwise = sys.argv[1:]
    if group == "group":
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    seed = 1 if is_last and otherwise == "seed" else 0
    dataset = PackedStreamingDataset(
        data,
        processor=TokensProcessor(),
        packing=PackingConfig(packing_length=256),
        order=OrderConfig(seed=seed, num_canonical_nodes=2, shuffle_block_size=200),
    )
    if os.environ["RANK"] == "0":
        next(iter(PackedLoader(dataset, global_batch=1, world=World())))  # a look at a batch, on one rank
    loader = PackedLoader(dataset, global_batch=12 if is_last and otherwise == "batch" else 6)
    if is_last and otherwise == "state":
        loader.skip_steps(1)
    if otherwise == "looked":
        state = loader.state_dict()
        if os.environ["RANK"] == "0":
            next(iter(loader))
        loader.load_state_dict(state)
    if otherwise in ("glanced", "peeked") and os.environ["RANK"] == "0":
        for _ in islice(loader, loader.micro_batches - (otherwise == "glanced")):
            pass
    if otherwise == "alone":
        next(iter(loader))
        dist.barrier()
        dist.distributed_c10d._get_default_store().set_timeout(datetime.timedelta(seconds=2))
        if is_last:
            loader.load_state_dict(loader.state_dict())
    if otherwise == "loaded":
        next(iter(loader))
        other = PackedLoader(dataset, global_batch=cast(int, np.int64(6)), world=World())
        other.skip_steps(1 + is_last)
        loader.load_state_dict(other.state_dict())
    steps: dict[int, list[list[int]]] = defaultdict(list)
    for batch in loader:
        steps[batch.step].append(batch.sample_ids.tolist())
        if group == "group" and otherwise != "peeked":
            dist.barrier()  # as the gradients of a step
    Path(folder, f"{loader.world.rank}.json").write_text(json.dumps([steps, loader.state_dict()]))
    if group == "group":
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
