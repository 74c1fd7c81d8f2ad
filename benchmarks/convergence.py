"""Claim: our order (shards permuted, cut into canonical nodes, shuffled in blocks of a fiftieth of the dataset) teaches
what a full shuffle of the samples teaches: the held-out losses differ by no more than seeds make them differ.

The corpus is stored as real ones are, source after source: samples of each topic follow those of the one before, and a
shard holds one topic. A topic is a table of which token follows which, so a model has to learn all of them, and forgets
those that it does not see. The same model is trained for one epoch on

    our order           the corpus as it is stored, shuffled as the trainer does
    a full shuffle      the corpus written in a permutation that NumPy draws of all its samples, read as it is stored
    the stored order    the corpus as it is stored, not shuffled, which has to be worse: else nothing is shown

once for each seed, which draws the weights and the order, on the same number of tokens. The losses after the last step
are compared: the means of the first two may differ by what Student's t allows two groups of one mean at 95 %, given the
spread of the seeds within each, and by 1 % of all that was learnt.

    python benchmarks/convergence.py --plot docs/convergence.png
    python benchmarks/convergence.py --samples 3200 --seeds 2
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from data import write_lengths_index
from measure import THREAD_SETTINGS, in_fresh_process, loss_plot, print_table, verdict
from numpy.typing import NDArray

OURS, FULL, STORED = "our order", "a full shuffle", "the stored order"
TOPICS, STATES = 16, 32
SUCCESSORS = np.array([0.6, 0.25, 0.1, 0.05])  # probabilities of the four tokens that may follow a token
SHORTEST, LONGEST = 64, 192  # tokens of a sample
SHARDS_A_BLOCK, BLOCKS = 16, 50
CANONICAL_NODES = 8  # as many as the trainer takes by itself for a million samples or more
HELD_OUT = 320  # samples
PACKING_LENGTH, PACKS_A_STEP = 512, 8
LEARNING_RATE = 3e-3
EVALUATIONS = 12
SHARE_OF_EPOCH = 0.98  # all orders are within one epoch, the last pack of which is not full
MAX_S = 480.0  # of all
IMPORTED = ("torch", "streaming", "lmms_stream.train.trainer", "lmms_stream.mds.packed")
# Student's t, two-sided at 95 %, by its degrees of freedom
STUDENT = {2: 4.303, 4: 2.776, 6: 2.447, 8: 2.306, 10: 2.228, 12: 2.179, 14: 2.145, 16: 2.120, 18: 2.101}
MAX_DIFFERENCE = 0.01  # of the means, as a share of what a full shuffle has learnt
MIN_WORSE = 0.05  # of the stored order, as a share of the same
MODEL = {
    "model_type": "llama",
    "vocab_size": TOPICS + STATES,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": PACKING_LENGTH,
    "tie_word_embeddings": True,
}
Samples = list[NDArray[np.int32]]


def samples_of_topics(topics: Sequence[int], *, seed: int) -> Samples:
    """A sample of each topic named: the topic's token, then a walk through its table, int32[64 to 192]."""
    tables = np.random.default_rng(0).integers(0, STATES, (TOPICS, STATES, len(SUCCESSORS)))
    rng = np.random.default_rng([1, seed])
    made = []
    for topic in topics:
        drawn = rng.choice(len(SUCCESSORS), rng.integers(SHORTEST, LONGEST + 1) - 1, p=SUCCESSORS)
        tokens, state = [topic], int(rng.integers(STATES))
        for which in drawn:
            tokens.append(TOPICS + state)
            state = int(tables[topic, state, which])
        made.append(np.array(tokens, np.int32))
    return made


