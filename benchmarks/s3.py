"""Claim: an epoch from an S3 server and an empty cache comes at 75 % of the speed at which boto3 downloads the shards,
packed, where server and readers share the cores, and at 90 % where they do not; each shard is fetched once a node.

Two ranks with two loader workers each read one epoch of tokenized samples as packs; MB/s are bytes of the shards over
wall time, from processes that have done their imports to the last batch. Beside it: boto3's download_fileobj of
the same objects to files, with as many threads in all as the loader's FetchConfig gives its processes, in as many
processes and in one, an object a thread, and in one process with boto3's own parallel ranges. The fastest is what
counts. How long the epoch takes with a warm cache shows what of it is not the network. CPU seconds are of the readers
and their workers, or of the downloads, without the server's; they say what is left where the machine is busy otherwise.
With --server-pids, the processes that run the server, its CPU seconds are counted beside them, and the table says what
share CPU seconds alone allow: of all that work on cores they share, or of the busier side where these are apart.

--cores keeps what is timed to these cores; with --server-cores the server's processes are kept to others:
`--cores 1 --server-cores 0 --server-pids 812 830` gives either one core.

Requests are counted by a pass-through between the ranks and the server, in a run that is not timed.

The server is the one at S3_ENDPOINT_URL (with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY); without it moto is started,
which is slow and shares this machine's cores: its figures say little. What is uploaded is removed again.

    python benchmarks/s3.py --bucket my-bucket
    python benchmarks/s3.py --shards 8 --shard-bytes 4000000 --rounds 1
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import shutil
import socket
import socketserver
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from data import link_tokens, sample_lengths, write_tokens
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.demo.endpoint import BUCKET, s3_endpoint
from lmms_stream.types import World
from measure import in_fresh_process, print_table, verdict

MIN_SHARE = 0.75  # of the fastest download, where the server and the readers share the cores
MIN_SHARE_APART = 0.9  # where they have cores of their own
RANKS, WORKERS = 2, 2
GLOBAL_BATCH = 64
TIMEOUT_S = 900.0
SHUFFLE_BLOCK = 1 << 15  # samples, a few shards: with the default, this dataset would be a block or two, all of which
# must be there before the first packs are, so that downloading and reading would take turns
BYTES_PER_SAMPLE = 2130  # of chat lengths as they are stored
REAL_SHARDS = 4  # the others are links to them
IMPORTED = ("boto3", "lmms_stream.loader.loader", "lmms_stream.plan.kernels.best_fit", "lmms_stream.processors.text")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where the shards are."""

    endpoint: str
    bucket: str
    prefix: str
    names: tuple[str, ...]
    total_bytes: int
    packing_length: int


# What is timed: each of these runs in processes that start together


def read_epoch(target: Target, threads: int, local: Path, rank: int) -> int:
    """Read this rank's share of an epoch; its tokens."""
    from lmms_stream.loader.loader import PackedLoader

    os.environ["S3_ENDPOINT_URL"] = target.endpoint
    dataset = PackedStreamingDataset(
        f"s3://{target.bucket}/{target.prefix}",
        local,
        processor=TokensProcessor(),
        packing=PackingConfig(packing_length=target.packing_length),
        order=OrderConfig(shuffle_block_size=SHUFFLE_BLOCK),
        world=World(rank=rank, world_size=RANKS),
        fetch=FetchConfig(threads=threads),
    )
    return sum(batch.num_tokens for batch in PackedLoader(dataset, global_batch=GLOBAL_BATCH, num_workers=WORKERS))


