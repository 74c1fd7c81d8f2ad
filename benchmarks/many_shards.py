"""Claim: a dataset of 10^6 shards is opened in 2 s and 50 MiB of private memory a process.

An index.json of that length (350 MB) is made into a table once a node, in 60 s and 1 GiB at most; every process maps
it. Measured in fresh processes: the open that makes the table, an open with the table there, and beside them what
reading the index whole takes, by `parse_index` and by MosaicML Streaming's own class of a dataset, for a tenth of the
shards. Then the seconds to a first batch at three positions of an epoch, as in resume.py, with the plan's packs
counted before, and the private memory of a loader worker until then, for several numbers of canonical nodes: that of
four workers of a rank, the largest. One node serves them all, whose blocks it packs for the first batch; with --nodes
it serves its share of them, as in a job of so many. Last, what `lmms-stream simulate` takes over the same dataset.
Private memory is RssAnon after the open less that before, of the table's making its peak.

Wall time is what is claimed; beside it stand CPU seconds, which other processes change less.

The shards are real ones under many hard-linked names.

    python benchmarks/many_shards.py
    python benchmarks/many_shards.py --canonical-nodes 64 --nodes 64
    python benchmarks/many_shards.py --shards 20000 --rounds 1 --streaming-shards 0
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from data import link_tokens, write_tokens
from lmms_stream.mds.index import parse_index
from lmms_stream.tools.simulate import Cluster, Simulation, simulate
from measure import MIB, in_fresh_process, keep_to_one_core, print_table, status_bytes, verdict
from resume import IMPORTED, SAMPLE_TOKENS, SHARES, Resume, Setting, first_run, in_turns, open_dataset, resume

MAX_MAKING_S, MAX_MAKING = 60.0, 1024 * MIB
MAX_OPEN_S, MAX_OPEN = 2.0, 50 * MIB
MAX_RESUME_S, MAX_WORKER = 1.5, 150 * MIB
NUM_WORKERS, NODE_WORKERS = 4, 64  # loader workers of a rank, measured, and of a node of 8 ranks with 8 each
REAL_SHARDS = 32  # a file has at most 65,000 names


def opened(call: Callable[[], Any]) -> tuple[float, int]:
    """Seconds of a call that opens a dataset, and the private bytes that are more while it is open."""
    before = status_bytes()["RssAnon"]
    start = time.perf_counter()
    held = call()
    seconds = time.perf_counter() - start
    num_bytes = status_bytes()["RssAnon"] - before
    del held
    return seconds, num_bytes


def parse_whole(path: Path) -> Any:
    return parse_index(path.read_bytes(), source=str(path))


def open_streaming(folder: Path) -> Any:
    from streaming import StreamingDataset

    return StreamingDataset(local=str(folder), batch_size=1)


def show_opens(setting: Setting, shards: int, others: dict[str, tuple[int, Callable[[], Any]]], rounds: int) -> None:
    (making_s, _), peak = in_fresh_process(opened, partial(open_dataset, setting), imported=IMPORTED)
    later = [in_fresh_process(opened, partial(open_dataset, setting), imported=IMPORTED)[0] for _ in range(rounds)]
    open_s, open_bytes = (statistics.median(values) for values in zip(*later, strict=True))
    rows = [
        ["the first open, which makes the table", f"{shards:,}", f"{making_s:.2f}", f"{peak.anonymous / MIB:.0f}"],
        ["an open with the table there", f"{shards:,}", f"{open_s:.2f}", f"{open_bytes / MIB:.0f}"],
    ]
    for name, (number, call) in others.items():
        (seconds, num_bytes), _ = in_fresh_process(opened, call, imported=(*IMPORTED, "streaming"))
        rows.append([name, f"{number:,}", f"{seconds:.2f}", f"{num_bytes / MIB:.0f}"])
    print_table("opening a dataset", ["", "shards", "seconds", "private MiB"], rows)
    made = making_s <= MAX_MAKING_S and peak.anonymous <= MAX_MAKING
    print(f"made in {MAX_MAKING_S:.0f} s and 1 GiB: {verdict(made)}")
    found = open_s <= MAX_OPEN_S and open_bytes <= MAX_OPEN
    print(f"opened in {MAX_OPEN_S:.0f} s and {MAX_OPEN // MIB} MiB: {verdict(found)}", flush=True)


def timed_resume(setting: Setting, share: float) -> tuple[Resume, float]:
    """Where the seconds to a first batch go, and those of the CPU."""
    begin = time.process_time()
    return resume(setting, share), time.process_time() - begin


def memory_of_workers(setting: Setting) -> int:
    """Private bytes of the largest loader worker of a rank when the first batch is there."""
    from lmms_stream.loader.loader import PackedLoader

    loader = PackedLoader(
        open_dataset(setting), global_batch=setting.global_batch, num_workers=NUM_WORKERS, start_method="server",
        world=setting.world,
    )  # fmt: skip
    batches = iter(loader)
    next(batches)
    family = psutil.Process().children(recursive=True)
    workers = [each for each in family if not each.children() and each.parent() != psutil.Process()]
    return max(each.memory_full_info().uss - mapped_bytes(each.pid) for each in workers)


def mapped_bytes(pid: int) -> int:
    """Pages of files that a process alone has mapped: the page cache's, which the kernel takes back when it likes."""
    fields = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return 1024 * sum(int(field[1]) for field in fields if field[0] == "Private_Clean:")


