"""A job: for each of some cases, each rank reads one epoch of a dataset, with torch's process group or without.

Arguments: the dataset, and a JSON file: {name: {"nodes": …, "group": …, "otherwise": …}}. A case runs on the first
sum(nodes) ranks, as if they were all, with a process group of its own or none. Cases of more ranks come first, so that
the ranks of a case have run the same cases before. Beside the file comes `<name>-<rank>.json` with the sample ids of
each step and the loader's state, or with the error.

otherwise: what the last rank has otherwise: "nothing", "seed", "batch", "state", or "loaded", a state that is loaded
behind a first batch, or "alone", such a state of this rank alone. With "looked" the first rank looks at a batch, and
then all load a state; with "glanced" it looks at less than a step, with "peeked" at a step, and none loads a state.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from lmms_stream.errors import LmmsStreamError
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.types import World
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from .launcher import environment_of

TIMEOUT = datetime.timedelta(seconds=40)


def read_epoch(data: str, *, has_group: bool, otherwise: str) -> dict[str, Any]:
    """The samples of each step of this rank, and the state of its loader behind them."""
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
        if has_group and otherwise != "peeked":
            dist.barrier()  # as the gradients of a step
    if has_group:
        dist.barrier()
    return {"steps": steps, "state": loader.state_dict()}


def meet(store: TCPStore, key: str, num_ranks: int) -> None:
    """Wait for all ranks, up to the limit of the job."""
    store.add(key, 1)
    while store.add(key, 0) < num_ranks:
        time.sleep(0.02)


def run(name: str, case: dict[str, Any], data: str, rank: int, store: TCPStore) -> dict[str, Any]:
    """What a rank of a case read, or its error."""
    world = World(rank=rank, world_size=sum(case["nodes"]), ranks_per_node=case["nodes"])
    os.environ.update(environment_of(world))
    has_group = case["group"] == "group"
    if has_group:
        store.set_timeout(TIMEOUT)
        own = PrefixStore(name, store)
        meet(store, f"{name} begins", world.world_size)  # others may still wait in the case before, as long as TIMEOUT
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world.world_size, timeout=TIMEOUT)
        meet(store, f"{name} is connected", world.world_size)  # a rank that is refused at once closes its connections
    try:
        return read_epoch(data, has_group=has_group, otherwise=case["otherwise"])
    except (LmmsStreamError, RuntimeError) as error:  # RuntimeError: a rank of the group has ended
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        if has_group:
            dist.destroy_process_group()


def main() -> None:
    data, job, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    cases = sorted(json.loads(job.read_text()).items(), key=lambda item: -sum(item[1]["nodes"]))
    for name, case in cases:
        if rank < sum(case["nodes"]):
            result = run(name, case, data, rank, store)
            (job.parent / f"{name}-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
