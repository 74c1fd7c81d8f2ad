"""Jobs on the CPU: a tiny model learns a Markov chain, in packs of many samples as in packs of one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.train.report.train_log import read_log
from numpy.typing import NDArray

from tests.conftest import TokensAndSpans, write_samples
from tests.rounds import in_long_rounds, rounds
from tests.train.runs import write_run

from .runs import train

NUM_TOKENS, NUM_SUCCESSORS = 32, 4
PACKING_LENGTH, PACKS_A_STEP, MEAN_LENGTH = 256, 8, 64
MAX_TOKENS = rounds(80_000, 400_000)
NUM_RANKS = rounds(1, 2)
MODEL = {
    "model_type": "llama",
    "vocab_size": NUM_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def make_chain() -> NDArray[np.float64]:
    """Probabilities of the next token after each: a few each time. float64[NUM_TOKENS, NUM_TOKENS]."""
    rng = np.random.default_rng(1)
    chain = np.zeros((NUM_TOKENS, NUM_TOKENS))
    for row in chain:
        row[rng.choice(NUM_TOKENS, NUM_SUCCESSORS, replace=False)] = rng.dirichlet(np.full(NUM_SUCCESSORS, 2.0))
    return chain


def draw_samples(num_samples: int, *, seed: int) -> list[TokensAndSpans]:
    """Walks along the chain, learnt whole."""
    rng = np.random.default_rng(seed)
    ends = make_chain().cumsum(axis=1)
    samples: list[TokensAndSpans] = []
    for length in rng.integers(MEAN_LENGTH // 2, 3 * MEAN_LENGTH // 2, num_samples).tolist():
        tokens = [int(rng.integers(NUM_TOKENS))]
        for chance in rng.random(length - 1):
            tokens.append(min(int(np.searchsorted(ends[tokens[-1]], chance, side="right")), NUM_TOKENS - 1))
        samples.append((np.array(tokens, np.int32), np.array([[0, length]], np.int32)))
    return samples


def entropies(samples: list[TokensAndSpans]) -> tuple[float, float]:
    """Mean loss in nats of who knows how frequent each token is, and of who knows the chain: none can do better."""
    befores = np.concatenate([tokens[:-1] for tokens, _ in samples])
    learnt = np.concatenate([tokens[1:] for tokens, _ in samples])
    shares = np.bincount(learnt, minlength=NUM_TOKENS) / len(learnt)
    return float(-np.log(shares[learnt]).mean()), float(-np.log(make_chain()[befores, learnt]).mean())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learning")
    write_samples(folder / "train", draw_samples(1600, seed=2))
    write_samples(folder / "held-out", draw_samples(100, seed=3))
    return folder


def last_loss(folder: Path, output: Path, *overrides: str) -> float:
    """On held-out samples, after MAX_TOKENS."""
    settings: dict[str, Any] = {"max_tokens": MAX_TOKENS, "learning_rate": 1e-2, "warmup": 0.05}
    held_out = {"remote": str(folder / "held-out")}
    config = write_run(folder / "run.yaml", folder / "train", eval_dataset=held_out, log_sample_ids=False, **settings)
    model = [f"model.config.{name}={value}" for name, value in MODEL.items()]
    train(config, output, *model, *overrides, nproc=NUM_RANKS)
    loss: float = read_log(output)[-1]["eval_loss"]
    return loss


@in_long_rounds
def test_a_model_learns_in_packs_of_many_samples_as_in_packs_of_one(folder: Path, tmp_path: Path) -> None:
    of_tokens, of_chain = entropies(draw_samples(100, seed=3))
    assert of_tokens - of_chain > 2
    packed = last_loss(folder, tmp_path / "packed", f"train.global_batch={PACKS_A_STEP}")
    samples_a_step = PACKS_A_STEP * PACKING_LENGTH // MEAN_LENGTH
    alone = ["dataset.max_samples_per_pack=1", "eval_dataset.max_samples_per_pack=1"]
    single = last_loss(folder, tmp_path / "single", *alone, f"train.global_batch={samples_a_step}")
    sys.stdout.write(f"tokens {of_tokens:.3f}, chain {of_chain:.3f}, packed {packed:.3f}, alone {single:.3f}\n")
    assert of_chain < packed < of_tokens - 1.5
    assert packed == pytest.approx(single, rel=0.05)