def write(folder: Path, samples: Samples, *, samples_a_shard: int) -> None:
    """Tokenized samples, all of which are learnt, in shards of so many."""
    from streaming import MDSWriter

    shard_bytes = 0
    for start in range(0, len(samples), samples_a_shard):
        shard_bytes = max(shard_bytes, sum(each.nbytes + 96 for each in samples[start : start + samples_a_shard]))
    columns = {"input_ids": "ndarray:int32", "loss_spans": "ndarray:int32"}
    with MDSWriter(columns=columns, out=str(folder), size_limit=shard_bytes) as writer:
        for tokens in samples:
            writer.write({"input_ids": tokens, "loss_spans": np.array([[0, len(tokens)]], np.int32)})
    write_lengths_index(folder, np.array([len(tokens) for tokens in samples], np.uint32))


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    folder: Path
    num_samples: int
    seeds: int
    canonical_nodes: int

    @property
    def num_tokens(self) -> int:
        return self.num_samples * (SHORTEST + LONGEST) // 2  # about as many

    @property
    def block(self) -> int:
        return self.num_samples // BLOCKS

    def write(self) -> None:
        topics = np.sort(np.arange(self.num_samples) % TOPICS).tolist()
        samples = samples_of_topics(topics, seed=0)
        size = self.block // SHARDS_A_BLOCK
        write(self.folder / "stored", samples, samples_a_shard=size)
        for seed in range(self.seeds):
            permutation = np.random.default_rng([2, seed]).permutation(self.num_samples).tolist()
            write(self.folder / f"full-{seed}", [samples[index] for index in permutation], samples_a_shard=size)
        held_out = samples_of_topics([number % TOPICS for number in range(HELD_OUT)], seed=1)
        write(self.folder / "held-out", held_out, samples_a_shard=HELD_OUT)

    def order(self, kind: str, seed: int) -> dict[str, Any]:
        """The settings of a DatasetConfig that reads it in this order."""
        if kind == FULL:
            return self._data(f"full-{seed}") | {"shuffle": False}
        nodes = {"shuffle_block_size": self.block, "num_canonical_nodes": self.canonical_nodes}
        return self._data("stored") | {"shuffle": kind == OURS, "seed": seed, **nodes}

    @property
    def held_out(self) -> dict[str, Any]:
        return self._data("held-out") | {"shuffle": False}

    def _data(self, name: str) -> dict[str, Any]:
        from lmms_stream.processors import ProcessorConfig

        return {
            "remote": str(self.folder / name),
            "processor": ProcessorConfig(type="tokens"),
            "packing_length": PACKING_LENGTH,
            "packing_window": self.block,  # the stored order stays one: a window is emitted in an order of its own
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    kind: str
    seed: int
    curve: list[tuple[int, float]]  # tokens seen; loss on held-out samples, nats a token

    @property
    def loss(self) -> float:
        return self.curve[-1][1]


def train(corpus: Corpus, kind: str, seed: int, tokens: int) -> Run:
    """A model that is trained on so many tokens in one of the orders."""
    import torch
    from lmms_stream import FSDP2SFTTrainer
    from lmms_stream.mds.dataset_config import DatasetConfig
    from lmms_stream.train.model.build import ModelConfig
    from lmms_stream.train.report.train_log import read_log
    from lmms_stream.train.run.settings import TrainConfig

    torch.set_num_threads(1)
    output = corpus.folder / "-".join([*kind.split(), str(seed)])
    config = TrainConfig(
        output_dir=str(output),
        global_batch=PACKS_A_STEP,
        per_device_batch=PACKS_A_STEP,
        max_tokens=tokens,
        learning_rate=LEARNING_RATE,
        warmup=0.05,
        eval_steps=max(1, tokens // (PACKS_A_STEP * PACKING_LENGTH) // EVALUATIONS),
        save_steps="no",
        num_workers=0,
        seed=seed,
    )
    with contextlib.redirect_stderr(io.StringIO()):  # several runs would tell their progress at once
        FSDP2SFTTrainer(
            ModelConfig(config=MODEL, seed=seed),
            config,
            DatasetConfig(**corpus.order(kind, seed)).open(),
            DatasetConfig(**corpus.held_out).open(),
        ).train()
    records = read_log(output)
    seen = {record["step"]: record["tokens_seen"] for record in records if "tokens_seen" in record}
    curve = [(seen[record["step"]], record["eval_loss"]) for record in records if "eval_loss" in record]
    return Run(kind=kind, seed=seed, curve=curve)


def run_all(corpus: Corpus) -> list[Run]:
    """Each in a process of its own, with one thread, as many at once as there are cores."""
    tokens = round(corpus.num_tokens * SHARE_OF_EPOCH)

    def run(of: tuple[int, str]) -> Run:
        seed, kind = of
        made, _ = in_fresh_process(train, corpus, kind, seed, tokens, imported=IMPORTED)
        print(f"{kind}, seed {seed}: {made.loss:.4f} after {made.curve[-1][0]:,} tokens", flush=True)
        return made

    os.environ.update(dict.fromkeys(THREAD_SETTINGS, "1"))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return [*pool.map(run, itertools.product(range(corpus.seeds), (OURS, FULL, STORED)))]


def largest_by_chance(groups: Sequence[Sequence[float]]) -> float:
    """How far the means of two groups of as many runs may be apart by seeds alone, at 95 %: Student's t."""
    count = len(groups[0])
    pooled = statistics.fmean(statistics.variance(group) for group in groups)
    return STUDENT[2 * count - 2] * math.sqrt(2 * pooled / count)


def plot(runs: list[Run], floor: float, path: Path) -> None:
    with loss_plot(path, "loss on held-out samples, nats a token") as axes:
        for run in runs:
            style, color = {OURS: ("-o", "C0"), FULL: ("--x", "C1"), STORED: (":", "C3")}[run.kind]
            label = run.kind if not run.seed else None
            axes.plot(*zip(*run.curve, strict=True), style, color=color, linewidth=1, markersize=4, label=label)
        axes.axhline(floor, color="grey", linewidth=1, label="the entropy of the topics")


def entropy() -> float:
    """Of the tokens that are learnt when their topic is known: what no model can be below but by chance."""
    mean_length = (SHORTEST + LONGEST) / 2
    walked = -float((SUCCESSORS * np.log(SUCCESSORS)).sum())
    return (math.log(STATES) + (mean_length - 2) * walked) / (mean_length - 1)  # the first token is no target


def report(runs: list[Run], *, seconds: float) -> None:
    losses = {kind: [run.loss for run in runs if run.kind == kind] for kind in (OURS, FULL, STORED)}
    means = {kind: statistics.fmean(of_kind) for kind, of_kind in losses.items()}
    learnt = math.log(TOPICS + STATES) - means[FULL]
    rows = [
        [kind, *(f"{loss:.4f}" for loss in of_kind), f"{means[kind]:.4f}", f"{statistics.stdev(of_kind):.4f}"]
        for kind, of_kind in losses.items()
    ]
    seeds = [f"seed {seed}" for seed in range(len(losses[OURS]))]
    print_table(
        f"loss on held-out samples after {runs[0].curve[-1][0]:,} tokens, nats a token (guessing "
        f"{math.log(TOPICS + STATES):.3f}, the topics' entropy {entropy():.3f})",
        ["", *seeds, "mean", "standard deviation"],
        rows,
    )
    difference, by_chance = abs(means[OURS] - means[FULL]), largest_by_chance([losses[OURS], losses[FULL]])
    worse = (means[STORED] - means[FULL]) / learnt
    print(
        f"our order as a full shuffle, beyond seeds (Student's t, 95 %: {by_chance:.4f}): "
        f"{verdict(difference <= by_chance)} ({difference:.4f})"
    )
    print(
        f"and within {MAX_DIFFERENCE:.0%} of what is learnt: {verdict(difference <= MAX_DIFFERENCE * learnt)} "
        f"({difference / learnt:.2%})"
    )
    print(f"the stored order at least {MIN_WORSE:.0%} of it worse: {verdict(worse >= MIN_WORSE)} ({worse:.1%})")
    print(f"all of it within {MAX_S / 60:.0f} minutes: {verdict(seconds <= MAX_S)} ({seconds / 60:.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=12_800, help=f"to train on, a multiple of {BLOCKS}")
    parser.add_argument("--seeds", type=int, default=3, help="2 to 10")
    parser.add_argument("--canonical-nodes", type=int, default=CANONICAL_NODES, help="of our order")
    parser.add_argument("--plot", type=Path, help="where the curves are drawn")
    args = parser.parse_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        corpus = Corpus(
            folder=Path(name), num_samples=args.samples, seeds=args.seeds, canonical_nodes=args.canonical_nodes
        )
        corpus.write()
        runs = run_all(corpus)
    report(runs, seconds=time.perf_counter() - begun)
    if args.plot:
        plot(runs, entropy(), args.plot)


if __name__ == "__main__":
    main()
