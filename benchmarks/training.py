"""Claims: a step of the trainer takes at most 5 % more than a bare PyTorch loop; packed batches are faster than padded
ones by what padding adds to their tokens; with one loader worker at most 1 % of the time is waiting for data.

1. The same packs, model and optimizer in a loop of forward, backward, clipping and update, and in the trainer, which
   also reads them, gathers counts, and writes a record of every step. Both are sharded by FSDP2.
2. The same samples as packs, and as transformers' collator pads them: a pack's samples as the rows of one batch. Loss
   and model are the same; by how much packing can be faster is padded tokens over tokens.
3. The demo's chats, tokenized by one worker while the trainer trains: what its log says.

In 1 and 2 both sides take turns, step by step, in one process on one core; counted is its CPU time, which is its time
on a core of its own, and which other processes do not change.

    python benchmarks/training.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from data import sample_lengths, write_tokens
from measure import in_fresh_process, print_table, verdict

MAX_OVERHEAD, MAX_WAIT = 0.05, 0.01
MIN_OF_PADDING = 0.9  # of the speed-up that padding alone would give
PACKING_LENGTH, GLOBAL_BATCH, VOCABULARY, LEARNING_RATE = 2048, 4, 4096, 1e-3
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


def open_dataset(folder: Path) -> Any:
    from lmms_stream.mds.packed import PackedStreamingDataset
    from lmms_stream.plan.packing import PackingConfig
    from lmms_stream.processors.text import TokensProcessor

    packing = PackingConfig(packing_length=PACKING_LENGTH)
    return PackedStreamingDataset(
        folder, folder.with_name(f"cache-{folder.name}"), processor=TokensProcessor(), packing=packing
    )


class Loop:
    """A bare PyTorch loop over steps of packs."""

    def __init__(
        self,
        *,
        sharded: bool,
        losses: Callable[[Any, Any], Any],
        attends_as_the_trainer: bool = True,
        config: Mapping[str, Any] = MODEL,
        family: Any = None,
    ):
        import torch
        from lmms_stream.train.model.build import ModelConfig
        from lmms_stream.train.model.choice import prove_packing
        from lmms_stream.train.model.model import PackedModel
        from lmms_stream.train.model.sharding import blocks_to_shard
        from lmms_stream.train.run.distributed import init_distributed
        from torch.distributed.fsdp import fully_shard

        self.losses = losses
        self.model = PackedModel(ModelConfig(config=config).build(), family)
        if attends_as_the_trainer:
            prove_packing(self.model, device=torch.device("cpu"))
        if sharded:
            init_distributed(60)
            for block in blocks_to_shard(self.model.model):
                fully_shard(block)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.clip = torch.nn.utils.clip_grad_norm_

    def step(self, batches: Sequence[Any], *, num_loss_tokens: int) -> None:
        for batch in batches:
            (self.losses(self.model, batch).sum() / num_loss_tokens).backward()
        self.clip(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def read_steps(folder: Path, num_steps: int) -> list[list[Any]]:
    from lmms_stream.loader.loader import PackedLoader

    batches = islice(PackedLoader(open_dataset(folder), global_batch=GLOBAL_BATCH), num_steps * GLOBAL_BATCH)
    return [list(step) for step in zip(*[iter(batches)] * GLOBAL_BATCH, strict=True)]


def num_learnt(step: Sequence[Any]) -> int:
    return sum(batch.num_loss_tokens for batch in step)


def train_beside_a_loop(folder: Path, output: Path, num_steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step of the trainer, from update to update, and of a bare loop that runs in between."""
    import torch
    from lmms_stream import FSDP2SFTTrainer
    from lmms_stream.train.model.build import ModelConfig
    from lmms_stream.train.run.settings import TrainConfig

    torch.set_num_threads(1)
    config = TrainConfig(
        output_dir=str(output),
        global_batch=GLOBAL_BATCH,
        max_steps=num_steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        num_workers=0,
    )
    trainer = FSDP2SFTTrainer(ModelConfig(config=MODEL).build(), config, open_dataset(folder))
    loop = Loop(sharded=True, losses=packed_losses)
    steps = iter(read_steps(folder, num_steps))
    moments: list[tuple[float, float]] = []  # the bare step begins and ends

    def run_the_loop(*_: Any) -> None:
        batches, began = next(steps), time.process_time()
        loop.step(batches, num_loss_tokens=num_learnt(batches))
        moments.append((began, time.process_time()))

    trainer.optimizer.register_step_pre_hook(run_the_loop)
    trainer.train()
    of_loop = [end - begin for begin, end in moments[1:]]
    of_trainer = [begin - end_before for (_, end_before), (begin, _) in pairwise(moments)]
    return of_trainer, of_loop


