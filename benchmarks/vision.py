"""Claims: chats with a photograph of 1 megapixel each come as batches at least twice as fast as from files through
transformers' processor in a torch DataLoader, faster than from `datasets` with its Image feature, and, from the same S3
server, with an empty cache and a full one, faster than by litdata and by MosaicML's own StreamingDataset.

Batches are of the same chats, so many at a time (checked: tokens and patches of an epoch are equal), and all are made
by the same number of worker processes, with one thread each:

- lmms_stream: MDS shards, packs of a batch's chats, MultimodalProcessor of Qwen2.5-VL;
- files: a JPEG a chat, opened by Pillow, and transformers' processor of each batch, with the image processor that
  AutoProcessor takes by itself (fast) and with the slow one;
- datasets: Arrow files with the bytes of the JPEGs, the same otherwise;
- litdata (`optimize`, StreamingDataset, StreamingDataLoader) and MosaicML's StreamingDataset in a torch DataLoader: the
  same stored samples in shards of the same size, and for each sample our decoding and our processor, so that only the
  way of the data differs.

"whole": the model takes the photograph as large as it is. "half": at half of its width and height, where ours decodes
it at a fraction. Seconds are those of an epoch, from opening the dataset to the last batch, best of the rounds, in
which the contestants take turns, each in a process that has done its imports and processed a chat. CPU seconds are
those of the process and its workers together. Of a batch nothing is read but its tokens.

The server is the one at S3_ENDPOINT_URL (with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY); without it moto is started,
which is slow and shares this machine's cores. What is uploaded is removed again.

    python benchmarks/vision.py
    python benchmarks/vision.py --chats 64 --rounds 1 --pixels half
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from measure import THREAD_SETTINGS, in_fresh_process, print_table, verdict
from photographs import save_tiny_processor, stored_chats, write_arrow, write_chunks, write_files, write_mds
from s3 import server
from vision_contestants import BATCH, WORKERS, Contestant, Job, by_litdata, by_mosaicml, by_transformers, ours

MIN_TIMES_FILES = 2.0
PIXELS = {"whole": 1008 * 1008, "half": 500 * 500}  # image_max_pixels
TIMEOUT_S = 600.0
IMPORTED = (
    "torch", "streaming", "datasets", "litdata", "boto3", "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl_fast", "lmms_stream.loader.loader",
    "lmms_stream.processors.multimodal", "lmms_stream.plan.kernels.best_fit",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    wall: float  # seconds
    cpu: float
    tokens: int
    patches: int


def epoch(contestant: Contestant, job: Any) -> Epoch:
    import torch

    torch.set_num_threads(1)
    batches = contestant(job)
    cpu_start, start = cpu_seconds(), time.perf_counter()
    tokens, patches = (sum(each) for each in zip(*batches(), strict=True))
    wall = time.perf_counter() - start
    return Epoch(wall=wall, cpu=cpu_seconds() - cpu_start, tokens=tokens, patches=patches)


def cpu_seconds() -> float:
    """Of this process and of its workers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measured(
    contestants: Mapping[str, tuple[Contestant, Any]], rounds: int, imported: tuple[str, ...] = IMPORTED
) -> dict[str, Epoch]:
    """The best of each. A job with a cache is measured twice, with the cache empty and then full.

    imported: modules that every process has before its contestant begins.
    """
    best: dict[str, Epoch] = {}
    for _ in range(rounds):
        for name, (contestant, job) in contestants.items():
            for suffix in (", cold", ", warm") if job.cache else ("",):
                each, _ = in_fresh_process(epoch, contestant, job, imported=imported, timeout_s=TIMEOUT_S)
                known = best.get(name + suffix, each)
                if (each.tokens, each.patches) != (known.tokens, known.patches):
                    raise SystemExit(f"{name}: {each} and {known} are not of the same chats")
                best[name + suffix] = Epoch(
                    wall=min(each.wall, known.wall),
                    cpu=min(each.cpu, known.cpu),
                    tokens=each.tokens,
                    patches=each.patches,
                )
            shutil.rmtree(job.cache or "/nonexistent", ignore_errors=True)
    if len({(each.tokens, each.patches) for each in best.values()}) > 1:
        raise SystemExit(f"contestants read other chats than others: {best}")
    return best


def show(title: str, best: Mapping[str, Epoch], chats: int, reference: str) -> None:
    mine = best[reference]
    rows = [
        [
            name,
            f"{chats / each.wall:.1f}",
            f"{chats / each.cpu:.1f}",
            f"{each.wall / mine.wall:.2f}",
            f"{each.cpu / mine.cpu:.2f}",
        ]
        for name, each in best.items()
    ]
    print_table(title, ["", "chats/s", "a second of CPU", "times ours", "of CPU"], rows)


