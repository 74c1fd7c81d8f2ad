"""Claim: a plan of a billion samples is counted in 90 s on one core in 400 MiB, and read anywhere in 0.2 s after that.

Beside it: what MosaicML Streaming makes at the start of every epoch (`generate_work` with py1e), on a tenth of the
samples that the plan starts with. Streaming has then ordered samples, the plan has also packed them.

Lengths are chat-like, uint32, in a .npy file that is written first (4 bytes a sample, removed at the end) and
memory-mapped, so its pages are in the page cache. Every measured thing runs in a process of its own on one core; its
compiled loops are warm and its imports done before the clock starts. Memory is the peak of the whole process, imports
included; "mapped" is the part of it that maps files and that the kernel can take back at any time.

    python benchmarks/plan.py
    python benchmarks/plan.py --samples 10000000 --startup-samples 10000000 --peer-samples 1000000
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from data import write_lengths
from lmms_stream.mds.lengths import LengthIndex
from lmms_stream.plan.order import OrderConfig, default_canonical_nodes
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig
from measure import MIB, PeakMemory, in_fresh_process, keep_to_one_core, print_table, status_bytes, verdict
from numpy.typing import NDArray

MAX_COUNT_S, MAX_COUNT_MIB, MAX_READ_S = 90, 400, 0.2
READ_PACKS, RANDOM_POSITIONS = 64, 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a plan is built from; samples is the part of the file that it covers, in samples."""

    lengths_file: Path
    samples: int
    shard_samples: int
    packing_length: int
    canonical_nodes: int | None
    shuffle_block_size: int
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Seconds to the first packs (or to the epoch's order), and the resident bytes before."""

    seconds: float
    resident_before: int


def shard_sizes(samples: int, shard_samples: int) -> NDArray[np.int64]:
    sizes = np.full(-(-samples // shard_samples), shard_samples, np.int64)
    sizes[-1] -= sizes.sum() - samples
    return sizes


def new_plan(setting: Setting, counts_cache: dict[str, NDArray[np.int64]]) -> PackPlan:
    """A plan over the file, opened as a dataset opens it: the hash of the lengths comes with them."""
    lengths = np.load(setting.lengths_file, mmap_mode="r")[: setting.samples]
    index = LengthIndex(
        lengths=lengths, fingerprint="", content_hash=f"{setting.samples} chat, seed {setting.seed}", processor={}
    )
    return PackPlan(
        index,
        shard_sizes(setting.samples, setting.shard_samples),
        order=OrderConfig(
            seed=setting.seed,
            num_canonical_nodes=setting.canonical_nodes,
            shuffle_block_size=setting.shuffle_block_size,
        ),
        packing=PackingConfig(packing_length=setting.packing_length),
        counts_cache=counts_cache,
    )


def warm_up(setting: Setting) -> None:
    lengths = np.arange(1, 2000, dtype=np.uint32)
    packing = PackingConfig(packing_length=setting.packing_length)
    PackPlan(lengths, [len(lengths)], order=OrderConfig(), packing=packing).packs(0, 0, 1)


def count(setting: Setting) -> tuple[float, float, dict[str, NDArray[np.int64]], int, int]:
    """Seconds of a full count, the share of the packs that is filled, the counts, packs and canonical nodes."""
    warm_up(setting)
    counts: dict[str, NDArray[np.int64]] = {}
    start = time.perf_counter()
    plan = new_plan(setting, counts)
    num_packs = plan.num_packs(0)
    return time.perf_counter() - start, plan.efficiency(0), counts, num_packs, plan.num_canonical_nodes


def read(
    setting: Setting, counts: dict[str, NDArray[np.int64]], firsts: list[int], num_packs: int
) -> tuple[float, float]:
    """Most seconds to construct a plan whose counts are known, and to read packs [first, first + num_packs) of it."""
    warm_up(setting)
    opening, reading = [], []
    for first in firsts:
        start = time.perf_counter()
        plan = new_plan(setting, dict(counts))
        plan.num_packs(0)
        constructed = time.perf_counter()
        plan.packs(0, first, first + num_packs)
        opening.append(constructed - start)
        reading.append(time.perf_counter() - constructed)
        del plan
        gc.collect()  # a plan and its epochs refer to each other: memory is to be that of one plan
    return max(opening), max(reading)


def start_plan(setting: Setting, counts: dict[str, NDArray[np.int64]]) -> tuple[Start, dict[str, NDArray[np.int64]]]:
    """From nothing to the first packs; without `counts`, that includes counting the packs of the epoch."""
    warm_up(setting)
    before = status_bytes()["VmRSS"]
    start = time.perf_counter()
    new_plan(setting, counts).packs(0, 0, READ_PACKS)
    return Start(seconds=time.perf_counter() - start, resident_before=before), counts


def start_streaming(samples: int, canonical_nodes: int, setting: Setting) -> Start:
    """MosaicML Streaming's order of an epoch over shards that exist in its index alone; for one rank, one worker."""
    from streaming import StreamingDataset
    from streaming.base.batching import generate_work
    from streaming.base.world import World

    with tempfile.TemporaryDirectory() as folder:
        remote, local = Path(folder, "remote"), Path(folder, "local")
        remote.mkdir()
        write_index(remote / "index.json", shard_sizes(samples, setting.shard_samples))
        dataset = StreamingDataset(
            remote=str(remote),
            local=str(local),
            batch_size=1,
            shuffle=True,
            shuffle_algo="py1e",
            shuffle_seed=setting.seed,
            shuffle_block_size=setting.shuffle_block_size,
            num_canonical_nodes=canonical_nodes,
        )
        before = status_bytes()["VmRSS"]
        start = time.perf_counter()
        work = generate_work("random", dataset, World.detect(), 0, 0)
        seconds = time.perf_counter() - start
        if np.count_nonzero(work >= 0) < samples:
            raise SystemExit(f"generate_work returned {work.size} of {samples} samples")
    return Start(seconds=seconds, resident_before=before)


def write_index(path: Path, sizes: NDArray[np.int64]) -> None:
    """An MDS index of shards of these sizes."""
    shards = [
        {
            "version": 2,
            "format": "mds",
            "hashes": [],
            "compression": None,
            "raw_data": {"basename": f"shard.{number:05}.mds", "bytes": int(size) * 8, "hashes": {}},
            "zip_data": None,
            "samples": int(size),
            "column_names": ["id"],
            "column_encodings": ["int"],
            "column_sizes": [8],
            "size_limit": 1 << 26,
        }
        for number, size in enumerate(sizes)
    ]
    path.write_text(json.dumps({"version": 2, "shards": shards}))


def mib(size: int) -> str:
    return f"{size / MIB:,.0f}"


def memory_cells(memory: PeakMemory) -> list[str]:
    return [mib(memory.resident), mib(memory.anonymous), mib(memory.file)]


def show_count_and_reads(setting: Setting) -> None:
    (seconds, filled, counts, num_packs, nodes), memory = in_fresh_process(count, setting)
    print_table(
        f"{setting.samples:,} lengths, packs of {setting.packing_length}, {nodes} canonical nodes, "
        f"shuffle blocks of {setting.shuffle_block_size:,}, shards of {setting.shard_samples:,}",
        ["", "seconds", "M samples/s", "packs", "filled", "peak MiB", "private MiB", "mapped MiB"],
        [
            [
                "full count of packs",
                f"{seconds:.1f}",
                f"{setting.samples / seconds / 1e6:.1f}",
                f"{num_packs:,}",
                f"{filled:.3%}",
                *memory_cells(memory),
            ]
        ],
    )
    print(
        f"under {MAX_COUNT_S} s: {verdict(seconds < MAX_COUNT_S)}; under {MAX_COUNT_MIB} MiB resident: "
        f"{verdict(memory.resident < MAX_COUNT_MIB * MIB)} (private: {verdict(memory.anonymous < MAX_COUNT_MIB * MIB)})"
    )
    num_read = min(READ_PACKS, num_packs)
    anywhere = np.random.default_rng(setting.seed).integers(0, num_packs - num_read + 1, RANDOM_POSITIONS).tolist()
    positions = {"start": [0], "middle": [num_packs // 2], "end": [num_packs - num_read]}
    rows, slowest = [], 0.0
    for name, firsts in {**positions, f"slowest of {RANDOM_POSITIONS} at random": anywhere}.items():
        (opening, reading), memory = in_fresh_process(read, setting, counts, firsts, num_read)
        slowest = max(slowest, reading)
        first_pack = f"{firsts[0]:,}" if len(firsts) == 1 else ""
        rows.append([name, first_pack, f"{opening:.3f}", f"{reading:.3f}", *memory_cells(memory)])
    print_table(
        f"{num_read} packs of a new plan each time, counts known",
        ["position", "first pack", "plan, s", "packs, s", "peak MiB", "private MiB", "mapped MiB"],
        rows,
    )
    print(f"under {MAX_READ_S} s anywhere: {verdict(slowest < MAX_READ_S)} ({slowest:.3f} s)", flush=True)


def show_startup(setting: Setting, peer_samples: int) -> None:
    (cold, counts), cold_memory = in_fresh_process(start_plan, setting, {})
    (warm, _), warm_memory = in_fresh_process(start_plan, setting, counts)
    nodes = setting.canonical_nodes or default_canonical_nodes(setting.samples)
    peer, peer_memory = in_fresh_process(start_streaming, peer_samples, nodes, setting)

    def row(name: str, samples: int, start: Start, memory: PeakMemory) -> list[str]:
        grown = memory.resident - start.resident_before
        per_million = start.seconds / samples * 1e6
        return [
            name,
            f"{samples:,}",
            f"{start.seconds:.2f}",
            f"{per_million / (peer.seconds / peer_samples * 1e6):.3f}",
            mib(memory.resident),
            mib(grown),
            f"{grown / samples:.1f}",
        ]

    print_table(
        f"from a new process to the first {READ_PACKS} packs (Streaming: to the epoch's order, nothing packed)",
        ["", "samples", "seconds", "time a sample, ratio", "peak MiB", "grown by, MiB", "bytes a sample"],
        [
            row(f"mosaicml-streaming {version('mosaicml-streaming')}, py1e", peer_samples, peer, peer_memory),
            row("plan, first time (counts packs)", setting.samples, cold, cold_memory),
            row("plan, counts known (every resume)", setting.samples, warm, warm_memory),
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10**9, help="lengths in the file, counted and read")
    parser.add_argument("--startup-samples", type=int, default=10**8, help="of these, how many the startup is timed on")
    parser.add_argument("--peer-samples", type=int, default=10**7, help="samples that Streaming's startup is timed on")
    parser.add_argument("--shard-samples", type=int, default=16384)
    parser.add_argument("--packing-length", type=int, default=4096)
    parser.add_argument("--canonical-nodes", type=int, help="default: the plan's own choice")
    parser.add_argument("--shuffle-block-size", type=int, default=OrderConfig().shuffle_block_size)
    parser.add_argument("--folder", type=Path, help="where the lengths are written; default: the temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    keep_to_one_core()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        setting = Setting(
            lengths_file=Path(folder, "lengths.npy"),
            samples=args.samples,
            shard_samples=args.shard_samples,
            packing_length=args.packing_length,
            canonical_nodes=args.canonical_nodes,
            shuffle_block_size=args.shuffle_block_size,
            seed=args.seed,
        )
        write_lengths(setting.lengths_file, "chat", args.samples, limit=args.packing_length, seed=args.seed)
        print(f"{args.samples:,} lengths in {setting.lengths_file}, {setting.lengths_file.stat().st_size / 1e9:.1f} GB")
        show_count_and_reads(setting)
        startup = dataclasses.replace(setting, samples=min(args.samples, args.startup_samples))
        show_startup(startup, args.peer_samples)


if __name__ == "__main__":
    main()
