"""Claim: one process reads 40 times the samples a second of MosaicML Streaming's defaults and 10 times those of its
best settings, and makes packed batches at 40 % of the speed of copying them in memory.

Samples are shuffled texts of 1 KB, taken by `for sample in dataset` and through a torch DataLoader without workers.
Beside it: streaming.StreamingDataset with its defaults and with other settings, and litdata on the same samples in
its own format.

Packs are made of tokenized samples of 260 tokens on average. Beside it: the peers' samples laid into packs by next-fit
in arrays of their final size (`next_fit_packs`); litdata's TokensLoader, whose blocks cut through samples; and two
kinds of memcpy (`copied_tensors`, `copied_samples`):

- of the tensors: np.copyto into fresh arrays for input_ids, labels and position_ids, int64 each, so 24 bytes a token,
  from one contiguous buffer that was written before and is larger than the processor's caches, as the dataset is;
- of the stored bytes: np.copyto of each sample's bytes, in the plan's order, from all shards in one contiguous
  buffer to one fresh array a pack.

A figure is the best of several rounds, in which the contestants take turns. Each runs in a process of its own, for
--seconds, in which epochs follow one another; imports, compilation and opening the dataset are not timed. The shards
are in the page cache; that ours checks each one's checksum when it first opens it is timed, as is packing each epoch.
Rates of CPU time leave out what a contestant waits, for its own locks and timers or for other processes of the machine.

    python benchmarks/reading.py
    python benchmarks/reading.py --samples 20000 --rounds 1 --seconds 2 --packing-lengths 4096
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from data import SHORTEST, sample_lengths, text_samples, token_samples, write_litdata, write_texts, write_tokens
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.base import IGNORED_LABEL
from lmms_stream.processors.text import TokensProcessor
from measure import in_fresh_process, keep_to_one_core, print_table, verdict
from numpy.typing import NDArray

MIN_TIMES_DEFAULT, MIN_TIMES_BEST, MIN_SHARE_OF_MEMCPY = 40, 10, 0.4
# The first are the defaults: a batch_size must be given, and with 8 predownload is the 64 that it is without one.
# A predownload of 2**30 is the whole epoch.
STREAMING_SETTINGS: list[dict[str, int]] = [
    {"batch_size": 8},
    {"batch_size": 1},
    {"batch_size": 64},
    {"batch_size": 64, "predownload": 8192},
    {"batch_size": 64, "predownload": 1 << 30},
    {"batch_size": 64, "predownload": 1 << 30, "num_canonical_nodes": 8, "shuffle_block_size": 1 << 14},
]
STREAMING_SETTINGS_FOR_PACKS = [STREAMING_SETTINGS[number] for number in (0, 2, 4)]
LITDATA_SETTINGS: dict[str, dict[str, Any]] = {
    "in order": {"shuffle": False},
    "shuffled in windows of 256": {"shuffle": True},
    "shuffled": {"shuffle": True, "item_shuffle_window": "full"},
}
GLOBAL_BATCH = 64
SHARD_BYTES = 1 << 24
MEMCPY_BUFFER = 1 << 28  # bytes
CHUNK = 64  # items between two looks at the clock
IMPORTED = ("torch", "streaming", "lmms_stream.loader.loader", "lmms_stream.processors.text")


Open = Callable[[], Iterable[Any]]  # gives samples, or the number of tokens of each pack while the pack is held


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Samples or tokens a second of wall time, and a second of the process's time on a core."""

    wall: float
    cpu: float


class Epochs(Iterable[Any]):
    """What begins anew each time it is iterated over."""

    def __init__(self, epoch: Callable[[], Iterable[Any]]):
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self._epoch())


def rate(opened_by: Open, unit: str, seconds: float) -> Rate:
    """For `seconds`: of one epoch, if it lasts that long, or of as many as there are in them."""
    opened = opened_by()
    total = 0
    start, cpu_start = time.perf_counter(), time.process_time()
    items = (item for item in opened)  # islice begins a dataset anew that is its own iterator
    began_with = -1
    while time.perf_counter() - start < seconds:
        chunk = islice(items, CHUNK)
        count = sum(chunk) if unit == "tokens" else sum(1 for _ in chunk)
        total += count
        if not count:
            if total == began_with:
                raise RuntimeError("an epoch without items")
            items, began_with = (item for item in opened), total
    return Rate(wall=total / (time.perf_counter() - start), cpu=total / (time.process_time() - cpu_start))


