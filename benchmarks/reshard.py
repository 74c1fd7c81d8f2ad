"""Claim: a dataset gets other shards at 300 MB/s on one core, because its samples are moved without being decoded.

The dataset is 8 shards of 64 MiB of samples of 4 to 60 kB, half text and half random bytes as media are. It is
converted to shards of 16 MiB. Beside it, on the same core: a plain copy of its files, and a loop that decodes each
sample and writes it with MDSWriter. Each is run in turn, --rounds times; the best of each counts. Rates are bytes
by CPU seconds of the calls, the kernel's among them and without imports, so that what else the machine does changes
them little; beside them those by the clock.

    python benchmarks/reshard.py
    python benchmarks/reshard.py --shards 2 --rounds 1
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from lmms_stream.converters.convert import convert
from lmms_stream.mds.packed import PackedStreamingDataset
from measure import MIB, keep_to_one_core, print_table, verdict
from streaming import MDSWriter

MIN_MB_A_SECOND = 300
SHARD_BYTES = 64 * MIB
NEW_SHARD_BYTES = 16 * MIB
COLUMNS = {"messages": "str", "media": "bytes"}


def make(folder: Path, *, num_shards: int) -> None:
    rng = np.random.default_rng(0)
    left = num_shards * SHARD_BYTES
    with MDSWriter(out=str(folder), columns=COLUMNS, hashes=["xxh3_64"], size_limit=SHARD_BYTES) as writer:
        while left > 0:
            size = int(rng.integers(2_000, 30_000))
            writer.write({"messages": "a text " * (size // 7), "media": rng.bytes(size)})
            left -= 2 * size


def reshard(source: Path, target: Path) -> None:
    convert([source], str(target), num_workers=1, shard_bytes=NEW_SHARD_BYTES)


def copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)


def rewrite(source: Path, target: Path) -> None:
    with MDSWriter(out=str(target), columns=COLUMNS, hashes=["xxh3_64"], size_limit=NEW_SHARD_BYTES) as writer:
        dataset = PackedStreamingDataset(source)
        for number in range(len(dataset)):
            writer.write(dict(dataset[number]))


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=8, help="of 64 MiB, of the dataset")
    parser.add_argument("--rounds", type=int, default=3, help="times that each is run")
    parser.add_argument("--folder", help="where the datasets lie meanwhile")
    options = parser.parse_args()
    keep_to_one_core()
    ways: dict[str, Callable[[Path, Path], None]] = {"reshard": reshard, "copy": copy, "MDSWriter": rewrite}
    best_cpu, best_clock = dict.fromkeys(ways, float("inf")), dict.fromkeys(ways, float("inf"))
    with tempfile.TemporaryDirectory(prefix="lmms_stream-reshard-", dir=options.folder) as folder:
        source = Path(folder) / "source"
        make(source, num_shards=options.shards)
        num_bytes = sum(path.stat().st_size for path in source.iterdir())
        for _ in range(options.rounds):
            for name, way in ways.items():
                target = Path(folder) / "target"
                cpu, clock = cpu_seconds(), time.perf_counter()
                way(source, target)
                best_cpu[name] = min(best_cpu[name], cpu_seconds() - cpu)
                best_clock[name] = min(best_clock[name], time.perf_counter() - clock)
                shutil.rmtree(target)
    rates = {name: num_bytes / seconds / 1e6 for name, seconds in best_cpu.items()}
    clocks = {name: num_bytes / seconds / 1e6 for name, seconds in best_clock.items()}
    rows = [
        [
            name,
            f"{rate:,.0f}",
            f"{rate / rates['copy']:.2f}",
            f"{rate / rates['MDSWriter']:.2f}",
            f"{clocks[name]:,.0f}",
        ]
        for name, rate in rates.items()
    ]
    columns = ["", "MB a CPU second", "of a copy", "of MDSWriter", "MB/s by the clock"]
    print_table(f"{num_bytes / 1e6:,.0f} MB on one core", columns, rows)
    is_met = rates["reshard"] >= MIN_MB_A_SECOND
    print(f"at least {MIN_MB_A_SECOND} MB/s: {verdict(is_met)}")
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