def download(target: Target, processes: int, threads: int, ranges: bool, local: Path, number: int) -> int:
    """Download every processes-th shard with boto3; their bytes."""
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    client = boto3.client("s3", endpoint_url=target.endpoint, config=Config(max_pool_connections=max(10, threads)))
    transfer = TransferConfig(use_threads=ranges)
    local.mkdir(exist_ok=True)

    def fetch(name: str) -> int:
        with (local / name).open("wb") as file:
            client.download_fileobj(target.bucket, f"{target.prefix}/{name}", file, Config=transfer)
            return file.tell()

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(fetch, target.names[number::processes]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Wall seconds from the start of the first process to the end of the last, CPU seconds of all, and the server's."""

    seconds: float
    cpu_seconds: float
    server_seconds: float


def together(task: Callable[..., int], processes: int, *, server_pids: Sequence[int] = ()) -> tuple[Timed, int]:
    """The times of task(number) for each number, in processes that begin together, and the sum of what they return."""
    server = sum(map(cpu_seconds_of, server_pids))
    barrier = multiprocessing.get_context("forkserver").Barrier(processes)
    with ThreadPoolExecutor(processes) as pool:
        calls = [
            pool.submit(in_fresh_process, timed_task, task, number, barrier, imported=IMPORTED, timeout_s=TIMEOUT_S)
            for number in range(processes)
        ]
        results = [call.result()[0] for call in calls]
    starts, stops, cpu_seconds, values = zip(*results, strict=True)
    server = sum(map(cpu_seconds_of, server_pids)) - server
    return Timed(seconds=max(stops) - min(starts), cpu_seconds=sum(cpu_seconds), server_seconds=server), sum(values)


def cpu_seconds_of(pid: int) -> float:
    """CPU seconds that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed_task(task: Callable[..., int], number: int, barrier: Any) -> tuple[float, float, float, int]:
    compile_loops()
    barrier.wait(TIMEOUT_S)
    start, used = time.monotonic(), sum(os.times()[:4])  # the same clock in all processes; with those that have ended
    value = task(number)
    return start, time.monotonic(), sum(os.times()[:4]) - used, value


def compile_loops() -> None:
    """Read a few samples as packs, from a folder of their own."""
    from lmms_stream.loader.loader import PackedLoader

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "few")
        write_tokens(folder, sample_lengths("chat", 8, limit=4096), shard_bytes=1 << 20)
        packing = PackingConfig(packing_length=4096)
        dataset = PackedStreamingDataset(folder, Path(name), processor=TokensProcessor(), packing=packing)
        next(iter(PackedLoader(dataset, global_batch=1)))


class CountingProxy(socketserver.ThreadingTCPServer):
    """Passes connections on to a server and counts the requests in them by method and path.

    Made for requests without a body (GET, HEAD), which end with an empty line.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int):
        super().__init__(("127.0.0.1", 0), _Connection)
        self.upstream = host, port
        self.requests: Counter[tuple[str, str]] = Counter()


class _Connection(socketserver.BaseRequestHandler):
    server: CountingProxy

    def handle(self) -> None:
        with socket.create_connection(self.server.upstream) as upstream:
            threading.Thread(target=_pass_on, args=(upstream, self.request), daemon=True).start()
            waiting = b""
            while data := self.request.recv(1 << 16):
                upstream.sendall(data)
                *heads, waiting = (waiting + data).split(b"\r\n\r\n")
                for head in heads:
                    method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
                    self.server.requests[method, path.partition("?")[0]] += 1


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):  # the other side has gone: nothing is left to pass on
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextmanager
def counting(endpoint: str) -> Iterator[CountingProxy]:
    url = urlsplit(endpoint)
    if url.scheme != "http":
        raise SystemExit(f"requests to {endpoint} cannot be counted: they are encrypted; use --no-count")
    with CountingProxy(url.hostname or "", url.port or 80) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield proxy
        proxy.shutdown()


