"""Claim: the alert of a loss spike finds steps of garbage in real loss curves, and says nothing of curves without any.

A tiny model is trained on the corpus of convergence.py: on its samples in our order, in a full shuffle and as they are
stored, topic after topic, each with steps of 2 and of 8 packs; and on the full shuffle with samples of random tokens in
five places of it. A record of every step, and of every fifth, is given to what the trainer decides by, at several
numbers of deviations. Told is how many of the records without garbage are alarms, and how many of the five places
have one.

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
from pathlib import Path
from typing import Any

import convergence
import numpy as np
from measure import in_fresh_process, print_table, verdict

PLACES = 5
DEVIATIONS = (4.0, 5.0, 6.0, 8.0, 10.0)
WINDOW = 100
CHOSEN = 6.0  # alert_spike of TrainConfig
GARBAGE = "with garbage"
Curve = list[tuple[float, bool]]  # of each record its loss, and whether it has garbage


def write_garbage(corpus: convergence.Corpus) -> list[range]:
    """The full shuffle with random tokens instead of some samples, of which the numbers are returned."""
    topics = np.random.default_rng(3).permutation(np.arange(corpus.num_samples) % convergence.TOPICS).tolist()
    samples = convergence.samples_of_topics(topics, seed=0)
    rng = np.random.default_rng(4)
    starts = np.linspace(0.2, 0.9, PLACES) * corpus.num_samples
    places = [range(int(start), int(start) + corpus.block) for start in starts]
    for number in itertools.chain(*places):
        samples[number] = rng.integers(0, convergence.TOPICS + convergence.STATES, len(samples[number]), np.int32)
    convergence.write(corpus.folder / GARBAGE, samples, samples_a_shard=corpus.block)
    return places


def train(data: dict[str, Any], output: Path, global_batch: int, tokens: int) -> list[tuple[float, list[int]]]:
    """Of each step of a run its loss and its samples."""
    import torch
    from lmms_stream.mds.dataset_config import DatasetConfig
    from lmms_stream.train.model.build import ModelConfig
    from lmms_stream.train.report.train_log import read_log
    from lmms_stream.train.run.settings import TrainConfig
    from lmms_stream.train.trainer import FSDP2SFTTrainer

    torch.set_num_threads(1)
    config = TrainConfig(
        output_dir=str(output), global_batch=global_batch, per_device_batch=global_batch, max_tokens=tokens,
        learning_rate=convergence.LEARNING_RATE, warmup_ratio=0.05, save_strategy="no", num_workers=0,
        log_sample_ids=True,
    )  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()):
        FSDP2SFTTrainer(ModelConfig(config=convergence.MODEL), config, DatasetConfig(**data).open()).train()
    return [(record["loss"], record["sample_ids"]) for record in read_log(output)]


def every(steps: Sequence[tuple[float, bool]], count: int) -> Curve:
    """Records of `count` steps each."""
    parts = (steps[at : at + count] for at in range(0, len(steps) - count + 1, count))
    return [(float(np.mean([loss for loss, _ in part])), any(bad for _, bad in part)) for part in parts]


def alarms(curve: Curve, deviations: float) -> list[bool]:
    from lmms_stream.train.report.spikes import Spikes

    spikes = Spikes(deviations=deviations, window=WINDOW)
    return [spikes.take(loss) for loss, _ in curve]


def found(curve: Curve, deviations: float) -> int:
    """The places of garbage, each some records in a row, with an alarm in them."""
    told = zip(curve, alarms(curve, deviations), strict=True)
    places = itertools.groupby(told, key=lambda each: each[0][1])
    return sum(any(alarm for _, alarm in place) for is_garbage, place in places if is_garbage)


def curves(corpus: convergence.Corpus) -> tuple[list[Curve], list[Curve]]:
    """Those without garbage, and those with it; each with records of one step and of five."""
    places = write_garbage(corpus)
    garbage = set(itertools.chain(*places))
    tokens = round(corpus.num_tokens * convergence.SHARE_OF_EPOCH)
    clean, planted = [], []
    kinds = (convergence.OURS, convergence.FULL, convergence.STORED, GARBAGE)
    for kind, global_batch in itertools.product(kinds, (2, 8)):
        data = corpus.order(convergence.FULL if kind == GARBAGE else kind, 0)
        if kind == GARBAGE:
            data |= {"remote": str(corpus.folder / GARBAGE)}
        output = corpus.folder / f"{kind}-{global_batch}".replace(" ", "-")
        steps, _ = in_fresh_process(train, data, output, global_batch, tokens, imported=convergence.IMPORTED)
        marked = [(loss, bool(garbage & set(samples))) for loss, samples in steps]
        (planted if kind == GARBAGE else clean).extend([marked, every(marked, 5)])
        print(f"{kind}, {global_batch} packs a step: {len(steps)} steps, loss {steps[-1][0]:.3f}", flush=True)
    return clean, planted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8000, help="of the corpus")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        corpus = convergence.Corpus(
            folder=Path(name), num_samples=args.samples, seeds=1, canonical_nodes=convergence.CANONICAL_NODES
        )
        corpus.write()
        clean, planted = curves(corpus)
    num_records = sum(map(len, clean))
    rows, is_met = [], False
    for deviations in DEVIATIONS:
        false = sum(sum(alarms(curve, deviations)) for curve in clean)
        num_found = sum(found(curve, deviations) for curve in planted)
        rows.append([f"{deviations:g}", str(false), f"{num_found} of {PLACES * len(planted)}"])
        if deviations == CHOSEN:
            is_met = not false and num_found == PLACES * len(planted)
    print_table(
        f"alarms in {num_records:,} records without garbage, places of garbage that were found",
        ["deviations", "alarms", "found"],
        rows,
    )
    print(f"at {CHOSEN:g} deviations no alarm without garbage, and all places of garbage found: {verdict(is_met)}")


if __name__ == "__main__":
    main()
