"""Claim: at 512 ranks what a rank does before a step's data takes next to nothing: a step's packs are dealt in 1 ms a
rank; of a thousand sources the cursor takes 64 KiB in a checkpoint, and a step's turns take 5 ms.

512 ranks (64 nodes of 8) are planned one after another in this process: each deals every step's packs to all ranks, as
each of them does in a run, and keeps its own. What they keep together is each pack once, which is checked. The time of
a rank is that of all it does between a cursor and the segments of its samples; `dealt` is the part of assign_steps.
Beside it: the same, of 8 ranks with as many packs each.

Times are CPU time of this thread, medians of steps. Of all that a rank does they are means, because steps are planned
together: one at first, so that the first batch comes soon, and later as many as have 2**18 segments, in which the
calls for each canonical node and each source are made once. "First steps" are the first ten, "later" come after them.
The blocks that packs come from are at hand there; what it takes to replay them is told by itself.

    python benchmarks/ranks.py
    python benchmarks/ranks.py --nodes 8 --sources 100
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from collections.abc import Callable
from functools import partial
from itertools import islice, takewhile

import numpy as np
from data import Lengths, sample_lengths
from lmms_stream.plan.assign import assign_steps
from lmms_stream.plan.cursor import Cursor
from lmms_stream.plan.mixture import Mixture
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.plan.planner import StepConfig, StepPlanner
from lmms_stream.types import World
from measure import keep_to_one_core, print_table, verdict

MAX_DEALT_MS, MAX_TURNS_MS, MAX_CURSOR_BYTES = 1.0, 5.0, 64 << 10
FIRST_STEPS, LATER_STEPS = 31, 60  # of a rank: with 2048 packs a step, 15 steps are planned together from step 31 on
GPUS = 8
SAMPLES_PER_SHARD = 16384


def cpu_ms(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return 1000 * (time.thread_time() - start)


def _sent(cursor: Cursor) -> Cursor:
    """As a worker tells its loader."""
    return pickle.loads(pickle.dumps(cursor))  # type: ignore[no-any-return]


def plan_of(lengths: Lengths, *, nodes: int, seed: int) -> PackPlan:
    samples = np.full(-(-len(lengths) // SAMPLES_PER_SHARD), SAMPLES_PER_SHARD, np.int64)
    samples[-1] -= samples.sum() - len(lengths)
    order = OrderConfig(seed=seed, num_canonical_nodes=nodes)
    return PackPlan(lengths, samples, order=order, packing=PackingConfig(packing_length=4096))


def later_ms(mixture: Mixture, config: StepConfig, *, steps: int = LATER_STEPS) -> tuple[float, float]:
    """CPU milliseconds a step of all that a rank does, of steps that are planned together; and of all steps in all."""
    works = StepPlanner(mixture, config).plan(mixture.start())
    first_ms = cpu_ms(lambda: list(takewhile(lambda each: each.work.step < FIRST_STEPS, works)))
    rest_ms = cpu_ms(lambda: list(takewhile(lambda each: each.work.step < FIRST_STEPS + steps, works)))
    return rest_ms / steps, first_ms + rest_ms


def show_ranks(args: argparse.Namespace) -> float:
    """The table of ranks; CPU milliseconds of dealing a step."""
    lengths = sample_lengths("chat", args.samples, limit=4096, seed=args.seed)
    mixture = Mixture({"data": plan_of(lengths, nodes=args.nodes, seed=args.seed)})
    rows, dealt_ms = [], 0.0
    for nodes in (1, args.nodes):
        world_size = nodes * GPUS
        batch = world_size * args.packs_per_rank
        cursor, ranges = mixture.start(), []
        for _ in range(args.steps):
            step = mixture.step(cursor, global_batch=batch)
            ranges.append(step.ranges)
            cursor = step.after
        mixture.packs([taken for each in ranges for taken in each])  # packs of the blocks are counted and replayed
        packs = [mixture.packs(each) for each in ranges]
        shape = {"nodes": (world_size // nodes,) * nodes, "num_canonical_nodes": args.nodes}
        dealt = [cpu_ms(partial(assign_steps, each, global_batch=batch, **shape)) for each in packs]
        dealt_ms = float(np.median(dealt))
        planned = []
        for rank in range(world_size):
            config = StepConfig(global_batch=batch, world=World(rank=rank, world_size=world_size, num_nodes=nodes))
            planned.append(StepPlanner(mixture, config).plan(mixture.start()))
        seconds, seen = [], []
        for _ in range(args.steps):  # all ranks take one step: the blocks that packs come from are replayed once
            for each in planned:
                start = time.thread_time()
                works = list(islice(each, args.packs_per_rank))
                seconds.append(time.thread_time() - start)
                seen += [work.work.segments.sample_ids for work in works]
        found = np.sort(np.concatenate(seen))
        expected = np.sort(np.concatenate([each.sample_ids for each in packs]))
        if not np.array_equal(found, expected):
            raise SystemExit(f"{world_size} ranks do not read each pack of a step once")
        whole_ms = 1000 * float(np.mean(seconds))
        fresh = Mixture({name: plan.keeping(1 << 21) for name, plan in mixture.plans.items()})
        config = StepConfig(global_batch=batch, world=World(world_size=world_size, num_nodes=nodes))
        _, with_replay_ms = later_ms(fresh, config)
        later, without_ms = later_ms(fresh, config)
        cells = [f"{dealt_ms:.3f}", f"{whole_ms:.2f}", f"{later:.2f}", f"{with_replay_ms - without_ms:.0f}"]
        rows.append([f"{world_size:,}", f"{batch:,}", *cells, f"{len(expected):,}"])
    columns = [
        "ranks", "packs a step", "dealt, ms a step", "all a rank does, first steps", "later",
        "blocks replayed, ms once", "samples, each once",
    ]  # fmt: skip
    print_table(f"{args.steps} steps of {args.packs_per_rank} packs a rank, planned by each rank", columns, rows)
    return dealt_ms


def show_sources(args: argparse.Namespace) -> tuple[float, int]:
    """The table of sources; CPU milliseconds of a step's turns, and bytes of a cursor as a checkpoint has it."""
    lengths = sample_lengths("chat", args.source_samples + args.sources, limit=4096, seed=args.seed)
    plans = {
        f"source-{number:04}": plan_of(lengths[number : number + args.source_samples], nodes=1, seed=args.seed)
        for number in range(args.sources)
    }
    weights = np.random.default_rng(args.seed).dirichlet(np.ones(args.sources))
    batch = args.nodes * GPUS * args.packs_per_rank
    rows = []
    turns_ms = num_bytes = 0.0
    for name, mixture in {
        "without weights": Mixture(plans),
        "with weights": Mixture(plans, weights=dict(zip(plans, weights.tolist(), strict=True))),
    }.items():
        cursor = mixture.step(mixture.start(), global_batch=batch).after
        seconds, steps = [], []
        for _ in range(args.steps):
            start = time.thread_time()
            steps.append(mixture.step(cursor, global_batch=batch))
            seconds.append(time.thread_time() - start)
            cursor = steps[-1].after
        mixture.packs(steps[0].ranges)
        packs_ms = float(np.median([cpu_ms(partial(mixture.packs, each.ranges)) for each in steps[1:9]]))
        sent_ms = cpu_ms(partial(_sent, cursor))
        written = json.dumps(cursor.to_dict(), indent=1)
        if Cursor.from_dict(json.loads(written)) != cursor:
            raise SystemExit("the cursor does not come back from a checkpoint")
        turns_ms, num_bytes = 1000 * float(np.median(seconds)), len(written)
        config = StepConfig(global_batch=batch, world=World(world_size=args.nodes * GPUS, num_nodes=args.nodes))
        later_ms(mixture, config)  # replays the blocks
        later, _ = later_ms(mixture, config)
        cells = [f"{turns_ms:.2f}", f"{packs_ms:.1f}", f"{later:.1f}", f"{sent_ms:.2f}", f"{num_bytes:,}"]
        rows.append([name, *cells])
    columns = [
        "", "turns, ms a step", "packs of a step by itself, ms", "all a rank does later, ms a step",
        "cursor to the loader, ms", "in a checkpoint, bytes",
    ]  # fmt: skip
    print_table(f"{args.sources:,} sources, {batch:,} packs a step", columns, rows)
    return turns_ms, int(num_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64, help=f"of {GPUS} ranks")
    parser.add_argument("--packs-per-rank", type=int, default=4, help="of a step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--samples", type=int, default=10**7, help="chat-like lengths, of the ranks' dataset")
    parser.add_argument("--sources", type=int, default=1000)
    parser.add_argument("--source-samples", type=int, default=20_000, help="of each source")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    keep_to_one_core()
    ranks = args.nodes * GPUS
    dealt_ms = show_ranks(args)
    turns_ms, num_bytes = show_sources(args)
    print(f"dealt in {MAX_DEALT_MS:g} ms a rank and step, {ranks} ranks: {verdict(dealt_ms <= MAX_DEALT_MS)}")
    print(f"turns of {args.sources} sources in {MAX_TURNS_MS:g} ms a step: {verdict(turns_ms <= MAX_TURNS_MS)}")
    print(f"their cursor in {MAX_CURSOR_BYTES:,} bytes: {verdict(num_bytes <= MAX_CURSOR_BYTES)} ({num_bytes:,})")


if __name__ == "__main__":
    main()
