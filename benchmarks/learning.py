"""Claim: training on packs learns what training on single samples learns, per token, and it learns.

The same tiny model is trained twice on the same chats of Python's documented functions (`build_corpus` of the demo), to
the same number of tokens: on packs of many samples, and on packs of one. Steps have about as many tokens in both. The
loss on held-out chats is drawn over the tokens seen, beside the entropy of single tokens, which a model reaches that
knows only how frequent each is.

    python benchmarks/learning.py --plot docs/learning.png
    python benchmarks/learning.py --tokens 500000
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from measure import loss_plot, print_table, verdict

PACKING_LENGTH = 1024
PACKS_A_STEP = 8
RANKS = 2
MAX_S = 3600.0  # of a run
MAX_DIFFERENCE = 0.05  # of the last losses, relative
MIN_BELOW_ENTROPY = 0.5  # nats
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": PACKING_LENGTH,
    "tie_word_embeddings": True,
}


def write_dataset(folder: Path) -> tuple[Path, Path, int]:
    """Tokenized datasets train and validation, the tokenizer, and its vocabulary."""
    from lmms_stream.converters.convert import convert
    from lmms_stream.processors.chat import ChatProcessor
    from lmms_stream.tools.demo.corpus import VOCABULARY, build_corpus, train_tokenizer

    corpus = build_corpus(folder / "corpus")
    processor = ChatProcessor.from_pretrained(str(train_tokenizer(corpus.texts, folder / "tokenizer")))
    shares = {"train": 0.95, "validation": 0.05}
    convert([corpus.functions], str(folder / "data"), processor=processor, tokenize=True, splits=shares)
    return folder / "data" / "train", folder / "data" / "validation", VOCABULARY


def single_token_entropy(train: Path, validation: Path, vocabulary: int) -> float:
    """Mean loss, in nats, of the frequencies of the learnt tokens of `train` on those of `validation`."""
    from lmms_stream import PackedStreamingDataset

    def counts(folder: Path) -> Any:
        total = np.zeros(vocabulary)
        for sample in PackedStreamingDataset(folder)[:]:
            for start, stop in sample["loss_spans"]:
                total += np.bincount(sample["input_ids"][start:stop], minlength=vocabulary)
        return total

    expected, found = counts(train) + 1, counts(validation)
    return float(-(found * np.log(expected / expected.sum())).sum() / found.sum())


def write_config(path: Path, train: Path, validation: Path, vocabulary: int, *, tokens: int, single: bool) -> Path:
    from lmms_stream import PackedStreamingDataset

    lengths = PackedStreamingDataset(train).length_index().lengths
    fitting = lengths[lengths <= PACKING_LENGTH]
    packs = round(PACKS_A_STEP * PACKING_LENGTH / float(fitting.mean()) / RANKS) * RANKS if single else PACKS_A_STEP
    data = {"processor": {"type": "tokens"}, "packing_length": PACKING_LENGTH, "overlong": "drop"}
    settings = {
        "dataset": {**data, "remote": str(train), "max_samples_per_pack": 1 if single else None},
        "eval_dataset": {**data, "remote": str(validation), "shuffle": False},
        "model": {"config": {**MODEL, "vocab_size": vocabulary}},
        "train": {
            "output_dir": str(path.with_suffix("")),
            "global_batch": packs,
            "max_tokens": tokens,
            "learning_rate": 3e-3,
            "warmup": 0.05,
            "eval_steps": max(1, tokens // (PACKS_A_STEP * PACKING_LENGTH) // 12),
        },
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def curve(config: Path) -> list[tuple[int, float]]:
    """Tokens seen and loss on the held-out chats of a run."""
    from lmms_stream.tools.demo.jobs import run_job
    from lmms_stream.train.report.train_log import read_log

    output = config.with_suffix("")
    run_job(config, output, nproc=RANKS, on_step=lambda step: None, timeout_s=MAX_S)
    records = read_log(output)
    seen = {record["step"]: record["tokens_seen"] for record in records if "tokens_seen" in record}
    return [(seen[record["step"]], record["eval_loss"]) for record in records if "eval_loss" in record]


def plot(curves: dict[str, list[tuple[int, float]]], entropy: float, path: Path) -> None:
    with loss_plot(path, "loss on held-out chats, nats a token") as axes:
        for (name, points), style in zip(curves.items(), ("-o", "--x"), strict=True):
            axes.plot(*zip(*points, strict=True), style, label=name)
        axes.axhline(entropy, color="grey", linewidth=1, label="frequencies of single tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3_000_000, help="of each run")
    parser.add_argument("--plot", type=Path, help="where the curves are drawn")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train, validation, vocabulary = write_dataset(folder)
        entropy = single_token_entropy(train, validation, vocabulary)
        curves = {}
        for kind, single in (("packs of many samples", False), ("one sample at a time", True)):
            path = folder / f"{'single' if single else 'packed'}.yaml"
            curves[kind] = curve(write_config(path, train, validation, vocabulary, tokens=args.tokens, single=single))
    packed, alone = (points[-1][1] for points in curves.values())
    print_table(
        f"loss on held-out chats after {args.tokens:,} tokens, nats a token",
        ["", "loss"],
        [["frequencies of single tokens", f"{entropy:.3f}"], *([n, f"{p[-1][1]:.3f}"] for n, p in curves.items())],
    )
    difference = abs(packed - alone) / alone
    print(f"at least {MIN_BELOW_ENTROPY} nats below the frequencies: {verdict(packed <= entropy - MIN_BELOW_ENTROPY)}")
    print(f"packed as single within {MAX_DIFFERENCE:.0%}: {verdict(difference <= MAX_DIFFERENCE)} ({difference:.1%})")
    assert all(math.isfinite(loss) for points in curves.values() for _, loss in points)
    if args.plot:
        plot(curves, entropy, args.plot)


if __name__ == "__main__":
    main()
