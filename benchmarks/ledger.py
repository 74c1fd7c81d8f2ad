"""Claim: the ledger says a step within a second and a sample within two, at a billion samples, and needs no log.

Measured from a process that has done its imports and nothing else: read the history of a run as its checkpoint keeps
it, open its datasets and their plans, and ask. The run stands in the middle of its second epoch. Steps and samples are
spread over it; of each kind of question the slowest is told, and the largest peak memory of its process.

"Cold" is the first question ever asked of a dataset on a node: the lengths index is read through once, to see that it
is whole, and the packs of the epochs concerned are counted, one time for all (a run that was trained on the node has
done both). "Warm" is every question after that: the shuffle blocks concerned are packed again, nothing else.

"two sources" mixes the dataset with a tenth of it by weights, whose turns are taken again from the beginning.

The shards are a few real ones under many hard-linked names, with a lengths index of full size (4 bytes a sample).

    python benchmarks/ledger.py
    python benchmarks/ledger.py --samples 1000000 --rounds 1
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from data import link_tokens, write_tokens
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.tools.ledger.opening import RunHistory
from lmms_stream.tools.ledger.run import Ledger
from measure import MIB, in_fresh_process, keep_to_one_core, print_table, verdict

MAX_STEP_S, MAX_SAMPLE_S = 1.0, 2.0
PACKING_LENGTH, GLOBAL_BATCH = 4096, 64
SAMPLE_TOKENS = (16, 65)
SMALL_SHARE = 10  # the second source has a tenth of the samples
WEIGHTS = {"large": 0.8, "small": 0.2}
NUM_DROPPED = 1000  # samples of a drop list
IMPORTED = ("lmms_stream.ledger.run", "lmms_stream.plan.kernels.best_fit", "lmms_stream.plan.kernels.turns")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A run: the folders of its sources, by name, and the file that its history is kept in."""

    sources: dict[str, Path]
    history: Path


