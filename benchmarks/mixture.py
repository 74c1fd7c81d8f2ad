"""Claim: which packs of which source make a step is said in less than 3 ms, for 50 sources and 2048 packs a step.

Beside it: sources drawn at random by the same weights (numpy's Generator.choice), as most loaders mix. For both:
how far a source is from its share at most, after all steps, in packs.

    python benchmarks/mixture.py
    python benchmarks/mixture.py --sources 8 --global-batch 256
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from data import sample_lengths
from lmms_stream.plan.mixture import Mixture
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.pack_plan import PackPlan
from lmms_stream.plan.packing import PackingConfig
from measure import keep_to_one_core, print_table, verdict

MAX_MS = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, default=50)
    parser.add_argument("--global-batch", type=int, default=2048, help="packs of a step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--samples", type=int, default=40_000, help="chat-like lengths of each source")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    keep_to_one_core()

    packing = PackingConfig(packing_length=4096)
    plans = {
        f"source {number}": PackPlan(
            sample_lengths("chat", args.samples, limit=4096, seed=args.seed + number),
            [args.samples],
            order=OrderConfig(seed=args.seed),
            packing=packing,
        )
        for number in range(args.sources)
    }
    rng = np.random.default_rng(args.seed)
    weights = rng.dirichlet(np.ones(args.sources))
    mixture = Mixture(plans, weights=dict(zip(plans, weights.tolist(), strict=True)))
    cursor = mixture.start()
    mixture.step(cursor, global_batch=args.global_batch)  # compiles, and counts the packs of the first epochs

    counts = np.zeros(args.sources, np.int64)
    ours, random = [], []
    for _ in range(args.steps):
        started = time.perf_counter()
        step = mixture.step(cursor, global_batch=args.global_batch)
        ours.append(time.perf_counter() - started)
        cursor = step.after
        for taken in step.ranges:
            counts[mixture.names.index(taken.source)] += taken.stop - taken.first
    drawn = np.zeros(args.sources, np.int64)
    for _ in range(args.steps):
        started = time.perf_counter()
        chosen = rng.choice(args.sources, size=args.global_batch, p=weights)
        random.append(time.perf_counter() - started)
        drawn += np.bincount(chosen, minlength=args.sources)
    due = args.steps * args.global_batch * weights
    medians = [1000 * float(np.median(seconds)) for seconds in (ours, random)]
    print_table(
        f"{args.steps} steps of {args.global_batch} packs of {args.sources} sources",
        ["sources taken", "ms a step, median", "ratio", "furthest from a share, packs"],
        [
            ["in turns", f"{medians[0]:.2f}", f"{medians[0] / medians[1]:.2f}", f"{np.abs(counts - due).max():.2f}"],
            ["at random", f"{medians[1]:.2f}", "1", f"{np.abs(drawn - due).max():.1f}"],
        ],
    )
    print(f"less than {MAX_MS:g} ms a step: {verdict(medians[0] < MAX_MS)} ({medians[0]:.2f} ms)")


if __name__ == "__main__":
    main()
