"""A node that reads epochs of a dataset with other nodes: `python -m tests.peers.reading URL FOLDER HAS_PEERS`.

It has torchrun's variables, one rank a node, and writes what it got to FOLDER/RANK.json.
"""

from __future__ import annotations

import hashlib
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.plugins.peers.nodes import meet_peers
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.types import World

from ..cluster.lock_step import Barrier, gather

BARRIER = "barrier"
GLOBAL_BATCH = 12
EPOCHS = 1
ORDER = OrderConfig(seed=5, num_canonical_nodes=1, shuffle_block_size=500)


def main() -> None:
    url, folder, has_peers = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "True"
    world = World.detect()
    dataset = PackedStreamingDataset(
        url, folder / f"node-{world.rank}", processor=TokensProcessor(), packing=PackingConfig(packing_length=256),
        order=ORDER, fetch=FetchConfig(timeout_s=120),
    )  # fmt: skip
    with Barrier(folder / BARRIER) as others:
        if has_peers:
            tell = partial(gather, folder=folder, others=others, rank=world.rank, num_ranks=world.world_size)
            meet_peers(dataset, host="127.0.0.1", gather=tell)
        loader = PackedLoader(dataset, global_batch=GLOBAL_BATCH, num_workers=1)
        digest = hashlib.sha256()
        for _ in range(EPOCHS):
            others.wait()
            for batch in loader:
                digest.update(np.asarray(batch.sample_ids).tobytes())
                digest.update(batch.input_ids.numpy().tobytes())
        others.wait()  # servers end with their nodes
    told = {"digest": digest.hexdigest(), "fetched": loader.fetched._asdict()}
    (folder / f"{world.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