def best_rates(opens: Mapping[str, Open], unit: str, args: argparse.Namespace) -> dict[str, Rate]:
    """The best of each over all rounds."""
    rounds: dict[str, list[Rate]] = {name: [] for name in opens}
    imported = IMPORTED if args.peers == "streaming" else (*IMPORTED, "litdata")
    for _ in range(args.rounds):
        for name, opened in opens.items():
            measured, _ = in_fresh_process(rate, opened, unit, args.seconds, imported=imported, timeout_s=600)
            rounds[name].append(measured)
    return {
        name: Rate(wall=max(each.wall for each in rates), cpu=max(each.cpu for each in rates))
        for name, rates in rounds.items()
    }


# Samples


def ours(folder: Path) -> Iterable[Any]:
    next(iter(PackedStreamingDataset(folder, folder.with_name(f"cache-{folder.name}"))))  # compiles
    return PackedStreamingDataset(folder, folder.with_name(f"cache-{folder.name}"))


def streaming(folder: Path, settings: Mapping[str, int]) -> Iterable[Any]:
    from streaming import StreamingDataset

    warnings.simplefilter("ignore")
    return StreamingDataset(local=str(folder), shuffle=True, **settings)


def litdata(folder: Path, **settings: Any) -> Iterable[Any]:
    from litdata import StreamingDataset

    return StreamingDataset(str(folder), **settings)


def through_loader(opened: Callable[[], Any]) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    return DataLoader(opened(), batch_size=None, num_workers=0)


def streaming_peers(mds: Path, settings: Sequence[Mapping[str, int]]) -> dict[str, Open]:
    return {f"streaming, {_named(each)}": partial(streaming, mds, each) for each in settings}


