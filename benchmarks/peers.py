"""Claim: nodes that share a shuffle, or shuffle epochs anew, fetch at least twice fewer bytes with peers.

64 nodes of 8 GPUs, simulated: the bytes that all nodes download from the store, over those that they download when they
take shards from each other, by num_canonical_nodes and the size of shuffle blocks; over one epoch and over three, whose
shards come to other nodes in each unless packs are fixed (reshuffle False). Nodes keep all.

    python benchmarks/peers.py
"""

from __future__ import annotations

import argparse

import numpy as np
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.tools.simulate.cluster import Cluster
from lmms_stream.tools.simulate.run import Steps, simulate_sources
from lmms_stream.tools.simulate.sources import ShardCosts, Sources
from measure import print_table, verdict

NODES, GPUS = 64, 8
GLOBAL_BATCH = 1024
PACKING_LENGTH = 2048
LEAST = 2.0  # a gain below that is not worth a network of peers
SETTINGS = (  # num_canonical_nodes, shuffle block (samples), epochs, reshuffle
    *((count, 1 << 14, 1, True) for count in (1, 8, 64, 100, 128, 256)),
    *((64, block, 1, True) for block in (1 << 11, 1 << 18)),
    (64, 1 << 14, 3, True),
    (64, 1 << 14, 3, False),
)


def gain(lengths: np.ndarray, *, shards: int, canonical_nodes: int, block: int, epochs: int, reshuffle: bool) -> float:
    """Bytes that nodes download over those that they download with peers."""
    ends = np.linspace(0, len(lengths), shards + 1).astype(np.int64)
    tokens = np.concatenate([[0], np.cumsum(lengths.astype(np.int64))])
    stored = 4 * np.diff(tokens[ends])
    order = OrderConfig(num_canonical_nodes=canonical_nodes, shuffle_block_size=block, reshuffle=reshuffle)
    plan = PackPlan(lengths, np.diff(ends), order=order, packing=PackingConfig(packing_length=PACKING_LENGTH))
    sources = Sources(
        plans={"data": plan},
        shards={"data": ShardCosts(stored, stored, np.ones(shards, np.int64))},
        zip_bytes={"data": [0]},
        index_bytes=0,
        fills=True,
        reads_media=False,
        limits={"data": None},
        downloads_at_once=4,
        shards_ahead=64,
    )
    steps = Steps(global_batch=GLOBAL_BATCH, epochs=epochs, max_samples=1 << 26)
    alone, told = (
        simulate_sources(sources, Cluster(num_nodes=NODES, gpus_per_node=GPUS, num_workers=2, peers=peers), steps)
        for peers in (False, True)
    )
    return alone.download_bytes / told.download_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1 << 21)
    parser.add_argument("--shards", type=int, default=6400)
    options = parser.parse_args()
    drawn = np.random.default_rng(5).lognormal(5.3, 0.9, options.samples)
    lengths = np.clip(drawn, 16, PACKING_LENGTH).astype(np.uint32)
    rows, gains = [], []
    for canonical_nodes, block, epochs, reshuffle in SETTINGS:
        found = gain(
            lengths,
            shards=options.shards,
            canonical_nodes=canonical_nodes,
            block=block,
            epochs=epochs,
            reshuffle=reshuffle,
        )
        if canonical_nodes % NODES or (epochs > 1 and reshuffle):
            gains.append(found)
        kind = "new each epoch" if reshuffle else "fixed"
        rows.append([str(canonical_nodes), f"{block:,}", str(epochs), kind, f"{found:.2f}"])
        print(*rows[-1], flush=True)
    columns = ["num_canonical_nodes", "shuffle_block_size", "epochs", "packs", "times fewer bytes with peers"]
    print_table(f"{NODES} nodes of {GPUS} GPUs, {options.shards} shards", columns, rows)
    print(
        f"at least {LEAST:g} times fewer bytes where nodes share a shuffle or epochs are shuffled anew: "
        f"{verdict(min(gains) >= LEAST)}"
    )


if __name__ == "__main__":
    main()
