"""Claim: the alert of a loss spike finds steps of garbage in real loss curves, and says nothing of curves without any.

A tiny model is trained on the corpus of convergence.py, with steps of 2 packs: on its samples in our order; as they are
stored, topic after topic; and in a full shuffle with random tokens instead of some samples, in five places. Records of
1, 2 and 5 steps are given to what the trainer decides by, at several numbers of deviations. Told is how many records
are alarms in our order; how many in the stored order, where each new topic is a rise of the loss indeed; and how many
of the places have an alarm.

    python benchmarks/spikes.py
    python benchmarks/spikes.py --samples 3200
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import convergence
import numpy as np
from measure import in_fresh_process, print_table, verdict

PLACES = 5
DEVIATIONS = (4.0, 5.0, 6.0, 8.0, 10.0)
WINDOW = 100
CHOSEN = 6.0  # alerts.spike of TrainConfig
GARBAGE = "with garbage"
GLOBAL_BATCH = 2
RUNS_AT_ONCE = 2  # each on one core
STEPS_A_RECORD = (1, 2, 5)
Curve = list[tuple[float, set[int]]]  # of each record its loss, and the places of garbage that it has samples of


def write_garbage(corpus: convergence.Corpus) -> list[range]:
    """The full shuffle with random tokens instead of some samples, of which the numbers are returned."""
    topics = np.random.default_rng(3).permutation(np.arange(corpus.num_samples) % convergence.TOPICS).tolist()
    samples = convergence.samples_of_topics(topics, seed=0)
    rng = np.random.default_rng(4)
    starts = np.linspace(0.3, 0.9, PLACES) * corpus.num_samples
    places = [range(int(start), int(start) + corpus.block) for start in starts]
    for number in itertools.chain(*places):
        samples[number] = rng.integers(0, convergence.TOPICS + convergence.STATES, len(samples[number]), np.int32)
    convergence.write(corpus.folder / GARBAGE, samples, samples_a_shard=corpus.block)
    return places


def train(data: dict[str, Any], output: Path, tokens: int) -> list[tuple[float, list[int]]]:
    """Of each step of a run its loss and its samples."""
    import torch
    from lmms_stream import FSDP2SFTTrainer
    from lmms_stream.mds.dataset_config import DatasetConfig
    from lmms_stream.train.model.build import ModelConfig
    from lmms_stream.train.report.train_log import read_log
    from lmms_stream.train.run.settings import TrainConfig

    torch.set_num_threads(1)
    config = TrainConfig(
        output_dir=str(output), global_batch=GLOBAL_BATCH, per_device_batch=GLOBAL_BATCH, max_tokens=tokens,
        learning_rate=convergence.LEARNING_RATE, warmup=0.05, save_steps="no", num_workers=0,
        log_sample_ids=True,
    )  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()):
        FSDP2SFTTrainer(ModelConfig(config=convergence.MODEL), config, DatasetConfig(**data).open()).train()
    return [(record["loss"], record["sample_ids"]) for record in read_log(output)]


def every(steps: Sequence[tuple[float, set[int]]], count: int) -> Curve:
    """Records of `count` steps each."""
    parts = (steps[at : at + count] for at in range(0, len(steps) - count + 1, count))
    return [(float(np.mean([loss for loss, _ in part])), set().union(*(bad for _, bad in part))) for part in parts]


def alarms(curve: Curve, deviations: float) -> list[bool]:
    from lmms_stream.train.report.alerts import Spikes

    spikes = Spikes(deviations=deviations, window=WINDOW)
    return [spikes.take(loss) for loss, _ in curve]


def places_found(curve: Curve, deviations: float) -> int:
    told = zip(curve, alarms(curve, deviations), strict=True)
    return len(set().union(*(places for (_, places), is_alarm in told if is_alarm)))


def curves(corpus: convergence.Corpus) -> dict[str, list[Curve]]:
    """By the kind of the corpus, those with records of 1, 2 and 5 steps."""
    places = write_garbage(corpus)
    place_of = {sample: number for number, place in enumerate(places) for sample in place}
    tokens = round(corpus.num_tokens * convergence.SHARE_OF_EPOCH)

    def trained(kind: str) -> list[Curve]:
        data = corpus.order(convergence.FULL if kind == GARBAGE else kind, 0)
        if kind == GARBAGE:
            data |= {"remote": str(corpus.folder / GARBAGE)}
        output = corpus.folder / kind.replace(" ", "-")
        steps, _ = in_fresh_process(train, data, output, tokens, imported=convergence.IMPORTED)
        print(f"{kind}: {len(steps)} steps, loss {steps[-1][0]:.3f}", flush=True)
        marked = [(loss, {place_of[sample] for sample in samples if sample in place_of}) for loss, samples in steps]
        steps_of = marked if kind == GARBAGE else [(loss, set()) for loss, _ in steps]
        return [every(steps_of, count) for count in STEPS_A_RECORD]

    kinds = (GARBAGE, convergence.OURS, convergence.STORED)
    with ThreadPoolExecutor(RUNS_AT_ONCE) as pool:
        return dict(zip(kinds, pool.map(trained, kinds), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4800, help="of the corpus")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        corpus = convergence.Corpus(
            folder=Path(name), num_samples=args.samples, seeds=1, canonical_nodes=convergence.CANONICAL_NODES
        )
        corpus.write()
        found = curves(corpus)
    rows, is_met = [], False
    num_places = PLACES * len(STEPS_A_RECORD)
    for deviations in DEVIATIONS:
        false, jumps = (
            sum(sum(alarms(curve, deviations)) for curve in found[kind])
            for kind in (convergence.OURS, convergence.STORED)
        )
        num_found = sum(places_found(curve, deviations) for curve in found[GARBAGE])
        rows.append([f"{deviations:g}", str(false), str(jumps), f"{num_found} of {num_places}"])
        if deviations == CHOSEN:
            is_met = not false and num_found == num_places
    print_table(
        f"alarms in {sum(map(len, found[convergence.OURS])):,} records of our order, as many of the stored order, and "
        "places of garbage that are found",
        ["deviations", convergence.OURS, convergence.STORED, GARBAGE],
        rows,
    )
    print(f"at {CHOSEN:g} deviations no alarm in our order, and all places of garbage found: {verdict(is_met)}")


if __name__ == "__main__":
    main()