def _named(settings: Mapping[str, int]) -> str:
    shown = {name: "epoch" if value == 1 << 30 else value for name, value in settings.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


# Packs


def our_packs(folder: Path, limit: int) -> Iterable[int]:
    from lmms_stream.loader.loader import PackedLoader

    next(iter(PackedLoader(dataset_with_plan(folder, limit), global_batch=GLOBAL_BATCH)))  # compiles
    loader = PackedLoader(dataset_with_plan(folder, limit), global_batch=GLOBAL_BATCH)
    return Epochs(lambda: (batch.num_tokens for batch in loader))


def dataset_with_plan(folder: Path, limit: int) -> PackedStreamingDataset:
    packing = PackingConfig(packing_length=limit)
    return PackedStreamingDataset(
        folder, folder.with_name(f"cache-{folder.name}"), processor=TokensProcessor(), packing=packing
    )


def next_fit_packs(opened: Callable[[], Iterable[Mapping[str, Any]]], limit: int) -> Iterable[int]:
    """The samples in the order they come, in packs of at most `limit` tokens."""
    return Epochs(partial(next_fit, opened(), limit))


def next_fit(samples: Iterable[Mapping[str, Any]], limit: int) -> Iterator[int]:
    positions = np.arange(limit)
    waiting: list[Mapping[str, Any]] = []
    length = 0
    for sample in samples:
        tokens = len(sample["input_ids"])
        if length + tokens > limit:
            batch = lay_out(waiting, length, positions)
            yield int(batch["input_ids"].shape[1])
            waiting, length = [], 0
        waiting.append(sample)
        length += tokens
    batch = lay_out(waiting, length, positions)
    yield int(batch["input_ids"].shape[1])


def lay_out(samples: list[Mapping[str, Any]], length: int, positions: NDArray[np.int64]) -> dict[str, Any]:
    """The tensors that PackedLoader makes of a pack; each token is written once."""
    import torch

    input_ids, position_ids = np.empty((1, length), np.int64), np.empty((1, length), np.int64)
    labels = np.full((1, length), IGNORED_LABEL)
    bounds = [0]
    for sample in samples:
        ids, start = sample["input_ids"], bounds[-1]
        stop = start + len(ids)
        input_ids[0, start:stop] = ids
        position_ids[0, start:stop] = positions[: stop - start]
        for first, last in sample["loss_spans"].tolist():
            labels[0, start + first : start + last] = ids[first:last]
        labels[0, start] = IGNORED_LABEL
        bounds.append(stop)
    return {
        "input_ids": torch.from_numpy(input_ids),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(position_ids),
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
    }


def litdata_blocks(folder: Path, limit: int, shuffle: bool) -> Iterable[int]:
    """Blocks of `limit` tokens, whatever samples they cut, as three tensors: one segment, all of it trained on."""
    from litdata import TokensLoader

    return Epochs(
        partial(blocks_as_packs, litdata(folder, item_loader=TokensLoader(block_size=limit), shuffle=shuffle))
    )


def blocks_as_packs(blocks: Iterable[NDArray[Any]]) -> Iterator[int]:
    import torch

    for block in blocks:
        limit = len(block)
        input_ids = torch.from_numpy(block.astype(np.int64))[None]
        batch = input_ids, input_ids.clone(), torch.arange(limit)[None]
        yield int(batch[0].shape[1])


def copied_tensors(limit: int, num_tokens: int) -> Iterable[int]:
    """memcpy of the tensors of full packs with `num_tokens` tokens in all."""
    source = np.ones((max(1, MEMCPY_BUFFER // (24 * limit)), 3, limit), np.int64)

    def copies() -> Iterator[int]:
        for number in range(num_tokens // limit):
            pack = source[number % len(source)]
            tensors = [np.empty((1, limit), np.int64) for _ in range(3)]
            for tensor, values in zip(tensors, pack, strict=True):
                np.copyto(tensor[0], values)
            yield limit

    return Epochs(copies)


def copied_samples(folder: Path, limit: int) -> Iterable[int]:
    """memcpy of the stored bytes of each sample of each pack."""
    dataset = dataset_with_plan(folder, limit)
    shards = [np.fromfile(folder / info.name, np.uint8) for info in dataset.core.shard_infos]
    source = np.concatenate(shards)
    bounds, begin = [], 0
    for shard, info in zip(shards, dataset.core.shard_infos, strict=True):
        offsets = shard[4 : 8 + 4 * info.num_samples].view("<u4").astype(np.int64) + begin
        bounds.append(np.stack([offsets[:-1], offsets[1:]], axis=1))
        begin += len(shard)
    packs = dataset.plan.packs(0, 0, dataset.plan.num_packs(0))
    ranges = np.concatenate(bounds)[packs.sample_ids].tolist()
    edges = packs.offsets.tolist()
    tokens = np.add.reduceat(packs.lengths, packs.offsets[:-1]).tolist()

    def copies() -> Iterator[int]:
        for first, last, num_tokens in zip(edges[:-1], edges[1:], tokens, strict=True):
            samples = ranges[first:last]
            pack = np.empty(sum([stop - start for start, stop in samples]), np.uint8)
            at = 0
            for start, stop in samples:
                np.copyto(pack[at : (at := at + stop - start)], source[start:stop])
            yield num_tokens

    return Epochs(copies)


def show_samples(folder: Path, args: argparse.Namespace) -> None:
    mds, lit = folder / "texts", folder / "litdata-texts"
    write_texts(mds, args.samples, shard_bytes=SHARD_BYTES, seed=args.seed)
    opens = {"lmms_stream": partial(ours, mds), **streaming_peers(mds, STREAMING_SETTINGS)}
    if args.peers == "all":
        convert_for_litdata(lit, partial(text_samples, args.samples, seed=args.seed))
        opens |= {f"litdata, {name}": partial(litdata, lit, **each) for name, each in LITDATA_SETTINGS.items()}
    rates = best_rates(opens, "samples", args)
    title = f"{args.samples:,} texts of 1 KB, one process, samples"
    show_rates(f"{title} as they come", "samples", rates)
    mine, default, *_ = (each.wall for each in rates.values())
    best = {
        peer: max((name for name in rates if name.startswith(peer)), key=lambda name: rates[name].wall)
        for peer in args.peer_names
    }
    times_best = mine / rates[best["streaming"]].wall
    print(
        f"at least {MIN_TIMES_DEFAULT} times the defaults of streaming: "
        f"{verdict(mine >= MIN_TIMES_DEFAULT * default)} ({mine / default:.1f}); at least {MIN_TIMES_BEST} times its "
        f"best: {verdict(times_best >= MIN_TIMES_BEST)} ({times_best:.1f})",
        flush=True,
    )
    through = {name: partial(through_loader, opens[name]) for name in ("lmms_stream", *best.values())}
    rates = best_rates(through, "samples", args)
    show_rates(f"{title} through a torch DataLoader without workers", "samples", rates)


def show_packs(folder: Path, args: argparse.Namespace) -> None:
    mds, lit, blocks = folder / "tokens", folder / "litdata-tokens", folder / "litdata-blocks"
    lengths = sample_lengths("chat", args.samples, limit=2 * min(args.packing_lengths), seed=args.seed) // 2
    lengths = np.maximum(lengths, SHORTEST)
    write_tokens(mds, lengths, shard_bytes=SHARD_BYTES, seed=args.seed)
    peers = streaming_peers(mds, STREAMING_SETTINGS_FOR_PACKS)
    if args.peers == "all":
        samples = partial(token_samples, lengths, seed=args.seed)
        convert_for_litdata(lit, samples)
        convert_for_litdata(blocks, samples, tokens_only=True)
        fast = list(LITDATA_SETTINGS)[:2]
        peers |= {f"litdata, {name}": partial(litdata, lit, **LITDATA_SETTINGS[name]) for name in fast}
    for limit in args.packing_lengths:
        opens: dict[str, Open] = {"lmms_stream": partial(our_packs, mds, limit)}
        opens |= {f"{name}, next-fit": partial(next_fit_packs, opened, limit) for name, opened in peers.items()}
        if args.peers == "all":
            opens["litdata TokensLoader, shuffled"] = partial(litdata_blocks, blocks, limit, True)
        opens["memcpy of the tensors"] = partial(copied_tensors, limit, int(lengths.sum(dtype=np.int64)))
        opens["memcpy of the stored bytes"] = partial(copied_samples, mds, limit)
        rates = best_rates(opens, "tokens", args)
        mean = f"{args.samples:,} samples of {lengths.mean():.0f} tokens"
        show_rates(f"packs of {limit} tokens from {mean}, one process", "tokens", rates)
        share = rates["lmms_stream"].wall / rates["memcpy of the tensors"].wall
        print(
            f"at least {MIN_SHARE_OF_MEMCPY:.0%} of memcpy of the tensors: "
            f"{verdict(share >= MIN_SHARE_OF_MEMCPY)} ({share:.1%})",
            flush=True,
        )


def convert_for_litdata(folder: Path, samples: Callable[[], Iterator[Any]], *, tokens_only: bool = False) -> None:
    write = partial(write_litdata, folder, samples, chunk_bytes=SHARD_BYTES, tokens_only=tokens_only)
    in_fresh_process(write, timeout_s=1800)


def show_rates(title: str, unit: str, rates: Mapping[str, Rate]) -> None:
    mine = next(iter(rates.values()))
    print_table(
        title,
        ["", f"{unit}/s", "lmms_stream is x faster", f"{unit}/s of CPU", "x faster by CPU"],
        [
            [
                name,
                f"{each.wall:,.0f}",
                f"{mine.wall / each.wall:,.2f}",
                f"{each.cpu:,.0f}",
                f"{mine.cpu / each.cpu:,.2f}",
            ]
            for name, each in rates.items()
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200_000, help="texts, and tokenized samples")
    parser.add_argument("--packing-lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--what", choices=("all", "samples", "packs"), default="all")
    parser.add_argument("--peers", choices=("all", "streaming"), default="all", help="litdata is in the extra bench")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="the longest that one contestant reads in a round")
    parser.add_argument("--folder", type=Path, help="where the shards are written; default: the temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.peer_names = ["streaming", "litdata"] if args.peers == "all" else ["streaming"]
    keep_to_one_core()
    print(f"MosaicML Streaming {version('mosaicml-streaming')}", end="")
    print(f", litdata {version('litdata')}" if args.peers == "all" else "")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        os.environ["TMPDIR"] = folder  # streaming leaves lock files in the temporary folder
        if args.what != "packs":
            show_samples(Path(folder), args)
        if args.what != "samples":
            show_packs(Path(folder), args)


if __name__ == "__main__":
    main()
