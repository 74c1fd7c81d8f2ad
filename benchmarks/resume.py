"""Claim: a run resumes anywhere in an epoch of any size in the same time: at 10^8 samples the first batch is there
1.5 s after the imports.

Measured from a process that has done its imports and nothing else, with the loader's state as a JSON file: read the
state, open the dataset, its plan and a PackedLoader, load the state, take a batch. A batch of the plan is one pack. The
plan's packs were counted once before, by the first run, as the table says.

Beside it: MosaicML Streaming's StreamingDataLoader.load_state_dict on the same shards, and a shuffled Hugging Face
IterableDataset.load_state_dict over parquet files of as many of the samples. Their batches are as many samples as a
pack holds on average. Streaming's state is one that its loader gave after a batch, with sample_in_epoch set to the
position; that of datasets is taken by reading up to there, which is not timed.

The shards are a few real ones under many hard-linked names, with a lengths index of full size, so a dataset of 10^8
samples takes 0.4 GB of disk. They are in the page cache.

    python benchmarks/resume.py
    python benchmarks/resume.py --samples 100000 1000000 --streaming-samples 100000 --hf-samples 100000 --rounds 1
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from data import link_tokens, token_samples, write_tokens
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.types import World
from measure import MIB, in_fresh_process, keep_to_one_core, print_table, verdict

MAX_RESUME_S, MAX_TIMES_FASTEST = 1.5, 1.5
SHARES = (0.01, 0.5, 0.99)  # of an epoch
HF_SHARES = (0.01, 0.5)
HF_FILES = 16
HF_ROW_GROUP = 10_000
HF_SHUFFLE_BUFFER = 10_000
SAMPLE_TOKENS = (16, 65)
IMPORTED = ("lmms_stream.loader.loader", "lmms_stream.processors.text", "lmms_stream.plan.kernels.best_fit")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A dataset and how it is packed; states are kept as JSON in `folder`. nodes: of a rank each; the first reads."""

    folder: Path
    name: str
    packing_length: int
    global_batch: int
    num_workers: int
    canonical_nodes: int | None = None
    nodes: int = 1

    @property
    def world(self) -> World:
        return World(world_size=self.nodes, num_nodes=self.nodes)

    @property
    def remote(self) -> Path:
        return self.folder / self.name

    @property
    def local(self) -> Path:
        return self.folder / f"{self.name}-cache"

    def state(self, who: str, share: float) -> Path:
        return self.folder / f"{self.name}-{who}-{self.canonical_nodes}-{share}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Seconds until the dataset was open, the plan ready, the state loaded, the first batch there."""

    opened: float
    planned: float
    loaded: float
    first_batch: float


# lmms_stream


def open_dataset(setting: Setting) -> PackedStreamingDataset:
    packing = PackingConfig(packing_length=setting.packing_length)
    order = OrderConfig(num_canonical_nodes=setting.canonical_nodes)
    return PackedStreamingDataset(
        setting.remote, setting.local, processor=TokensProcessor(), packing=packing, order=order
    )