def pack_and_pad(folder: Path, num_steps: int) -> tuple[list[float], list[float], float]:
    """Seconds of each step of packs, and of the same samples padded; tokens that padding makes of one."""
    import torch

    torch.set_num_threads(1)
    packed = Loop(sharded=False, losses=packed_losses)
    padded = Loop(sharded=False, losses=padded_losses, attends_as_the_trainer=False)
    seconds: tuple[list[float], list[float]] = ([], [])
    num_tokens = num_padded = 0
    for step in read_steps(folder, num_steps):
        rows = [pad(batch) for batch in step]
        num_tokens += sum(batch.num_tokens for batch in step)
        num_padded += sum(batch["input_ids"].numel() for batch in rows)
        for loop, batches, times in zip((packed, padded), (step, rows), seconds, strict=True):
            began = time.process_time()
            loop.step(batches, num_loss_tokens=num_learnt(step))
            times.append(time.process_time() - began)
    return *seconds, num_padded / num_tokens


def packed_losses(model: Any, batch: Any) -> Any:
    return model(batch)[0]


def padded_losses(model: Any, batch: Any) -> Any:
    """As PackedModel computes them, of rows that a mask pads."""
    from lmms_stream.train.model.loss import learnt_tokens, token_losses

    hidden = model.model.base_model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).last_hidden_state
    learnt, targets = learnt_tokens(batch["labels"].flatten()[None])
    head = model.model.get_output_embeddings()
    return token_losses(hidden.flatten(0, 1)[learnt], targets, head, vocab_size=VOCABULARY)[0]


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
    from lmms_stream import FSDP2SFTTrainer
    from lmms_stream.converters.convert import convert
    from lmms_stream.mds.packed import PackedStreamingDataset
    from lmms_stream.plan.packing import PackingConfig
    from lmms_stream.processors.chat import ChatProcessor
    from lmms_stream.tools.demo.corpus import build_corpus, train_tokenizer
    from lmms_stream.train.model.build import ModelConfig
    from lmms_stream.train.run.settings import TrainConfig

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


def compare(folder: Path, *, num_steps: int) -> None:
    """Print claims 1 and 2."""
    trainer, loop = in_fresh_process(train_beside_a_loop, folder, folder.with_name("run"), num_steps)[0]
    packed, padded, padding = in_fresh_process(pack_and_pad, folder, num_steps)[0]
    rows = []
    for name, ours, theirs in (("trainer, bare loop", trainer, loop), ("packed, padded", packed, padded)):
        medians = [statistics.median(seconds[WARM_UP:]) for seconds in (ours, theirs)]
        rows.append([name, *(f"{1000 * median:,.1f}" for median in medians), f"{ratio(ours, theirs):.3f}"])
    columns = ["the one, the other", "ms a step", "ms a step", "ratio of all steps"]
    print_table(f"steps of {GLOBAL_BATCH} packs of {PACKING_LENGTH}", columns, rows)
    overhead, gain = ratio(trainer, loop) - 1, ratio(padded, packed)
    print(f"the trainer takes at most {MAX_OVERHEAD:.0%} more: {verdict(overhead <= MAX_OVERHEAD)} ({overhead:+.1%})")
    print(
        f"packs are faster by what padding adds: {verdict(gain >= MIN_OF_PADDING * padding)} ({gain:.2f} times, "
        f"{padding:.2f} times the tokens)"
    )


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return sum(ours[WARM_UP:]) / sum(theirs[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
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
        compare(Path(name) / "tokens", num_steps=args.steps)


if __name__ == "__main__":
    main()
