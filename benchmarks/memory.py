"""Claim: a process that reads packed batches has no more memory after 10^5 of them than after 10^3.

Counted are the private pages of the process (RssAnon); beside them all resident pages (RSS), among which are those of
the memory-mapped shards, which the kernel can take back. Measured in a process that makes the batches itself, and in
the worker of a torch DataLoader and its consumer. A process that has not grown by more than 4 MiB or 2 % is taken
not to have grown at all: allocators round.

The dataset is a few real shards under many hard-linked names; by default the batches are one epoch of 10^7 samples, so
that whatever is kept for each shard, block or pack adds up.

    python benchmarks/memory.py
    python benchmarks/memory.py --batches 10000 --samples 1000000
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from data import link_tokens, write_tokens
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from measure import MIB, in_fresh_process, print_table, status_bytes, verdict

MAX_GROWTH_BYTES, MAX_GROWTH = 4 * MIB, 0.02
SAMPLE_TOKENS = (16, 65)
SHARD_BYTES = 12 << 20
GLOBAL_BATCH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of a process after so many batches: its private pages, those mapped from files, shared ones."""

    batches: int
    anonymous: int
    file: int
    shared: int

    @property
    def resident(self) -> int:
        return self.anonymous + self.file + self.shared


def memory_of(pid: int | str, batches: int) -> Memory:
    status = status_bytes(pid)
    return Memory(batches=batches, anonymous=status["RssAnon"], file=status["RssFile"], shared=status["RssShmem"])


def read(folder: Path, packing_length: int, num_workers: int, counts: Sequence[int]) -> dict[str, list[Memory]]:
    """Memory of every process that takes part, after each of `counts` batches; epoch after epoch."""
    from lmms_stream.loader.loader import SOURCE, PackedLoader

    packing = PackingConfig(packing_length=packing_length)
    dataset = PackedStreamingDataset(
        folder, folder.with_name(f"cache-{folder.name}"), processor=TokensProcessor(), packing=packing
    )
    loader = PackedLoader(dataset, global_batch=GLOBAL_BATCH, weights={SOURCE: 1.0}, num_workers=num_workers)
    measured: dict[str, list[Memory]] = {}
    for number, _ in enumerate(loader, 1):
        if number in counts:
            name = "consumer of a worker" if num_workers else "no workers"
            measured.setdefault(name, []).append(memory_of("self", number))
            for worker in multiprocessing.active_children():
                measured.setdefault("worker", []).append(memory_of(worker.pid or 0, number))
        if number == counts[-1]:
            break
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=10**5)
    parser.add_argument("--first", type=int, default=10**3, help="batches after which memory is to grow no more")
    parser.add_argument("--samples", type=int, default=10**7)
    parser.add_argument("--real-samples", type=int, default=1 << 18, help="those of the shards that all are links to")
    parser.add_argument("--packing-length", type=int, default=4096)
    parser.add_argument("--folder", type=Path, help="where the shards are written; default: the temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    counts = np.unique(np.geomspace(args.first, args.batches, 5).round().astype(int)).tolist()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        os.environ["TMPDIR"] = name
        lengths = np.random.default_rng(args.seed).integers(*SAMPLE_TOKENS, args.real_samples).astype(np.uint32)
        write_tokens(Path(name, "real"), lengths, shard_bytes=SHARD_BYTES, seed=args.seed)
        samples = link_tokens(Path(name, "real"), Path(name, "linked"), samples=args.samples)
        measured: dict[str, list[Memory]] = {}
        for num_workers in (0, 1):
            arguments = Path(name, "linked"), args.packing_length, num_workers, counts
            measured |= in_fresh_process(read, *arguments)[0]
    show(measured, f"{samples:,} samples in packs of {args.packing_length}")


def show(measured: dict[str, list[Memory]], title: str) -> None:
    rows = []
    for name, series in measured.items():
        for each in series:
            sizes = each.anonymous, each.resident, each.file, each.shared
            growth = each.anonymous - series[0].anonymous
            rows.append([name, f"{each.batches:,}", *(f"{size / MIB:,.1f}" for size in sizes), f"{growth / MIB:+.1f}"])
    columns = ["process", "batches", "private MiB", "RSS", "of it mapped", "shared", "private since the first"]
    print_table(title, columns, rows)
    for name, series in measured.items():
        growth = max(each.anonymous for each in series) - series[0].anonymous
        limit = max(MAX_GROWTH_BYTES, MAX_GROWTH * series[0].anonymous)
        print(f"{name} has not grown: {verdict(growth <= limit)} ({growth / MIB:+.1f} MiB)")


if __name__ == "__main__":
    main()