def first_run(setting: Setting) -> tuple[float, float, int]:
    """Seconds to a first batch when the packs have to be counted; seconds of those for counting; packs of an epoch."""
    from lmms_stream.loader.loader import PackedLoader

    start = time.perf_counter()
    dataset = open_dataset(setting)
    before_plan = time.perf_counter()
    num_packs = dataset.plan.num_packs(0)
    counting = time.perf_counter() - before_plan
    loader = PackedLoader(
        dataset, global_batch=setting.global_batch, num_workers=setting.num_workers, world=setting.world
    )
    next(iter(loader))
    seconds = time.perf_counter() - start
    begin = loader.state_dict()
    for share in SHARES:
        loader.load_state_dict(begin)
        loader.skip_steps(int(num_packs * share) // setting.global_batch)
        setting.state("ours", share).write_text(json.dumps(loader.state_dict()))
    return seconds, counting, num_packs


def resume(setting: Setting, share: float) -> Resume:
    from lmms_stream.loader.loader import PackedLoader

    clock = [time.perf_counter()]
    state = json.loads(setting.state("ours", share).read_text())
    dataset = open_dataset(setting)
    clock.append(time.perf_counter())
    dataset.plan.num_packs(0)
    clock.append(time.perf_counter())
    loader = PackedLoader(
        dataset, global_batch=setting.global_batch, num_workers=setting.num_workers, world=setting.world
    )
    loader.load_state_dict(state)
    clock.append(time.perf_counter())
    batch = next(iter(loader))
    clock.append(time.perf_counter())
    if not batch.num_loss_tokens:
        raise SystemExit("the first batch is empty")
    opened, planned, loaded, first_batch = np.diff(clock).tolist()
    return Resume(opened=opened, planned=planned, loaded=loaded, first_batch=first_batch)


# MosaicML Streaming


def streaming_loader(setting: Setting, batch_size: int) -> Any:
    from streaming import StreamingDataLoader, StreamingDataset

    warnings.simplefilter("ignore")
    dataset = StreamingDataset(local=str(setting.remote), shuffle=True, batch_size=batch_size)
    return StreamingDataLoader(dataset, batch_size=batch_size, num_workers=setting.num_workers, collate_fn=_as_columns)


def _as_columns(samples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {"input_ids": [sample["input_ids"] for sample in samples]}


def save_streaming(setting: Setting, batch_size: int, samples: int) -> None:
    loader = streaming_loader(setting, batch_size)
    next(iter(loader))
    state = loader.state_dict()
    for share in SHARES:
        in_epoch = int(samples * share) // batch_size * batch_size
        setting.state("streaming", share).write_text(json.dumps(state | {"sample_in_epoch": in_epoch}))


def resume_streaming(setting: Setting, batch_size: int, share: float) -> float:
    start = time.perf_counter()
    state = json.loads(setting.state("streaming", share).read_text())
    loader = streaming_loader(setting, batch_size)
    loader.load_state_dict(state)
    next(iter(loader))
    return time.perf_counter() - start


# Hugging Face datasets


def write_parquet(folder: Path, samples: int, seed: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    lengths = np.random.default_rng(seed).integers(*SAMPLE_TOKENS, samples).astype(np.uint32)
    for number, part in enumerate(np.array_split(lengths, HF_FILES)):
        columns = [sample["input_ids"] for sample in token_samples(part, seed=seed)]
        pq.write_table(pa.table({"input_ids": columns}), folder / f"{number}.parquet", row_group_size=HF_ROW_GROUP)


def open_parquet(folder: Path) -> Any:
    import datasets

    files = sorted(str(path) for path in folder.glob("*.parquet"))
    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    return rows.shuffle(seed=0, buffer_size=HF_SHUFFLE_BUFFER)


def save_hf(folder: Path, samples: int) -> None:
    rows = open_parquet(folder)
    positions = [int(samples * share) for share in HF_SHARES]
    for number, _ in enumerate(rows, 1):
        if number in positions:
            (folder / f"{HF_SHARES[positions.index(number)]}.json").write_text(json.dumps(rows.state_dict()))
            if number == positions[-1]:
                break


def resume_hf(folder: Path, batch_size: int, share: float) -> float:
    start = time.perf_counter()
    rows = open_parquet(folder)
    rows.load_state_dict(json.loads((folder / f"{share}.json").read_text()))
    batch = []
    for row in rows:
        batch.append(row)
        if len(batch) == batch_size:
            break
    return time.perf_counter() - start


def in_turns(calls: dict[float, Callable[[], Any]], rounds: int, imported: tuple[str, ...]) -> dict[float, list[Any]]:
    """What the calls returned, share after share in every round, each call in a process of its own."""
    results: dict[float, list[Any]] = {share: [] for share in calls}
    for _ in range(rounds):
        for share, call in calls.items():
            results[share].append(in_fresh_process(call, imported=imported, timeout_s=900)[0])
    return results


def show_ours(settings: dict[int, Setting], args: argparse.Namespace) -> None:
    rows, totals = [], {}
    for samples, setting in settings.items():
        (first, counting, num_packs), _ = in_fresh_process(first_run, setting, imported=IMPORTED, timeout_s=1800)
        rows.append(
            [f"{samples:,}", "first run", f"{first:.2f}", "", f"{counting:.2f}", "", "", f"{num_packs:,} packs"]
        )
        calls = {share: partial(resume, setting, share) for share in SHARES}
        for share, results in in_turns(calls, args.rounds, IMPORTED).items():
            parts = [statistics.median([getattr(each, name) for each in results]) for name in Resume.__slots__]
            seconds = [sum(dataclasses.astuple(each)) for each in results]
            totals[samples, share] = statistics.median(seconds)
            cells = [f"{totals[samples, share]:.2f}", *(f"{part:.3f}" for part in parts)]
            rows.append(
                [f"{samples:,}", f"resumed at {share:.0%}", *cells, f"{min(seconds):.2f} to {max(seconds):.2f}"]
            )
    print_table(
        f"seconds to the first batch, packs of {args.packing_length}, {args.num_workers} workers",
        ["samples", "", "in all", "dataset", "plan", "state", "first batch", ""],
        rows,
    )
    slowest, ratio = max(totals.values()), max(totals.values()) / min(totals.values())
    print(
        f"at most {MAX_RESUME_S} s anywhere: {verdict(slowest <= MAX_RESUME_S)} ({slowest:.2f} s); the slowest takes "
        f"at most {MAX_TIMES_FASTEST} times the fastest: {verdict(ratio <= MAX_TIMES_FASTEST)} ({ratio:.2f})",
        flush=True,
    )


def show_peers(folder: Path, setting: Setting, samples: int, args: argparse.Namespace) -> None:
    batch_size = round(args.packing_length / (sum(SAMPLE_TOKENS) - 1) * 2)
    rows = []
    imported = (*IMPORTED, "datasets.packaged_modules.parquet.parquet")
    if samples:
        in_fresh_process(save_streaming, setting, batch_size, samples, imported=imported)
        calls = {share: partial(resume_streaming, setting, batch_size, share) for share in SHARES}
        name = f"streaming {version('mosaicml-streaming')}"
        rows += _peer_rows(name, samples, in_turns(calls, args.rounds, imported))
    if args.hf_samples:
        parquet = folder / "parquet"
        write_parquet(parquet, args.hf_samples, args.seed)
        in_fresh_process(save_hf, parquet, args.hf_samples, imported=imported)
        calls = {share: partial(resume_hf, parquet, batch_size, share) for share in HF_SHARES}
        name = f"datasets {version('datasets')}, buffer of {HF_SHUFFLE_BUFFER:,}"
        rows += _peer_rows(name, args.hf_samples, in_turns(calls, args.rounds, imported))
    if rows:
        columns = ["", "samples", "", "in all", ""]
        print_table(f"seconds to the first batch of {batch_size} samples, {args.num_workers} workers", columns, rows)


def _peer_rows(name: str, samples: int, results: dict[float, list[float]]) -> list[list[str]]:
    return [
        [
            name,
            f"{samples:,}",
            f"resumed at {share:.0%}",
            f"{statistics.median(seconds):.2f}",
            f"{min(seconds):.2f} to {max(seconds):.2f}",
        ]
        for share, seconds in results.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[10**6, 10**7, 10**8])
    parser.add_argument("--streaming-samples", type=int, default=10**7, help="0: not measured")
    parser.add_argument("--hf-samples", type=int, default=10**6, help="0: not measured")
    parser.add_argument("--real-samples", type=int, default=1 << 18, help="those of the shards that all are links to")
    parser.add_argument("--shard-bytes", type=int, default=12 << 20)
    parser.add_argument("--packing-length", type=int, default=4096)
    parser.add_argument("--global-batch", type=int, default=64, help="packs of a step")
    parser.add_argument("--num-workers", type=int, default=0, help="of the data loaders; datasets has none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the shards are written; default: the temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    keep_to_one_core()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        os.environ |= {"TMPDIR": name, "HF_HOME": f"{name}/hf", "HF_HUB_OFFLINE": "1"}
        rng = np.random.default_rng(args.seed)
        lengths = rng.integers(*SAMPLE_TOKENS, args.real_samples).astype(np.uint32)
        write_tokens(folder / "real", lengths, shard_bytes=args.shard_bytes, seed=args.seed)
        settings = {}
        for samples in sorted({*args.samples, args.streaming_samples} - {0}):
            setting = Setting(
                folder=folder,
                name=f"{samples}",
                packing_length=args.packing_length,
                global_batch=args.global_batch,
                num_workers=args.num_workers,
            )
            settings[link_tokens(folder / "real", setting.remote, samples=samples)] = setting
        streaming = next((n for n, each in settings.items() if each.name == f"{args.streaming_samples}"), 0)
        wanted = {n: each for n, each in settings.items() if int(each.name) in args.samples}
        for samples, setting in settings.items():
            shards = len([*setting.remote.glob("*.mds")])
            print(f"{samples:,} samples in {shards:,} shards of at most {args.shard_bytes / MIB:.1f} MiB")
        show_ours(wanted, args)
        if streaming or args.hf_samples:
            show_peers(folder, settings.get(streaming, next(iter(wanted.values()))), streaming, args)


if __name__ == "__main__":
    main()