def compare_local(folder: Path, name: str, args: argparse.Namespace) -> None:
    job = partial(Job, processor=str(folder / "processor"), max_pixels=PIXELS[name], chats=args.chats)
    contestants: dict[str, tuple[Contestant, Job]] = {"lmms_stream": (ours, job(folder=str(folder / "mds")))}
    for data, of_files in (("files", True), ("datasets", False)):
        for kind, use_fast in (("fast", True), ("slow", False)):
            contestant = partial(by_transformers, of_files=of_files, use_fast=use_fast)
            contestants[f"{data}, {kind} processor"] = contestant, job(folder=str(folder / data))
    best = measured(contestants, args.rounds)
    title = f"{name}: {args.chats} chats with a photograph, {WORKERS} workers, from this machine's disk"
    show(title, best, args.chats, "lmms_stream")
    for data, least in (("files", MIN_TIMES_FILES), ("datasets", 1.0)):
        wall, cpu = (
            min(getattr(each, clock) for key, each in best.items() if key.startswith(data))
            / getattr(best["lmms_stream"], clock)
            for clock in ("wall", "cpu")
        )
        print(f"{name}: at least {least:.0f} times {data}: {verdict(wall >= least)} ({wall:.2f}; of CPU {cpu:.2f})")


def compare_stores(folder: Path, urls: Mapping[str, str], name: str, args: argparse.Namespace) -> None:
    job = partial(Job, processor=str(folder / "processor"), max_pixels=PIXELS[name], chats=args.chats)
    contestants: dict[str, tuple[Contestant, Job]] = {
        "lmms_stream": (ours, job(folder=urls["mds"], cache=str(folder / "cache"))),
        "litdata": (by_litdata, job(folder=urls["litdata"], cache=str(folder / "cache"))),
        "MosaicML": (by_mosaicml, job(folder=urls["mds"], cache=str(folder / "cache"))),
    }
    best = measured(contestants, args.rounds)
    title = f"{name}: {args.chats} chats with a photograph, {WORKERS} workers, from an S3 server"
    show(title, best, args.chats, "lmms_stream, cold")
    for state in ("cold", "warm"):
        for peer in ("litdata", "MosaicML"):
            mine, theirs = best[f"lmms_stream, {state}"], best[f"{peer}, {state}"]
            ahead, of_cpu = theirs.wall / mine.wall, theirs.cpu / mine.cpu
            print(
                f"{name}, {state}: ahead of {peer}: {verdict(ahead > 1)} ({ahead:.2f}; of CPU {of_cpu:.2f})", flush=True
            )


def write_datasets(folder: Path, args: argparse.Namespace) -> None:
    """All formats, and lengths indexes for both sizes of the photograph."""
    from lmms_stream.mds.measuring import index_dataset
    from lmms_stream.processors.multimodal import MultimodalProcessor

    save_tiny_processor(folder / "processor")
    write_mds(folder / "mds", stored_chats(args.chats), shard_bytes=args.shard_bytes)
    for name in args.pixels:
        processor = MultimodalProcessor.from_pretrained(str(folder / "processor"), image_max_pixels=PIXELS[name])
        index_dataset(str(folder / "mds"), processor, num_workers=1)
    write_files(folder / "files", args.chats)
    write_arrow(folder / "datasets", args.chats)
    write_chunks(folder / "litdata", args.chats, chunk_bytes=args.shard_bytes)


@contextmanager
def uploaded(folder: Path, bucket: str) -> Iterator[dict[str, str]]:
    """The URLs of our shards and of litdata's chunks, under a prefix of their own until the end."""
    from lmms_stream.storage.storage import open_storage

    prefix = f"lmms-stream-benchmark-{uuid.uuid4().hex[:12]}"
    storage = open_storage(f"s3://{bucket}/{prefix}")
    files = [path for name in ("mds", "litdata") for path in (folder / name).rglob("*") if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in files]
    try:
        for path, name in zip(files, names, strict=True):
            storage.upload(path, name)
        yield {name: f"s3://{bucket}/{prefix}/{name}" for name in ("mds", "litdata")}
    finally:
        for name in names:
            storage.delete(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=192, help=f"with a photograph each; a multiple of {BATCH}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pixels", choices=tuple(PIXELS), nargs="+", default=list(PIXELS))
    parser.add_argument("--shard-bytes", type=int, default=4_000_000)
    parser.add_argument("--part", choices=("local", "stores", "all"), default="all")
    parser.add_argument("--bucket", help="of the S3 server; made if it is not there")
    parser.add_argument("--folder", type=Path, help="where datasets are written; default: the temporary folder")
    args = parser.parse_args()
    os.environ.update(dict.fromkeys(THREAD_SETTINGS, "1") | {"TOKENIZERS_PARALLELISM": "false"})
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        os.environ["TMPDIR"] = name
        in_fresh_process(write_datasets, folder, args)
        if args.part != "stores":
            for pixels in args.pixels:
                compare_local(folder, pixels, args)
        if args.part != "local":
            with server(args.bucket) as (_, bucket), uploaded(folder, bucket) as urls:
                for pixels in args.pixels:
                    compare_stores(folder, urls, pixels, args)


if __name__ == "__main__":
    main()
