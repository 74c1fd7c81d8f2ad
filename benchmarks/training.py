"""Claims: a step of the trainer takes at most 5 % more than a bare PyTorch loop; packed batches are faster than padded
ones by what padding adds to their tokens; with one loader worker at most 1 % of the time is waiting for data.

1. The same packs, model and optimizer in a loop of forward, backward, clipping and update, and in the trainer, which
   also reads them, gathers counts, and writes a record of every step. Both are sharded by FSDP2; beside them the loop
   without FSDP2, which is what sharding itself costs on one process.
2. The same samples as packs, and as transformers' collator pads them: a pack's samples as the rows of one batch. Loss
   and model are the same; by how much packing can be faster is padded tokens over tokens.
3. The demo's chats, tokenized by one worker while the trainer trains: what its log says.

Each runs in a process of its own on one core (3: two), contestants take turns; the median
step of the best round counts.

    python benchmarks/training.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from data import sample_lengths, write_tokens
from measure import in_fresh_process, print_table, verdict

MAX_OVERHEAD, MAX_WAIT = 0.05, 0.01
MIN_OF_PADDING = 0.9  # of the speed-up that padding alone would give
PACKING_LENGTH, GLOBAL_BATCH, VOCABULARY, LEARNING_RATE = 1024, 4, 4096, 1e-3
WARM_UP = 4  # steps that are not counted
MODEL = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": PACKING_LENGTH,
}
IMPORTED = ("torch", "transformers", "lmms_stream.train.trainer")


def open_dataset(folder: Path) -> Any:
    from lmms_stream.dataset import PackedStreamingDataset
    from lmms_stream.packing import PackingConfig
    from lmms_stream.processors.text import TokensProcessor

    packing = PackingConfig(packing_length=PACKING_LENGTH)
    return PackedStreamingDataset(folder, folder.with_name("cache"), processor=TokensProcessor(), packing=packing)


def train(folder: Path, output: Path, num_steps: int) -> list[float]:
    """Seconds of each step of the trainer, as its log has them: they follow one another without a gap."""
    import torch
    from lmms_stream.train.model import ModelConfig
    from lmms_stream.train.settings import TrainConfig
    from lmms_stream.train.trainer import FSDP2SFTTrainer

    torch.set_num_threads(1)
    config = TrainConfig(
        output_dir=str(output),
        global_batch=GLOBAL_BATCH,
        max_steps=num_steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        num_workers=0,
    )
    FSDP2SFTTrainer(ModelConfig(config=MODEL).build(), config, open_dataset(folder)).train()
    return [json.loads(line)["seconds"] for line in (output / "train_log.jsonl").read_text().splitlines()]


def loop(folder: Path, num_steps: int, way: str) -> tuple[list[float], float]:
    """Seconds of each step of a bare loop, and how many tokens it computes for each that a sample has.

    way: "fsdp2" and "plain" for packs, "padded" for their samples padded (without FSDP2).
    """
    import torch
    from lmms_stream.loader import PackedLoader
    from lmms_stream.train.distributed import init_distributed
    from lmms_stream.train.model import ModelConfig, PackedModel, blocks_to_shard
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    batches = []
    for batch in PackedLoader(open_dataset(folder), global_batch=GLOBAL_BATCH):
        batches.append(batch)
        if len(batches) == num_steps * GLOBAL_BATCH:
            break
    model = PackedModel(ModelConfig(config=MODEL).build())
    if way == "fsdp2":
        init_distributed(60)
        for block in blocks_to_shard(model.model):
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    made = [pad(batch) for batch in batches] if way == "padded" else batches
    computed = sum(batch["input_ids"].numel() if way == "padded" else batch.num_tokens for batch in made)
    seconds = []
    for start in range(0, len(made), GLOBAL_BATCH):
        started = time.perf_counter()
        step = range(start, start + GLOBAL_BATCH)
        num_loss_tokens = sum(batches[number].num_loss_tokens for number in step)
        for number in step:
            losses = (padded_losses if way == "padded" else packed_losses)(model, made[number])
            (losses.sum() / num_loss_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    return seconds, computed / sum(batch.num_tokens for batch in batches)


def packed_losses(model: Any, batch: Any) -> Any:
    return model(batch.input_ids, batch.position_ids, batch.labels)[0]


def padded_losses(model: Any, batch: Any) -> Any:
    """As PackedModel computes them, of rows that a mask pads."""
    from lmms_stream.train.loss import token_losses

    hidden = model.model.base_model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).last_hidden_state
    head = model.model.get_output_embeddings()
    return token_losses(hidden.flatten(0, 1)[None], batch["labels"].flatten()[None], head, vocab_size=VOCABULARY)[0]


def pad(batch: Any) -> Any:
    """The samples of a pack as rows, padded by transformers."""
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"[PAD]": 0})), pad_token="[PAD]")
    bounds = batch.cu_seqlens.tolist()
    rows = [
        {"input_ids": batch.input_ids[0, a:b].tolist(), "labels": batch.labels[0, a:b].tolist()}
        for a, b in pairwise(bounds)
    ]
    return DataCollatorForSeq2Seq(tokenizer, padding=True)(rows)


def train_demo(folder: Path, num_steps: int) -> tuple[float, float]:
    """The share of its time that a trainer with one worker waits for the demo's chats, and seconds a step."""
    import torch
    from lmms_stream.converters.convert import convert
    from lmms_stream.dataset import PackedStreamingDataset
    from lmms_stream.demo.corpus import build_corpus, train_tokenizer
    from lmms_stream.packing import PackingConfig
    from lmms_stream.processors.chat import ChatProcessor
    from lmms_stream.train.model import ModelConfig
    from lmms_stream.train.settings import TrainConfig
    from lmms_stream.train.trainer import FSDP2SFTTrainer

    torch.set_num_threads(1)
    corpus = build_corpus(folder / "corpus")
    processor = ChatProcessor.from_pretrained(str(train_tokenizer(corpus.texts, folder / "tokenizer")))
    convert([corpus.functions, corpus.classes], str(folder / "chats"), processor=processor, shard_bytes=1 << 20)
    packing = PackingConfig(packing_length=PACKING_LENGTH, overlong="drop")
    dataset = PackedStreamingDataset(folder / "chats", processor=processor, packing=packing)
    config = TrainConfig(output_dir=str(folder / "run"), global_batch=GLOBAL_BATCH, max_steps=num_steps, num_workers=1)
    FSDP2SFTTrainer(ModelConfig(config=MODEL).build(), config, dataset).train()
    log = [json.loads(line) for line in (folder / "run" / "train_log.jsonl").read_text().splitlines()][WARM_UP:]
    seconds = sum(record["seconds"] for record in log)
    waited = sum(record["data/wait_share"] * record["seconds"] for record in log)
    return waited / seconds, seconds / len(log)