def make_run(setting: Setting) -> tuple[float, int]:
    """Seconds until the packs of all epochs of the run are counted, and the steps of 1.5 epochs, where it stands."""
    from lmms_stream.loader.loader import PackedLoader, stretch_of

    begin = time.perf_counter()
    packing = PackingConfig(packing_length=PACKING_LENGTH)
    datasets = {
        name: PackedDataset([StreamConfig(remote=folder)], processor=TokensProcessor(), packing=packing)
        for name, folder in setting.sources.items()
    }
    weights = WEIGHTS if len(datasets) > 1 else None
    loader = PackedLoader(datasets, global_batch=GLOBAL_BATCH, weights=weights)
    begun = stretch_of(loader)
    share = 1 if weights is None else weights["large"]
    stop = int(1.5 * datasets["large"].plan.num_packs(0) / share) // GLOBAL_BATCH
    loader.skip_steps(4 * stop // 3 + 1)  # to the end of the second epoch, to which the ledger looks ahead
    for name, epoch in loader.mixture.epochs_at(loader.cursor):
        datasets[name].plan.num_packs(epoch)
    seconds = time.perf_counter() - begin
    setting.history.write_text(json.dumps({"stretches": [begun], "stop": stop}))
    return seconds, stop


def opened(setting: Setting) -> Ledger:
    saved = json.loads(setting.history.read_text())
    return Ledger(RunHistory(where=str(setting.history), stretches=saved["stretches"], stop=saved["stop"]))


def timed_question(setting: Setting, ask: Callable[[Ledger, float], Any], share: float) -> float:
    """Seconds to open the ledger and to have an answer. share: where in the run, or among the samples, from 0 to 1."""
    warm_up()
    begin = time.perf_counter()
    ask(opened(setting), share)
    return time.perf_counter() - begin


def warm_up() -> None:
    """Load the compiled loops, which a process does once."""
    from lmms_stream.plan.ledger import StepLookup as PlanLedger
    from lmms_stream.plan.ledger import Stretch
    from lmms_stream.plan.mixture import Mixture
    from lmms_stream.plan.order import OrderConfig
    from lmms_stream.plan.pack_plan import PackPlan

    packing = PackingConfig(packing_length=PACKING_LENGTH)
    plan = PackPlan(np.arange(1, 2000, dtype=np.uint32), [1999], order=OrderConfig(), packing=packing)
    mixture = Mixture({"a": plan, "b": plan}, weights={"a": 1, "b": 1})
    PlanLedger([Stretch(mixture=mixture, cursor=mixture.start(), global_batch=2)]).step(3)


def ask_step(ledger: Ledger, share: float) -> None:
    entry = ledger.step(int(share * (ledger.stop - 1)))
    if len(entry.packs) not in range(1, GLOBAL_BATCH + 1):
        raise SystemExit(f"step {entry.number} has {len(entry.packs)} packs")


def ask_sample(ledger: Ledger, share: float) -> None:
    sample_id = int(share * (ledger.plans.plan("large").num_samples - 1))
    entries = ledger.sample("large", sample_id)
    first = entries[0].step
    if first is None or not any(sample_id in pack.sample_ids for pack in ledger.step(first).packs):
        raise SystemExit(f"sample {sample_id} is not in step {first}")


def ask_amounts(ledger: Ledger, share: float) -> None:
    if not ledger.amounts(int(share * ledger.stop))["large"].num_samples:
        raise SystemExit("nothing was read")


def ask_first_step(ledger: Ledger, share: float) -> None:
    draws = np.random.default_rng(int(share * 100))
    ids = draws.integers(0, ledger.plans.plan("large").num_samples, NUM_DROPPED)
    if ledger.first_step(("large", int(sample_id)) for sample_id in ids) is None:
        raise SystemExit("none of the samples was read")


QUESTIONS: dict[str, Callable[[Ledger, float], None]] = {
    "a step": ask_step,
    "a sample": ask_sample,
    "what was read until a step": ask_amounts,
    f"the first step of {NUM_DROPPED} samples": ask_first_step,
}
LIMITS_S = {"a step": MAX_STEP_S, "a sample": MAX_SAMPLE_S}


def measure(setting: Setting, *, rounds: int) -> list[list[str]]:
    """A row for each question: the slowest answer of so many, what is asked of it, and peak memory."""
    rows = []
    for name, ask in QUESTIONS.items():
        shares = np.linspace(0.05, 0.95, rounds)
        found = [in_fresh_process(timed_question, setting, ask, share, imported=IMPORTED) for share in shares]
        slowest = max(seconds for seconds, _ in found)
        resident, private = (max(getattr(peak, kind) for _, peak in found) for kind in ("resident", "anonymous"))
        limit = LIMITS_S.get(name)
        asked = "" if limit is None else f"{limit:g} s: {verdict(slowest <= limit)}"
        rows.append([name, f"{slowest:.2f} s", asked, f"{resident / MIB:,.0f} MiB", f"{private / MIB:,.0f} MiB"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[10**6, 10**8, 10**9])
    parser.add_argument("--shard-samples", type=int, default=250_000, help="samples of a shard, about 50 MB")
    parser.add_argument("--rounds", type=int, default=4, help="answers to each question, each in a fresh process")
    args = parser.parse_args()
    keep_to_one_core()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = np.random.default_rng(0).integers(*SAMPLE_TOKENS, 2 * args.shard_samples).astype(np.uint32)
        write_tokens(folder / "base", lengths, shard_bytes=200 * args.shard_samples)
        for samples in args.samples:
            sources = {"large": folder / f"large-{samples}", "small": folder / f"small-{samples}"}
            for number, source in zip((samples, samples // SMALL_SHARE), sources.values(), strict=True):
                in_fresh_process(partial(link_tokens, samples=number), folder / "base", source)
            show(sources, folder, samples=samples, rounds=args.rounds)
            for source in sources.values():
                for path in sorted(source.rglob("*"), reverse=True):
                    path.unlink() if path.is_file() else path.rmdir()


def show(sources: dict[str, Path], folder: Path, *, samples: int, rounds: int) -> None:
    rows = []
    for kind in ("one source", "two sources"):
        chosen = {"large": sources["large"]} if kind == "one source" else sources
        setting = Setting(sources=chosen, history=folder / f"history-{samples}-{len(chosen)}.json")
        (seconds, stop), _ = in_fresh_process(make_run, setting, timeout_s=3600)
        rows.append([f"{kind}: cold", f"{seconds:.1f} s", "", f"{stop:,} steps", ""])
        rows += [[f"{kind}: {name}", *cells] for name, *cells in measure(setting, rounds=rounds)]
    columns = ["question", "slowest", "asked for", "peak memory", "of it private"]
    num_shards = len([*sources["large"].glob("*.mds")])
    print_table(f"{samples:,} samples in {num_shards:,} shards", columns, rows)


if __name__ == "__main__":
    main()
