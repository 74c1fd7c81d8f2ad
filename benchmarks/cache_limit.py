"""Claim: under a cache_limit, epochs after the first download at most 1.1 times the least that is possible.

What a cache lets go of is what the plan needs last. Real loaders read four epochs from a folder behind a store that
writes a line per download, on one rank without workers, and on two ranks with two workers each that share the cache and
read step by step, with room for 25, 50 and 90 % of the dataset. Beside them the same loaders without an outlook, whose
caches let go of what was used least recently; and the least: Belady's rule over every access of every step, known
beforehand. Figures are downloads in epochs 2 to 4, as parts of the shards read in them.

With --mixed samples of two datasets, one of a third of the other's size, are mixed in equal shares of the tokens: an
epoch has the small one twice.

    python benchmarks/cache_limit.py
    python benchmarks/cache_limit.py --mixed
    python benchmarks/cache_limit.py --samples 20000 --block 600
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
from data import write_tokens
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.mixed import mixed
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.eviction import CacheQuota
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.storage.local import LocalStorage
from lmms_stream.types import World
from measure import print_table, verdict

ROOT = str(Path(__file__).resolve().parent.parent)
EPOCHS = 4
GLOBAL_BATCH = 8
MOST = 1.1  # times the least
PARTS = (0.25, 0.5, 0.9)  # of the dataset's bytes
SETUPS = ((1, 0), (2, 2))  # ranks, workers of each


def open_dataset(folders: Sequence[Path], cache: Path, *, block: int, limit: int | None) -> PackedDataset:
    from tests.simulate.cluster_of_loaders import CountedStore

    def counted(folder: Path) -> CountedStore:
        return CountedStore(LocalStorage(folder), folder / "downloads")

    opened = {
        folder.name: PackedDataset(
            [StreamConfig(source=counted(folder), remote="counted", local=cache / folder.name)],
            processor=TokensProcessor(),
            packing=PackingConfig(packing_length=256),
            order=OrderConfig(seed=1, num_canonical_nodes=1, shuffle_block_size=block),
            fetch=FetchConfig(cache_limit=limit, ahead=8),
        )
        for folder in folders
    }
    return next(iter(opened.values())) if len(opened) == 1 else mixed(opened, weights=dict.fromkeys(opened, 1))


@contextmanager
def without_outlook() -> Iterator[None]:
    """Caches let go of what was used least recently."""
    CacheQuota.outlook = property(lambda _: None, lambda *_: None)  # type: ignore[assignment]
    try:
        yield
    finally:
        del CacheQuota.outlook


def downloads(folders: Sequence[Path], *, block: int, limit: int, ranks: int, num_workers: int) -> list[int]:
    """Shards that are downloaded in each epoch."""
    logs = [folder / "downloads" for folder in folders]
    for log in logs:
        log.unlink(missing_ok=True)
    found = [0]
    with tempfile.TemporaryDirectory(dir=folders[0].parent) as cache:
        dataset = open_dataset(folders, Path(cache), block=block, limit=limit)
        worlds = [World(rank=rank, world_size=ranks) for rank in range(ranks)]
        loaders = [
            PackedLoader(dataset, global_batch=GLOBAL_BATCH, world=world, num_workers=num_workers) for world in worlds
        ]
        for _ in range(EPOCHS):
            for _ in zip(*loaders, strict=True):
                pass
            found.append(sum(line.endswith(".mds") for log in logs for line in log.read_text().split()))
    return [after - before for before, after in pairwise(found)]


def measure(folders: Sequence[Path], *, block: int) -> bool:
    from tests.simulate.accesses import accesses, least_downloads

    dataset = open_dataset(folders, folders[0].parent / "plan", block=block, limit=None)
    sizes = [info.size for info in dataset.shard_infos]
    shards, ends = accesses(dataset, global_batch=GLOBAL_BATCH, epochs=EPOCHS)
    read = (EPOCHS - 1) * len(sizes)
    print(f"{len(sizes)} shards, {dataset.num_samples:,} samples in blocks of {block}")
    rows, met = [], True
    for ranks, num_workers in SETUPS:
        for part in PARTS:
            limit = int(part * sum(sizes))
            least = int(np.count_nonzero(np.array(least_downloads(shards, sizes, limit)) >= ends[0]))
            setting = {"block": block, "limit": limit, "ranks": ranks, "num_workers": num_workers}
            ours = sum(downloads(folders, **setting)[1:])
            with without_outlook():
                recent = sum(downloads(folders, **setting)[1:])
            met = met and ours <= MOST * least
            rows.append(
                [f"{ranks} x {num_workers}", f"{part:.0%}"]
                + [f"{count / read:.1%}" for count in (recent, ours, least)]
                + [f"{recent / ours:.2f}", f"{ours / least:.3f}"]
            )
    columns = [
        "ranks x workers",
        "room",
        "least recent use",
        "needed last",
        "least possible",
        "saved",
        "over the least",
    ]
    print_table("downloads in epochs 2 to 4, of the shards read", columns, rows)
    print(f"at most {MOST} times the least: {verdict(met)}")
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=24_000, help="of the dataset, of 20 to 60 tokens")
    parser.add_argument("--mixed", action="store_true", help="two datasets, mixed by samples")
    parser.add_argument("--block", type=int, default=400, help="samples of a shuffle block")
    parser.add_argument("--folder", type=Path, help="where the dataset is written and removed again")
    options = parser.parse_args()
    sys.path.insert(0, ROOT)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        lengths = np.random.default_rng(7).integers(20, 60, options.samples).astype(np.uint32)
        parts = np.split(lengths, [len(lengths) // 4]) if options.mixed else [lengths]
        folders = [Path(folder) / f"stored-{number}" for number in range(len(parts))]
        for each, part in zip(folders, parts, strict=True):
            write_tokens(each, part, shard_bytes=1 << 14)
        measure(folders, block=options.block)


if __name__ == "__main__":
    main()