def best(rounds: Iterable[list[float]]) -> float:
    return min(statistics.median(seconds[WARM_UP:]) for seconds in rounds)


def compare(folder: Path, *, num_steps: int, num_rounds: int) -> None:
    contestants: dict[str, Callable[[int], Any]] = {
        "bare loop": lambda _: in_fresh_process(loop, folder, num_steps, "plain", imported=IMPORTED)[0],
        "bare loop, FSDP2": lambda _: in_fresh_process(loop, folder, num_steps, "fsdp2", imported=IMPORTED)[0],
        "trainer, FSDP2": lambda number: (
            in_fresh_process(train, folder, folder.with_name(f"run-{number}"), num_steps, imported=IMPORTED)[0],
            1.0,
        ),
        "bare loop, padded": lambda _: in_fresh_process(loop, folder, num_steps, "padded", imported=IMPORTED)[0],
    }
    results: dict[str, list[tuple[list[float], float]]] = {name: [] for name in contestants}
    for number in range(num_rounds):
        for name, run in contestants.items():
            results[name].append(run(number))
    took = {name: best(seconds for seconds, _ in rounds) for name, rounds in results.items()}
    computed = {name: rounds[0][1] for name, rounds in results.items()}
    rows = [
        [name, f"{1000 * took[name]:,.1f}", f"{took[name] / took['bare loop, FSDP2']:.3f}", f"{computed[name]:.2f}"]
        for name in contestants
    ]
    columns = ["way", "ms a step", "over the bare FSDP2 loop", "tokens computed for each"]
    print_table(f"steps of {GLOBAL_BATCH} packs of {PACKING_LENGTH}", columns, rows)
    overhead = took["trainer, FSDP2"] / took["bare loop, FSDP2"] - 1
    print(f"the trainer takes at most {MAX_OVERHEAD:.0%} more: {verdict(overhead <= MAX_OVERHEAD)} ({overhead:+.1%})")
    gain, padding = took["bare loop, padded"] / took["bare loop"], computed["bare loop, padded"]
    print(
        f"packs are faster by what padding adds: {verdict(gain >= MIN_OF_PADDING * padding)} ({gain:.2f} times, "
        f"{padding:.2f} times the tokens)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for some MB of files (default: the system's temporary folder)")
    args = parser.parse_args()
    cores = os.sched_getaffinity(0)
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        (Path(name) / "demo").mkdir()
        waited, seconds = in_fresh_process(train_demo, Path(name) / "demo", args.steps)[0]
        print(f"the demo's chats, one worker: {seconds * 1000:.0f} ms a step")
        print(f"at most {MAX_WAIT:.0%} of the time is waiting: {verdict(waited <= MAX_WAIT)} ({waited:.2%})")
        os.sched_setaffinity(0, {max(cores)})
        lengths = sample_lengths("chat", args.steps * GLOBAL_BATCH * 8, limit=PACKING_LENGTH)
        write_tokens(Path(name) / "tokens", np.asarray(lengths), shard_bytes=1 << 20, vocabulary=VOCABULARY)
        compare(Path(name) / "tokens", num_steps=args.steps, num_rounds=args.rounds)


if __name__ == "__main__":
    main()
