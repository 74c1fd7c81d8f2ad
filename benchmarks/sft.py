"""Claim: a script of TRL's SFTTrainer makes more steps and tokens a second with this trainer, in no more memory, when
nothing but the import of the trainer is changed: packing, model, attention, data and arguments are the same. The third
row is the script that leaves attention to each trainer.

Each trainer runs in a fresh process on one core, in turns; the best round of each counts. Steps are timed by the same
callback, in CPU time of the process, which is its time on a core of its own; the first steps are not counted. Both
packs hold max_length tokens at most: how full they are is in the table, and tokens/s count no padding.

    python benchmarks/sft.py
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import MIB, in_fresh_process, print_table, verdict

WARM_UP = 3  # steps that are not counted
KINDS = ("TRL", "ours", "ours, its own attention")
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 1 << 13,
}


def prepare(folder: Path) -> tuple[str, str]:
    """A model's folder with its tokenizer, and chats."""
    from lmms_stream.tools.demo.corpus import build_corpus, train_tokenizer
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    corpus = build_corpus(folder / "corpus", library=Path(sysconfig.get_paths()["stdlib"]) / "asyncio")
    tokenizer = AutoTokenizer.from_pretrained(train_tokenizer(corpus.texts, folder / "tokenizer"))
    model = folder / "model"
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SIZES)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    return str(model), str(corpus.functions)


def train(kind: str, model: str, chats: str, output: str, options: dict[str, Any]) -> dict[str, float]:
    """CPU seconds of a step, and how full packs are."""
    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import SFTConfig

    torch.set_num_threads(1)
    if kind == "TRL":
        from trl import SFTTrainer
    else:
        from lmms_stream import FSDP2SFTTrainer as SFTTrainer

    class Steps(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.process_time())

    steps = Steps()
    trainer: Any = SFTTrainer(
        model=model,
        args=SFTConfig(
            output, packing=True, bf16=False, use_cpu=True, report_to="none", save_strategy="no", logging_steps=1,
            disable_tqdm=True,
            model_init_kwargs=None if kind.endswith("attention") else {"attn_implementation": options["attention"]},
            max_length=options["max_length"], max_steps=options["steps"] + WARM_UP,
            per_device_train_batch_size=options["batch"],
        ),
        train_dataset=load_dataset("json", data_files=chats, split="train", cache_dir=f"{output}/cache"),
        callbacks=[steps],
    )  # fmt: skip
    if kind == "TRL":
        packs = [sum(lengths) for lengths in trainer.train_dataset["seq_lengths"]]
        tokens = statistics.mean(packs)
    else:
        plan = trainer.data.train_dataset.plan
        tokens = plan.efficiency(0) * options["max_length"]
    trainer.train()
    seconds = [end - begin for begin, end in zip(steps.ends[WARM_UP - 1 :], steps.ends[WARM_UP:], strict=False)]
    return {"seconds": statistics.median(seconds), "tokens": tokens * options["batch"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps that are counted")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each trainer")
    parser.add_argument("--batch", type=int, default=2, help="packs of a step")
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of a pack")
    parser.add_argument("--attention", default="sdpa", help="attn_implementation of both")
    arguments = parser.parse_args()
    options = {name: value for name, value in vars(arguments).items() if name != "rounds"}
    best: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        model, chats = in_fresh_process(prepare, Path(name))[0]
        for number in range(arguments.rounds):
            for kind in KINDS:
                output = f"{name}/{KINDS.index(kind)}-{number}"
                made, memory = in_fresh_process(train, kind, model, chats, output, options)
                made["memory"] = memory.resident
                if kind not in best or made["seconds"] < best[kind]["seconds"]:
                    best[kind] = made
    report(best, options)


def report(best: dict[str, dict[str, float]], options: dict[str, Any]) -> None:
    theirs, ours = best["TRL"], best["ours"]
    rows = [
        [
            kind,
            f"{1 / made['seconds']:.2f}",
            f"{theirs['seconds'] / made['seconds']:.2f}",
            f"{made['tokens'] / made['seconds']:,.0f}",
            f"{made['tokens'] / options['batch'] / options['max_length']:.1%}",
            f"{made['memory'] / MIB:,.0f} MiB",
        ]
        for kind, made in best.items()
    ]
    columns = ["trainer", "steps/s", "to TRL's", "tokens/s", "packs are full to", "peak memory"]
    title = (
        f"A script of TRL, {options['batch']} packs of {options['max_length']} tokens a step, {options['attention']}"
    )
    print_table(title, columns, rows)
    faster, smaller = ours["seconds"] < theirs["seconds"], ours["memory"] <= theirs["memory"]
    print(f"more steps a second: {verdict(faster)}; no more memory: {verdict(smaller)}")


if __name__ == "__main__":
    main()
