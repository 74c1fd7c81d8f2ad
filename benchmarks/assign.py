"""Claim: dealt by cost, the ranks of a global batch have alike work: the busiest does at most 3 % more than the mean.

The work of a rank is the sum over its packs' samples of length ** 2 (attention); the imbalance of a global batch is
max over mean of its ranks. Beside it: the same global batches dealt in plan order, so many consecutive packs a rank.

With media, of packs of which one has ten images and another none, the ranks have alike work of both kinds: of their
tokens, and of the tower's patches, each at most 5 % above the mean. Beside it: the same, dealt by tokens alone.

With `balance: window` the ranks of 8, 64 and 512 have alike work with one pack each, too: over an epoch the sum of the
busiest rank's work of each step is at most 2 % above the mean's; of two datasets with `across_sources`. Planning takes
at most 1.3 times as long.

    python benchmarks/assign.py
    python benchmarks/assign.py --global-batch 128 --world-size 16 --batches 500
Packs of even_fit have more similar sums of len**2 than those of best_fit, in the same number of packs.

    python benchmarks/assign.py --windows
    python benchmarks/assign.py --even --packing-length 32768
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from data import sample_lengths
from lmms_stream.plan.assign import LINEAR_COST, assign, pack_costs
from lmms_stream.plan.lengths import Lengths, hash_lengths
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.plan.planner import StepConfig, StepPlanner
from lmms_stream.plan.windows import ACROSS_SOURCES, WindowedMixture
from lmms_stream.types import World
from measure import keep_to_one_core, print_table, verdict
from numpy.typing import NDArray

MAX_IMBALANCE = 1.03
MAX_MEDIA_IMBALANCE = 1.05  # of tokens' cost, and of the tower's
MAX_WINDOW_IMBALANCE, MAX_WINDOW_99, MAX_PLANNING = 1.02, 1.12, 1.3
RANKS = (8, 64, 512)
SAMPLES_PER_SHARD = 16384
SAMPLES_PER_RANK = 20_000  # of an epoch of several windows
PLANNINGS = 9
Balance = str | int
BALANCES: tuple[Balance, ...] = ("deal", 256)


def imbalance(costs: NDArray[np.int64], dealt: NDArray[np.int64]) -> float:
    """max / mean over ranks of the work dealt to them; dealt: int64[world_size, packs a rank], numbers into costs."""
    work = costs[dealt].sum(axis=1)
    return float(work.max() / work.mean())


def media_plan(args: argparse.Namespace) -> PackPlan:
    """A third each of texts, samples with one image and samples with ten; an image takes 16 to 400 tokens."""
    rng = np.random.default_rng(args.seed)
    count = args.samples // 10
    texts = sample_lengths("chat", count, limit=args.packing_length // 2, seed=args.seed).astype(np.int64)
    sides = rng.integers(4, 21, (2, count, 10))
    images = np.where(np.arange(10) < rng.choice([0, 1, 10], count)[:, None], sides[0] * sides[1], 0).sum(axis=1)
    lengths = np.where(images > 0, np.minimum(texts, 300), texts) + images
    index = Lengths(
        lengths=lengths, content_hash=hash_lengths(lengths), patches=4 * images, patches_hash=hash_lengths(4 * images)
    )
    packing = PackingConfig(packing_length=args.packing_length, overlong="drop")
    return PackPlan(index, [count], order=OrderConfig(seed=args.seed), packing=packing)


def report_media(args: argparse.Namespace) -> None:
    plan = media_plan(args)
    num_batches = min(args.batches, plan.num_packs(0) // args.global_batch)
    shape = {
        "global_batch": args.global_batch,
        "nodes": (args.world_size,),
        "num_canonical_nodes": plan.num_canonical_nodes,
    }
    measured: dict[str, list[tuple[float, float]]] = {"plan order": [], "tokens": [], "both": []}
    seconds = {"tokens": 0.0, "both": 0.0}
    for batch in range(num_batches):
        packs = plan.packs(0, batch * args.global_batch, (batch + 1) * args.global_batch)
        patches = packs.patches
        assert patches is not None
        dealt = {"plan order": np.arange(args.global_batch).reshape(args.world_size, -1)}
        for name, asked in {"tokens": replace(packs, patches=None), "both": packs}.items():
            started = time.process_time()
            dealt[name] = assign(asked, **shape)
            seconds[name] += time.process_time() - started if batch else 0.0  # the first one loads the code
        for name, numbers in dealt.items():
            measured[name].append((imbalance(pack_costs(packs), numbers), imbalance(patches, numbers)))
    names = {"plan order": "in plan order", "tokens": "by tokens alone", "both": "by tokens and patches"}
    print_table(
        f"{num_batches} global batches of {args.global_batch} packs with media, {args.world_size} ranks: max / mean",
        ["dealt", "tokens, mean", "worst", "patches, mean", "worst", "CPU us a batch"],
        [
            [
                names[name],
                *(f"{each:.4f}" for column in np.array(values).T for each in (column.mean(), column.max())),
                f"{seconds[name] / max(1, num_batches - 1) * 1e6:.0f}" if name in seconds else "-",
            ]
            for name, values in measured.items()
        ],
    )
    worst = np.array(measured["both"]).max()
    keeps = verdict(bool(worst <= MAX_MEDIA_IMBALANCE))
    print(f"at most {MAX_MEDIA_IMBALANCE} of each in every batch: {keeps} ({worst:.4f})")


def mixtures(
    args: argparse.Namespace, num_nodes: int, *, strategy: str = "best_fit"
) -> dict[str, Mapping[str, PackPlan]]:
    """Datasets by name, with a canonical node for each node at least."""

    def plan(lengths: NDArray[np.uint32], limit: int) -> PackPlan:
        order = OrderConfig(seed=args.seed, num_canonical_nodes=max(8, num_nodes))
        return PackPlan(
            lengths, [len(lengths)], order=order, packing=PackingConfig(packing_length=limit, strategy=strategy)
        )

    count, limit = args.samples, args.packing_length
    rng = np.random.default_rng(args.seed)
    pareto = np.clip(60 * (1 + rng.pareto(1.1, count)), 8, limit).astype(np.uint32)
    chat, vision = (sample_lengths(kind, count, limit=limit, seed=args.seed) for kind in ("chat", "vision"))
    short = sample_lengths("chat", count // 4, limit=512, seed=args.seed + 1)
    return {
        "chat": {"x": plan(chat, limit)}, "vision": {"x": plan(vision, limit)}, "pareto": {"x": plan(pareto, limit)},
        "chat and short": {"x": plan(chat, limit), "y": plan(short, limit)},
    }  # fmt: skip


def epoch_work(mixture: WindowedMixture, *, ranks: int, packs_per_rank: int) -> NDArray[np.float64]:
    """Work of the full steps of an epoch: busiest rank and mean, by the library's cost and by len**2; float64[n, 4]."""
    nodes, found = (8,) * (ranks // 8), []
    cursor, batch = mixture.start(), ranks * packs_per_rank
    while True:
        step = mixture.step(cursor, global_batch=batch)
        if step.num_packs == batch:
            packs = mixture.packs(step.ranges)
            dealt = assign(packs, global_batch=batch, nodes=nodes, num_canonical_nodes=mixture.num_canonical_nodes)
            row = []
            for cost in (pack_costs(packs), pack_costs(packs, linear_cost=0)):
                work = cost[dealt].sum(axis=1)
                row += [work.max(), work.mean()]
            found.append(row)
        if step.ends_epoch:
            return np.array(found, np.float64)
        cursor = step.after


def planning_s(plans: Mapping[str, PackPlan], balances: Sequence[Balance], *, ranks: int) -> dict[Balance, list[float]]:
    """CPU seconds of a reader's plan of an epoch with each balance, several times in turn."""
    config = StepConfig(global_batch=ranks, world=World(world_size=ranks, num_nodes=ranks // 8))
    found: dict[Balance, list[float]] = {balance: [] for balance in balances}
    for _ in range(PLANNINGS):
        for balance, seconds in found.items():
            mixture = WindowedMixture(plans, balance=balance)
            started = time.process_time()
            for _ in StepPlanner(mixture, config).plan(mixture.start()):
                pass
            seconds.append(time.process_time() - started)
    return found


def report_windows(args: argparse.Namespace) -> None:
    rows, worst, worst_99, slowest = [], 0.0, 0.0, 0.0
    for ranks in RANKS:
        several_windows = argparse.Namespace(**{**vars(args), "samples": max(args.samples, SAMPLES_PER_RANK * ranks)})
        of_planning = mixtures(several_windows, ranks // 8)
        for name, plans in mixtures(args, ranks // 8).items():
            for packs_per_rank in (1, 4):
                of_balance: dict[Balance, tuple[float, ...]] = {}
                balances = (*BALANCES, *([ACROSS_SOURCES] if len(plans) > 1 else []))
                for balance in balances:
                    work = epoch_work(
                        WindowedMixture(plans, balance=balance), ranks=ranks, packs_per_rank=packs_per_rank
                    )
                    ratio = work[:, 0] / work[:, 1]
                    whole = work[:, 0].sum() / work[:, 1].sum()
                    attention = work[:, 2].sum() / work[:, 3].sum()
                    of_balance[balance] = whole, np.quantile(ratio, 0.99), ratio.max(), attention, work[:, 1].var()
                    if balance == ACROSS_SOURCES or (balance == 256 and len(plans) == 1):
                        worst, worst_99 = max(worst, whole), max(worst_99, of_balance[balance][1])
                seconds = {}
                if packs_per_rank == 1:
                    seconds = planning_s(of_planning[name], balances, ranks=ranks)
                    for balance in balances[1:]:
                        slowest = max(slowest, statistics.median(np.divide(seconds[balance], seconds["deal"])))
                for balance, figures in of_balance.items():
                    spread = figures[4] / of_balance["deal"][4]
                    time_s = f"{min(seconds[balance]):.2f}" if seconds else "-"
                    shown = [f"{each:.3f}" for each in figures[:4]]
                    rows.append([str(ranks), str(packs_per_rank), name, str(balance), *shown, f"{spread:.1f}", time_s])
    print_table(
        f"an epoch of {args.samples} samples in packs of {args.packing_length}: busiest rank / mean",
        ["ranks", "packs", "data", "balance", "work", "99 % of steps", "worst", "len**2", "spread of steps", "plan, s"],
        rows,
    )
    for what, value, most in (
        ("of all work of one source, or across sources", worst, MAX_WINDOW_IMBALANCE),
        ("in 99 % of steps of these", worst_99, MAX_WINDOW_99),
        ("planning, times deal's", slowest, MAX_PLANNING),
    ):
        print(f"at most {most} {what}: {verdict(bool(value <= most))} ({value:.4f})")


def report_even(args: argparse.Namespace) -> None:
    """Report work of packs, and of steps with a pack per rank, for both strategies and for windows."""
    rows = []
    keeps = True
    for name in ("chat", "vision", "pareto"):
        num_packs, spread = {}, {}
        for strategy, balance in (("best_fit", "deal"), ("even_fit", "deal"), ("best_fit", 256)):
            of_packs, of_steps = "", []
            for ranks in RANKS:
                plans = mixtures(args, ranks // 8, strategy=strategy)[name]
                if not of_packs:
                    plan = plans["x"]
                    num_packs[strategy] = plan.num_packs(0)
                    started = time.process_time()
                    packs = plan.packs(0, 0, num_packs[strategy])
                    speed = args.samples / (time.process_time() - started) / 1e6
                    cost = pack_costs(packs, linear_cost=0)
                    spread[strategy] = cost.std() / cost.mean()
                    of_packs = f"{cost.max() / cost.mean():.3f}"
                work = epoch_work(WindowedMixture(plans, balance=balance), ranks=ranks, packs_per_rank=1)
                sums = work.sum(axis=0)
                of_steps += [f"{sums[2] / sums[3]:.3f}", f"{sums[0] / sums[1]:.3f}"]
            shown = f"{spread[strategy]:.3f}", f"{speed:.1f}"
            rows.append([name, strategy, str(balance), str(num_packs[strategy]), of_packs, *shown, *of_steps])
        keeps &= num_packs["best_fit"] == num_packs["even_fit"] and spread["even_fit"] < spread["best_fit"]
    steps = [f"{ranks}: {what}" for ranks in RANKS for what in ("len**2", "work")]
    print_table(
        f"an epoch of {args.samples} samples in packs of {args.packing_length}: packs, and a pack per rank in a step, "
        "max / mean",
        ["data", "strategy", "balance", "packs", "len**2", "deviation / mean", "M samples/s", *steps],
        rows,
    )
    print(f"an equal number of packs, with less spread of work: {verdict(keeps)}")


def report_tokens(args: argparse.Namespace) -> None:
    lengths = sample_lengths("chat", args.samples, limit=args.packing_length, seed=args.seed)
    shards = np.full(-(-args.samples // SAMPLES_PER_SHARD), SAMPLES_PER_SHARD, np.int64)
    shards[-1] -= shards.sum() - args.samples
    packing = PackingConfig(packing_length=args.packing_length)
    plan = PackPlan(lengths, shards, order=OrderConfig(seed=args.seed), packing=packing)
    num_batches = min(args.batches, plan.num_packs(0) // args.global_batch)
    in_order = np.arange(args.global_batch).reshape(args.world_size, -1)

    # imbalances[:, 0]: work without the linear part, as claimed; [:, 1]: with it, as the library deals by default
    imbalances: dict[str, list[tuple[float, float]]] = {"plan order": [], "attention": [], "default": []}
    for batch in range(num_batches):
        packs = plan.packs(0, batch * args.global_batch, (batch + 1) * args.global_batch)
        attention, whole = pack_costs(packs, linear_cost=0), pack_costs(packs)
        shape = {
            "global_batch": args.global_batch,
            "nodes": (args.world_size,),
            "num_canonical_nodes": plan.num_canonical_nodes,
        }
        for name, dealt in {
            "plan order": in_order,
            "attention": assign(packs, linear_cost=0, **shape),
            "default": assign(packs, **shape),
        }.items():
            imbalances[name].append((imbalance(attention, dealt), imbalance(whole, dealt)))
    measured = {name: np.array(values) for name, values in imbalances.items()}
    names = {
        "plan order": "in plan order",
        "attention": "by cost (linear_cost=0)",
        "default": f"by cost (linear_cost={LINEAR_COST}, the default)",
    }
    excess = {name: values[:, 0].mean() - 1 for name, values in measured.items()}
    print_table(
        f"{num_batches} global batches of {args.global_batch} packs of {args.packing_length} tokens over "
        f"{args.world_size} ranks: max / mean of the ranks' work",
        ["dealt", "len**2, mean", "worst", "excess, ratio", f"len**2 + {LINEAR_COST} len, mean", "worst"],
        [
            [
                names[name],
                f"{values[:, 0].mean():.4f}",
                f"{values[:, 0].max():.4f}",
                f"{excess[name] / excess['plan order']:.3f}",
                f"{values[:, 1].mean():.4f}",
                f"{values[:, 1].max():.4f}",
            ]
            for name, values in measured.items()
        ],
    )
    mean = 1 + excess["attention"]
    print(f"at most {MAX_IMBALANCE} by len**2: {verdict(bool(mean <= MAX_IMBALANCE))} ({mean:.4f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--global-batch", type=int, default=64, help="packs of a step")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--batches", type=int, default=300, help="global batches")
    parser.add_argument("--samples", type=int, default=10**6, help="chat-like lengths of the epoch that they come from")
    parser.add_argument("--packing-length", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--windows", action="store_true", help="balance: window beside deal")
    parser.add_argument("--even", action="store_true", help="even_fit beside best_fit and windows")
    args = parser.parse_args()
    keep_to_one_core()
    if args.windows:
        report_windows(args)
        return
    if args.even:
        report_even(args)
        return

    report_tokens(args)
    report_media(args)


if __name__ == "__main__":
    main()