def show_resumes(setting: Setting, nodes: list[int], rounds: int) -> None:
    rows, slowest, largest = [], 0.0, 0
    for count in nodes:
        mine = dataclasses.replace(setting, canonical_nodes=count)
        (first, counting, num_packs), _ = in_fresh_process(first_run, mine, imported=IMPORTED, timeout_s=1800)
        print(
            f"\n{count} canonical nodes: first run {first:.1f} s, of which counting {num_packs:,} packs {counting:.1f}"
        )
        found = in_turns({share: partial(timed_resume, mine, share) for share in SHARES}, rounds, IMPORTED)
        for share, results in found.items():
            parts = [statistics.median(getattr(each, name) for each, _ in results) for name in Resume.__slots__]
            total = statistics.median(sum(dataclasses.astuple(each)) for each, _ in results)
            cpu_s = statistics.median(cpu_s for _, cpu_s in results)
            slowest = max(slowest, total)
            cells = [f"{seconds:.2f}" for seconds in (total, cpu_s, *parts)]
            rows.append([f"{count} canonical nodes, resumed at {share:.0%}", *cells])
        of_worker, _ = in_fresh_process(memory_of_workers, mine, imported=IMPORTED)
        largest = max(largest, of_worker)
        print(
            f"{count} canonical nodes: private memory of a worker, the largest of {NUM_WORKERS}, {of_worker / MIB:.0f} "
            f"MiB; of the {NODE_WORKERS} of a node as large {NODE_WORKERS * of_worker / (1 << 30):.1f} GiB"
        )
    columns = ["", "in all", "of the CPU", "dataset", "plan", "state", "first batch"]
    print_table("seconds to the first batch", columns, rows)
    print(f"at most {MAX_RESUME_S} s anywhere: {verdict(slowest <= MAX_RESUME_S)} ({slowest:.2f} s)")
    met = verdict(largest <= MAX_WORKER)
    print(f"a worker takes at most {MAX_WORKER // MIB} MiB before its first batch: {met} ({largest / MIB:.0f} MiB)")


def simulated(setting: Setting) -> tuple[float, float, Simulation]:
    """Seconds and CPU seconds of simulating an epoch of the dataset on 8 nodes of 8 GPUs, and what is told."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    cluster = Cluster(num_nodes=8, gpus_per_node=8, bandwidth="10gbit")
    told = simulate(open_dataset(setting), cluster, global_batch=512)
    return time.perf_counter() - begin, time.process_time() - begin_cpu, told


def show_simulation(setting: Setting, nodes: int) -> None:
    mine = dataclasses.replace(setting, canonical_nodes=nodes)
    (seconds, cpu_s, told), peak = in_fresh_process(simulated, mine, imported=IMPORTED, timeout_s=1800)
    print(
        f"\nsimulate, {nodes} canonical nodes, packs counted: {told.num_steps_seen:,} of {told.num_steps:,} steps "
        f"in {seconds:.0f} s ({cpu_s:.0f} s of the CPU), {peak.anonymous / MIB:,.0f} MiB of private memory, "
        f"{peak.resident / MIB:,.0f} with what is mapped; {told.copies:.2f} downloads of a shard"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=10**6)
    parser.add_argument("--samples-per-shard", type=int, default=1000, help="of about 40 tokens")
    parser.add_argument("--streaming-shards", type=int, default=10**5, help="of the peers; 0: none are measured")
    parser.add_argument("--canonical-nodes", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--nodes", type=int, default=1, help="of the job, a rank each; the first one's is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the shards are written; default: the temporary folder")
    args = parser.parse_args()
    keep_to_one_core()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        os.environ["TMPDIR"] = name
        lengths = np.random.default_rng(0).integers(*SAMPLE_TOKENS, REAL_SHARDS * args.samples_per_shard)
        size = 4 * int(lengths.sum()) // REAL_SHARDS + 40 * args.samples_per_shard
        write_tokens(folder / "real", lengths.astype(np.uint32), shard_bytes=size)
        setting = Setting(
            folder=folder, name="many", packing_length=4096, global_batch=64, num_workers=0, nodes=args.nodes
        )
        num_samples = link_tokens(folder / "real", setting.remote, shards=args.shards)
        megabytes = (setting.remote / "index.json").stat().st_size / 1e6
        print(f"{num_samples:,} samples in {args.shards:,} shards, an index of {megabytes:.0f} MB")
        others: dict[str, tuple[int, Callable[[], Any]]] = {}
        if args.streaming_shards:
            few = folder / "few"
            link_tokens(folder / "real", few, shards=args.streaming_shards)
            others["parse_index of the whole index"] = args.streaming_shards, partial(parse_whole, few / "index.json")
            others["MosaicML Streaming"] = args.streaming_shards, partial(open_streaming, few)
        show_opens(setting, args.shards, others, args.rounds)
        show_resumes(setting, args.canonical_nodes, args.rounds)
        show_simulation(setting, max(args.canonical_nodes))


if __name__ == "__main__":
    main()
