"""Claim: `simulate` foretells the private memory that a loader worker takes, beyond its libraries, to within 25 %.

What a worker does until its first batch is done by a process of its own, without workers: it opens the dataset, plans
and makes a batch. Counted are its private pages (RssAnon), less those that the same takes for a dataset of 1000
samples. Packs were counted by a run before. The datasets are a few real shards under many hard-linked names. Shards
that are open, which a worker that only fetches does not have, are measured and not foretold: 2 kB each.

    python benchmarks/worker_memory.py
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path

import numpy as np
from data import link_tokens, write_tokens
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.tools.simulate import Cluster, simulate
from measure import MIB, in_fresh_process, print_table, status_bytes, verdict

MAX_DIFFERENCE = 0.25
GLOBAL_BATCH = 64
CASES = (  # dataset, canonical nodes, shuffle block
    ("2^20 samples", 8, 1 << 18),
    ("2^24 samples", 8, 1 << 18),
    ("2^24 samples", 64, 1 << 16),
    ("2500 shards", 8, 1 << 18),
    ("20,000 shards", 8, 1 << 18),
)


def open_dataset(folder: Path, nodes: int, block: int) -> PackedDataset:
    return PackedDataset(
        [StreamConfig(remote=folder, local=folder.with_name(f"{folder.name}-cache"))],
        processor=TokensProcessor(),
        packing=PackingConfig(packing_length=4096),
        order=OrderConfig(num_canonical_nodes=nodes, shuffle_block_size=block),
    )


def foretell(folder: Path, nodes: int, block: int) -> int:
    """Bytes of a worker, as they are simulated; the packs of the first epoch are counted."""
    cluster = Cluster(gpus_per_node=1, num_workers=1)
    return simulate(open_dataset(folder, nodes, block), cluster, global_batch=GLOBAL_BATCH, max_steps=1).worker_bytes


def measure(folder: Path, nodes: int, block: int) -> int:
    """Private bytes that it takes to come to the first batch."""
    gc.collect()
    before = status_bytes()["RssAnon"]
    batches = iter(PackedLoader(open_dataset(folder, nodes, block), global_batch=GLOBAL_BATCH))
    next(batches)
    return status_bytes()["RssAnon"] - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the shards are written; default: the temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        lengths = np.random.default_rng(0).integers(16, 65, 1 << 16).astype(np.uint32)
        write_tokens(folder / "large", lengths, shard_bytes=12 << 20)
        write_tokens(folder / "small", lengths[: 1 << 13], shard_bytes=16 << 10)
        write_tokens(folder / "least", lengths[:1000], shard_bytes=12 << 20)
        link_tokens(folder / "large", folder / "2^20 samples", samples=1 << 20)
        link_tokens(folder / "large", folder / "2^24 samples", samples=1 << 24)
        link_tokens(folder / "small", folder / "2500 shards", shards=2500)
        link_tokens(folder / "small", folder / "20,000 shards", shards=20_000)
        in_fresh_process(foretell, folder / "least", 1, 1 << 18)
        libraries, _ = in_fresh_process(measure, folder / "least", 1, 1 << 18)
        rows, worst = [], 0.0
        for dataset, nodes, block in CASES:
            told, _ = in_fresh_process(foretell, folder / dataset, nodes, block)
            found = in_fresh_process(measure, folder / dataset, nodes, block)[0] - libraries
            worst = max(worst, abs(found / told - 1))
            shown = f"{told / MIB:.1f}", f"{found / MIB:.1f}", f"{found / told - 1:+.0%}"
            rows.append([dataset, str(nodes), f"{block:,}", *shown])
    columns = ["dataset", "canonical nodes", "shuffle block", "foretold MiB", "measured MiB", "difference"]
    print_table("Private memory of a worker before its first batch", columns, rows)
    print(f"foretold to within 25 %: {verdict(worst <= MAX_DIFFERENCE)} ({worst:.0%})")


if __name__ == "__main__":
    main()
