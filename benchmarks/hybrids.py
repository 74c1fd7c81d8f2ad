"""Claim: with layers run on each sample alone, a pack of chats takes at most twice as long as one sample of its tokens.

Models with recurrent layers and short convolutions, with transformers' own PyTorch code of their kernels. A forward and
backward pass of a pack with samples kept apart, and one of the same tokens as a single sample, which mixes them, take
turns in one process on one core; the figures are medians of CPU time. Also one sample at a time, without batches of
samples of similar length. Samples much shorter than the chunk of a scan (128 or 256 tokens of Mamba 2) are each padded
to it: a second table, without a claim.

    python benchmarks/hybrids.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from data import sample_lengths
from measure import print_table, verdict

MOST = 2.0
PACKING_LENGTH, VOCABULARY = 2048, 512
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2}
FEED = {"intermediate_size": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
KINDS = {"layer_types": ["linear_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**HEADS, **FEED, **DELTA, **KINDS, "head_dim": 32},
    "lfm2": {**HEADS, **FEED, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 32, "state_size": 32, "n_groups": 1},
    "falcon_h1": {**HEADS, **FEED, "head_dim": 32, "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_state": 32},
    "rwkv": {**FEED, "attention_hidden_size": 128, "context_length": PACKING_LENGTH},
}


def seconds_of(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median CPU seconds of each, which take turns."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            begun = time.process_time()
            run()
            if number:
                found[name].append(time.process_time() - begun)
    return {name: statistics.median(each) for name, each in found.items()}


def measure(model_type: str, lengths: list[int], rounds: int) -> dict[str, float]:
    import torch
    from lmms_stream.loader.collate import collate
    from lmms_stream.train.model import by_sample
    from lmms_stream.train.model.build import ModelConfig
    from lmms_stream.train.model.choice import prove_packing
    from lmms_stream.train.model.model import PackedModel

    config = {"model_type": model_type, **SIZES, **MODELS[model_type]}
    model = PackedModel(ModelConfig(config=config).build())
    prove_packing(model, device=torch.device("cpu"))
    assert model.by_sample is not None
    rng = np.random.default_rng(0)
    ids = [rng.integers(5, VOCABULARY, length) for length in lengths]
    pack = collate([{"input_ids": each, "labels": each} for each in ids], range(len(ids)))
    joined = np.concatenate(ids)
    one = collate([{"input_ids": joined, "labels": joined}], [0])
    shortest = by_sample._SHORTEST

    def train(batch: Any, share: float) -> None:
        by_sample._SHORTEST = share
        model.train()(batch).tokens.sum().backward()
        model.zero_grad()
        by_sample._SHORTEST = shortest

    return seconds_of(
        {
            "mixed": lambda: train(one, shortest),
            "apart": lambda: train(pack, shortest),
            "one at a time": lambda: train(pack, 2.0),
        },
        rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    columns = ["model", "as one sample", "apart", "one at a time", f"at most {MOST}"]
    every = sample_lengths("chat", 1000, limit=PACKING_LENGTH)
    for kind, drawn in (("chats", every), ("short texts, an eighth as long", every // 8)):
        lengths = drawn[np.cumsum(drawn) <= PACKING_LENGTH].tolist()
        rows = []
        for model_type in options.models:
            found = measure(model_type, lengths, options.rounds)
            ratios = [found[name] / found["mixed"] for name in ("apart", "one at a time")]
            met = verdict(ratios[0] <= MOST) if kind == "chats" else ""
            rows.append([model_type, f"{found['mixed'] * 1e3:.0f} ms", *(f"{each:.2f}" for each in ratios), met])
        print_table(f"A pack of {kind}: {len(lengths)} samples, {sum(lengths)} tokens", columns, rows)


if __name__ == "__main__":
    main()
