"""A rank in the namespace of its node that reads the epochs of a case, through steps that sleep, all ranks together.

    python -m tests.cluster.reading CASE URL FOLDER    with torchrun's variables, and the node's NAMESPACE

What nodes do not share is in folders of FOLDER, one a node.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path

from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plugins.peers.nodes import meet_peers
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.types import World

from .case import Case
from .lock_step import Barrier, gather
from .namespaces import Node

BARRIER, RESULT = "barrier", "result.json"


def main() -> None:
    case, url, folder = sys.argv[1:]
    Node(os.environ["NAMESPACE"], "", "").enter()
    world = World.detect()
    node = world.rank // int(os.environ["LOCAL_WORLD_SIZE"])
    told = Case(**json.loads(case))
    dataset = PackedStreamingDataset(
        url, Path(folder, f"node-{node}"), processor=TokensProcessor(), packing=told.packing, order=told.order,
        fetch=FetchConfig(cache_limit=told.cache, timeout_s=120),
    )  # fmt: skip
    loader = PackedLoader(dataset, global_batch=told.global_batch, num_workers=told.num_workers)
    with Barrier(Path(folder, BARRIER)) as others:
        if told.peers:
            tell = partial(gather, folder=Path(folder), others=others, rank=world.rank, num_ranks=world.world_size)
            meet_peers(dataset, host=os.environ["NODE_ADDRESS"], gather=tell)
        others.wait()
        begun = time.monotonic()
        waits = [wait_s for _ in range(told.epochs) for wait_s in read_epoch(loader, others, told.step_time_s)]
        total_s = time.monotonic() - begun
        others.wait()  # servers of peers end with their nodes
    if world.rank == 0:
        Path(folder, RESULT).write_text(json.dumps({"waits_s": waits, "total_s": total_s}))


def read_epoch(loader: PackedLoader, others: Barrier, step_time_s: float) -> list[float]:
    """Read what is left of an epoch; how long each step waited until all ranks had their batches, in seconds."""
    waits = []
    batches = iter(loader)
    ended = time.monotonic()
    while len(list(islice(batches, loader.micro_batches))) == loader.micro_batches:
        others.wait()
        waits.append(time.monotonic() - ended)
        time.sleep(step_time_s)
        ended = time.monotonic()
    return waits


if __name__ == "__main__":
    main()