def count_requests(target: Target, threads: int, folder: Path) -> None:
    """The table of an epoch's requests, and whether each shard was fetched once."""
    with counting(target.endpoint) as proxy:
        host, port = proxy.server_address[:2]
        passed = dataclasses.replace(target, endpoint=f"http://{host!s}:{port}")
        together(partial(read_epoch, passed, threads, folder / "cache"), RANKS)
    shutil.rmtree(folder / "cache")
    per_shard = dict.fromkeys(target.names, 0)
    others: Counter[tuple[str, str]] = Counter()
    for (method, path), count in proxy.requests.items():
        name = path.rpartition("/")[2]
        if method == "GET" and name in per_shard:
            per_shard[name] += count
        else:
            others[method, path.partition(f"/{target.prefix}/")[2]] += count
    counts = [*per_shard.values()]
    rows = [["GET of a shard", f"{len(counts):,}", f"{sum(counts):,}", f"{min(counts)}", f"{max(counts)}"]]
    rows += [[f"{method} {name}", "1", f"{count}", f"{count}", f"{count}"] for (method, name), count in others.items()]
    print_table("requests of one epoch", ["", "objects", "requests", "fewest of an object", "most"], rows)
    print(f"1 GET a shard: {verdict(set(counts) == {1})} ({sum(counts) / len(counts):.2f})", flush=True)


# The server, and what is read from it


@contextmanager
def server(bucket: str | None) -> Iterator[tuple[str, str]]:
    """Endpoint and bucket."""
    import boto3

    if os.environ.get("S3_ENDPOINT_URL"):
        name = bucket or BUCKET
        client = boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
        if name not in [each["Name"] for each in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=name)
        print(f"server: {os.environ['S3_ENDPOINT_URL']}, bucket {name}")
        yield os.environ["S3_ENDPOINT_URL"], name
        return
    print("server: moto on this machine (S3_ENDPOINT_URL is not set); its figures say little")
    with s3_endpoint() as endpoint:
        yield endpoint, BUCKET


@contextmanager
def uploaded(endpoint: str, bucket: str, folder: Path, args: argparse.Namespace) -> Iterator[Target]:
    """The dataset on the server, under a prefix of its own until the end."""
    count = REAL_SHARDS * args.shard_bytes // BYTES_PER_SAMPLE
    lengths = sample_lengths("chat", count, limit=args.packing_length, seed=args.seed)
    write_tokens(folder / "real", lengths, shard_bytes=args.shard_bytes, seed=args.seed)
    link_tokens(folder / "real", folder / "dataset", shards=args.shards)
    prefix = f"lmms-stream-benchmark-{uuid.uuid4().hex[:12]}"
    storage = open_storage(f"s3://{bucket}/{prefix}")
    files = [path for path in (folder / "dataset").rglob("*") if path.is_file()]
    names = [path.relative_to(folder / "dataset").as_posix() for path in files]
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(storage.upload, files, names))
        shards = [path for path in files if path.suffix == ".mds"]
        yield Target(
            endpoint=endpoint,
            bucket=bucket,
            prefix=prefix,
            names=tuple(path.name for path in shards),
            total_bytes=sum(path.stat().st_size for path in shards),
            packing_length=args.packing_length,
        )
    finally:
        for name in names:
            storage.delete(name)


