"""Claim: best_fit fills packs to 99.9 % at over 20 million samples a second on one core, and keeps neighbours together.

Beside it, in the same process and on the first lengths of the same array: next_fit, TRL's `bfd` (trl.pack_dataset) and
Grain's first fit (FirstFitPackIterDataset), and the fewest packs that any packing could need. TRL and Grain pack rows
of tokens, which they get as one byte a token, in memory; best_fit gets lengths and returns which samples go where.

Times are medians of warm calls on one core: compilation and imports are not in them. Peers run once, after a run on a
few rows.

    python benchmarks/packing.py
    python benchmarks/packing.py --samples 1000000 --peers none
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import get_args

import numpy as np
from data import Kind, Lengths, fewest_packs, sample_lengths
from lmms_stream.plan.packing import PackingConfig, Packs, pack
from measure import keep_to_one_core, print_table, timed, verdict

SIZES: dict[Kind, tuple[int, int]] = {"chat": (4096, 8192), "vision": (2048, 4096)}  # packing lengths, tokens
MIN_SAMPLES_PER_S = 20e6
GRAIN_BINS = 64
WARM_UP = 2000  # samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Another packer: prepare(lengths, limit) returns a call that packs rows of these lengths and counts the packs."""

    name: str
    samples: int
    prepare: Callable[[Lengths, int], Callable[[], int]]


def trl_bfd(lengths: Lengths, limit: int) -> Callable[[], int]:
    """TRL's pack_dataset with its own batch size, its result kept in memory instead of a cache file."""
    import datasets
    import pyarrow as pa
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)
    tokens = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], np.int8)))
    rows = datasets.Dataset(pa.table({"input_ids": tokens}))
    in_memory = {"keep_in_memory": True, "load_from_cache_file": False}
    return lambda: len(pack_dataset(rows, limit, strategy="bfd", map_kwargs=in_memory))


def grain_first_fit(lengths: Lengths, limit: int) -> Callable[[], int]:
    """Grain's packer over rows in memory, read without threads as its documentation advises for them."""
    import grain
    from grain.experimental import FirstFitPackIterDataset

    rows = [{"input_ids": np.zeros(length, np.int8)} for length in lengths]
    parent = grain.MapDataset.source(rows).to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    packed = FirstFitPackIterDataset(
        parent, length_struct={"input_ids": limit}, num_packing_bins=GRAIN_BINS, shuffle_bins=False
    )
    return lambda: sum(1 for _ in packed)


def peers(args: argparse.Namespace) -> list[Peer]:
    if args.peers == "none":
        return []
    try:
        names = f"TRL {version('trl')} bfd", f"Grain {version('grain')} first fit"
    except ImportError as error:
        raise SystemExit(
            f"{error}: install the peers as benchmarks/README.md says, or run with --peers none"
        ) from error
    return [
        Peer(name=names[0], samples=args.trl_samples, prepare=trl_bfd),
        Peer(name=names[1], samples=args.grain_samples, prepare=grain_first_fit),
    ]


def efficiency(lengths: Lengths, num_packs: int, limit: int) -> float:
    return float(lengths.sum(dtype=np.int64) / (num_packs * limit))


def check(lengths: Lengths, packs: Packs, config: PackingConfig) -> tuple[int, int]:
    """The fullest pack in tokens, and the farthest two samples of a pack in positions; each position is used once."""
    if not np.array_equal(np.bincount(packs.order, minlength=len(lengths)), np.ones(len(lengths), np.int64)):
        raise SystemExit("best_fit has lost or repeated a sample")
    starts = packs.offsets[:-1]
    fullest = int(np.add.reduceat(lengths[packs.order], starts).max())
    reach = int((np.maximum.reduceat(packs.order, starts) - np.minimum.reduceat(packs.order, starts)).max())
    if fullest > config.packing_length or reach >= 2 * config.window:
        raise SystemExit(f"a pack has {fullest} tokens, or samples {reach} positions apart")
    return fullest, reach


def compare(kind: Kind, limit: int, args: argparse.Namespace) -> None:
    """One table: every packer on lengths of one kind and packs of one size."""
    config = PackingConfig(packing_length=limit)
    next_fit = PackingConfig(packing_length=limit, strategy="next_fit")
    lengths = sample_lengths(kind, args.samples, limit=limit, seed=args.seed)
    for warm_up in (config, next_fit):
        pack(lengths[:WARM_UP], config=warm_up)

    def row(name: str, count: int, num_packs: int, seconds: float) -> list[str]:
        on_these = efficiency(lengths[:count], len(pack(lengths[:count], config=config)), limit)
        rate = count / seconds
        filled = efficiency(lengths[:count], num_packs, limit)
        figures = f"{filled:.3%}", f"{on_these:.3%}", f"{rate:,.0f}", f"{best / rate:,.1f}"
        return [name, f"{count:,}", f"{num_packs:,}", *figures]

    seconds, packs = timed(lambda: pack(lengths, config=config), repeats=args.repeats)
    best = len(lengths) / seconds
    filled = efficiency(lengths, len(packs), limit)
    fullest, reach = check(lengths, packs, config)
    rows = [row("best_fit", len(lengths), len(packs), seconds)]
    seconds, packs = timed(lambda: pack(lengths, config=next_fit), repeats=args.repeats)
    rows.append(row("next_fit", len(lengths), len(packs), seconds))
    for peer in args.peer_list:
        part = lengths[: peer.samples]
        peer.prepare(part[:WARM_UP], limit)()
        seconds, num_packs = timed(peer.prepare(part, limit))
        rows.append(row(peer.name, len(part), num_packs, seconds))
    bound = fewest_packs(lengths, limit=limit)
    bound_filled = efficiency(lengths, bound, limit)
    rows.append(["fewest packs", f"{len(lengths):,}", f"{bound:,}", f"{bound_filled:.3%}", "", "", ""])
    print_table(
        f"{kind} lengths, mean {lengths.mean():.0f} tokens, packs of {limit}",
        ["packer", "samples", "packs", "filled", "best_fit on these", "samples/s", "best_fit is x faster"],
        rows,
    )
    least = 0.998 if limit == 2048 else 0.999
    print(
        f"checked: each sample once, fullest pack {fullest} <= {limit} tokens, farthest samples of a pack {reach:,} < "
        f"{2 * config.window:,} positions"
    )
    print(
        f"at least {least:.1%} filled: {verdict(filled >= least)}; at least {MIN_SAMPLES_PER_S / 1e6:.0f} M samples/s: "
        f"{verdict(best >= MIN_SAMPLES_PER_S)} ({best / 1e6:.1f} M)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10**7, help="lengths that best_fit and next_fit pack")
    parser.add_argument("--trl-samples", type=int, default=10**6, help="of these, how many TRL packs")
    parser.add_argument("--grain-samples", type=int, default=5 * 10**4, help="of these, how many Grain packs")
    parser.add_argument("--kinds", nargs="+", choices=get_args(Kind), default=list(get_args(Kind)))
    parser.add_argument("--peers", choices=("all", "none"), default="all")
    parser.add_argument("--repeats", type=int, default=3, help="calls of best_fit and next_fit; the median is shown")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    keep_to_one_core()
    args.peer_list = peers(args)
    for kind in args.kinds:
        for limit in SIZES[kind]:
            compare(kind, limit, args)


if __name__ == "__main__":
    main()
