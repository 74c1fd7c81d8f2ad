"""Claim: what a rank holds of a pack between forward and backward pass falls with the ranks that share its tokens.

One pack of samples is run forward and backward by a Llama, as the first of 1, 2 and 4 ranks that share its tokens
(sequence_parallel); nothing is sent, torch's "fake" backend stands for the other ranks. Counted are the bytes of all
tensors that are alive at once, above those before the step (weights and gradients, which FSDP shards otherwise), with
blocks kept and with blocks run again (gradient_checkpointing), and what a rank would send in a layer's attention. That
losses and gradients are those of one rank is what tests/jobs/test_divided_steps.py shows.

    python benchmarks/parallel.py
    python benchmarks/parallel.py --tokens 8192 --layers 8
"""

from __future__ import annotations

import argparse
import time
import weakref
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lmms_stream.loader.collate import collate
from lmms_stream.plugins.parallel.sequence import SequenceParts
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.model.sharding import checkpoint_blocks
from measure import MIB, keep_to_one_core, print_table, verdict
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEGREES = (1, 2, 4)
SAMPLE_TOKENS = (100, 900)
HEADS, KEY_HEADS, VOCABULARY = 8, 4, 4096
MAX_SHARE = 0.6  # of the bytes with half as many ranks


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that operators make inside, until nothing holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._now -= num_bytes


def measure(degree: int, args: argparse.Namespace) -> dict[str, float]:
    """The first rank's peaks, with blocks kept and with blocks that run again, and its CPU seconds."""
    pack = pack_of(args.tokens)
    made: dict[str, float] = {}
    for name in ("kept", "again"):
        model = model_of(args)
        if name == "again":
            checkpoint_blocks(model.model)
        if degree > 1:
            group = dist.new_group(list(range(degree)))
            assert isinstance(group, dist.ProcessGroup)
            model.sequence = SequenceParts(group=group)
        model(pack).tokens.sum().backward()  # so that gradients are there
        started = time.process_time()
        with Alive() as alive:
            model(pack).tokens.sum().backward()
        made[name] = alive.peak
        made[f"{name} seconds"] = time.process_time() - started
    return made


def pack_of(num_tokens: int) -> Any:
    rng = np.random.default_rng(0)
    samples, left = [], num_tokens
    while left:
        length = min(left, int(rng.integers(*SAMPLE_TOKENS)))
        ids = rng.integers(0, VOCABULARY, length)
        samples.append({"input_ids": ids, "labels": ids})
        left -= length
    return collate(samples, range(len(samples)))


def model_of(args: argparse.Namespace) -> PackedModel:
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": args.hidden,
        "intermediate_size": 3 * args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "max_position_embeddings": args.tokens,
    }
    return PackedModel(ModelConfig(config=config, attention="sdpa_varlen").build()).train()


def sent_in_a_layer(args: argparse.Namespace, degree: int) -> float:
    """Bytes that a rank sends for the attention of a layer, forward: of queries, keys, values, and outputs."""
    width = args.hidden // HEADS
    return args.tokens / degree * (degree - 1) / degree * (2 * HEADS + 2 * KEY_HEADS) * width * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args()
    keep_to_one_core()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(DEGREES))
    made = {degree: measure(degree, args) for degree in DEGREES}
    rows = [
        [
            str(degree), f"{each['kept'] / MIB:.0f}", f"{each['kept'] / made[1]['kept']:.2f}",
            f"{each['again'] / MIB:.0f}", f"{each['again'] / made[1]['again']:.2f}",
            f"{sent_in_a_layer(args, degree) / MIB:.2f}", f"{each['kept seconds']:.1f}",
        ]
        for degree, each in made.items()
    ]  # fmt: skip
    columns = ["ranks that share a pack", "peak MiB", "share", "peak MiB, blocks run again", "share",
               "MiB sent a layer", "CPU s"]  # fmt: skip
    print_table(f"a pack of {args.tokens:,} tokens, {args.layers} layers of width {args.hidden}", columns, rows)
    falls = all(made[2 * degree]["kept"] <= MAX_SHARE * made[degree]["kept"] for degree in (1, 2))
    print(f"each doubling of ranks leaves at most {MAX_SHARE:.0%} of a rank's peak: {verdict(falls)}")


if __name__ == "__main__":
    main()