def measure(target: Target, folder: Path, args: argparse.Namespace) -> None:
    """The table of speeds."""
    processes, threads = RANKS * WORKERS, args.threads
    all_threads = processes * threads
    downloads: dict[str, tuple[int, Callable[..., int]]] = {
        f"download_fileobj, {processes} processes x {threads} threads": (
            processes,
            partial(download, target, processes, threads, False),
        ),
        f"download_fileobj, 1 process x {all_threads} threads": (1, partial(download, target, 1, all_threads, False)),
        f"download_fileobj, 1 process x {threads} x boto3's ranges": (1, partial(download, target, 1, threads, True)),
    }
    cold = f"lmms_stream, {RANKS} ranks x {WORKERS} workers x {threads} threads"
    times: dict[str, list[Timed]] = {name: [] for name in (*downloads, cold, "the same, cache warm")}
    for number in range(args.rounds):
        for name, (count, task) in downloads.items():
            local = folder / f"download-{number}"
            times[name].append(together(partial(task, local), count, server_pids=args.server_pids)[0])
            shutil.rmtree(local)
        epoch = partial(read_epoch, target, threads, folder / "cache")
        for name in (cold, "the same, cache warm"):
            elapsed, num_tokens = together(epoch, RANKS, server_pids=args.server_pids)
            times[name].append(elapsed)
        shutil.rmtree(folder / "cache")
    best = {name: min(each.seconds for each in found) for name, found in times.items()}
    cpu = {name: min(each.cpu_seconds for each in found) for name, found in times.items()}
    server = {name: min(each.server_seconds for each in found) for name, found in times.items()}
    fastest, gigabytes = min(downloads, key=lambda name: best[name]), target.total_bytes / 1e9
    reference = best[fastest]
    print_table(
        f"{len(target.names)} shards, {target.total_bytes / 1e6:,.0f} MB, {num_tokens:,} tokens in packs of "
        f"{target.packing_length}, {len(os.sched_getaffinity(0))} cores",
        ["", "seconds", "MB/s", "of the fastest download", "CPU s/GB", "CPU ms/10^6 tokens", "the server's CPU s/GB"],
        [
            [
                name,
                f"{each:.2f}",
                f"{target.total_bytes / each / 1e6:,.0f}",
                f"{reference / each:.2f}",
                f"{cpu[name] / gigabytes:.2f}",
                f"{cpu[name] / num_tokens * 1e9:.1f}",
                f"{server[name] / gigabytes:.2f}" if args.server_pids else "-",
            ]
            for name, each in best.items()
        ],
    )
    if args.server_pids:
        work: Callable[[Sequence[float]], float] = max if args.server_cores else sum
        allowed = work([cpu[fastest], server[fastest]]) / work([cpu[cold], server[cold]])
        print(f"CPU seconds alone allow {allowed:.1%}")
    share, least = reference / best[cold], MIN_SHARE_APART if args.server_cores else MIN_SHARE
    print(f"at least {least:.0%} of download_fileobj: {verdict(share >= least)} ({share:.1%})", flush=True)


@contextmanager
def cores_of(args: argparse.Namespace) -> Iterator[None]:
    """What is timed, and the server, each on the cores that it is to have; the server gets its own back."""
    if args.server_cores and not args.server_pids:
        raise SystemExit("--server-cores needs --server-pids")
    tasks = [int(each.name) for pid in args.server_pids for each in Path(f"/proc/{pid}/task").iterdir()]
    before = {task: os.sched_getaffinity(task) for task in tasks}
    try:
        for task in tasks if args.server_cores else ():
            os.sched_setaffinity(task, args.server_cores)
        if args.cores:
            os.sched_setaffinity(0, args.cores)
        yield
    finally:
        for task, cores in before.items():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(task, cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket", help=f"made if it is not there; default: {BUCKET}")
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--shard-bytes", type=int, default=16_000_000)
    parser.add_argument("--threads", type=int, default=FetchConfig().threads, help="downloads at once of a process")
    parser.add_argument("--packing-length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, nargs="+", default=[], help="for what is timed; default: all")
    parser.add_argument("--server-cores", type=int, nargs="+", default=[], help="for the server; default: all")
    parser.add_argument("--server-pids", type=int, nargs="+", default=[], help="the server's processes")
    parser.add_argument("--no-count", action="store_true", help="do not count requests")
    parser.add_argument("--folder", type=Path, help="for the cache and the downloads; default: the temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name, server(args.bucket) as (endpoint, bucket):
        os.environ["TMPDIR"] = name
        with uploaded(endpoint, bucket, Path(name), args) as target, cores_of(args):
            measure(target, Path(name), args)
            if not args.no_count:
                count_requests(target, args.threads, Path(name))


if __name__ == "__main__":
    main()
