"""What the tests of habits share: rows in TRL's forms, a tiny model's sizes, resolving without a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from lmms_stream.doors.huggingface.arguments import TrainerInputs
from lmms_stream.doors.huggingface.resolve import resolve
from lmms_stream.mds.core import PackedDataset
from lmms_stream.train.inputs import RunInputs
from lmms_stream.types import World
from trl import SFTConfig

SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
WORDS = ("shards", "packs", "a cursor", "an epoch", "lengths", "a plan", "of tokens")
CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if tools %}<|system|>{{ tools | length }} tools<|end|>{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
THINKING = CHATML.replace(
    "{% if add_generation_prompt %}<|assistant|>\n", "{% if add_generation_prompt %}<|assistant|>\n<think>"
)


def config(folder: Path, **options: Any) -> SFTConfig:
    """An SFTConfig on the CPU, which tells nobody."""
    return SFTConfig(str(folder), **{"use_cpu": True, "bf16": False, "report_to": "none", **options})


def world_of(timeout_s: float, *, replication: int) -> World:
    return World()


def resolved(**given: Any) -> RunInputs:
    return resolve(TrainerInputs(**given), world_of)


def tokens_of(dataset: PackedDataset) -> list[tuple[list[int], list[int]]]:
    """input_ids and labels of all samples in stored order."""
    processor = dataset.processor
    assert processor is not None
    made = [processor.process(sample) for sample in dataset.read(np.arange(dataset.num_samples))]
    return [(each["input_ids"].tolist(), each["labels"].tolist()) for each in made]


def answer(number: int) -> str:
    return " ".join(WORDS[(number + each) % len(WORDS)] for each in range(1 + number * 5 % 9))


def chats(count: int = 12) -> Dataset:
    return Dataset.from_list([{"messages": [*question(number), reply(number)]} for number in range(count)])


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"what is {WORDS[number % len(WORDS)]}?"}]


def reply(number: int) -> dict[str, str]:
    return {"role": "assistant", "content": answer(number)}


def texts(count: int = 12, column: str = "text") -> Dataset:
    return Dataset.from_list([{column: answer(number) + "<|end|>" * (number % 2)} for number in range(count)])


def prompts(count: int = 12) -> Dataset:
    return Dataset.from_list(
        [{"prompt": f"{WORDS[number % 7]} is ", "completion": answer(number)} for number in range(count)]
    )


def chat_prompts(count: int = 12) -> Dataset:
    return Dataset.from_list([{"prompt": question(number), "completion": [reply(number)]} for number in range(count)])


def turns(count: int = 12) -> Dataset:
    return Dataset.from_list(
        [
            {"conversations": [{"from": "user", "value": "what?"}, {"from": "assistant", "value": answer(number)}]}
            for number in range(count)
        ]
    )


def tokens(count: int = 12, **masks: Any) -> Dataset:
    rows = []
    for number in range(count):
        ids = [10 + number] * (4 + number)
        rows.append({"input_ids": ids, **{name: mask(ids) for name, mask in masks.items()}})
    return Dataset.from_list(rows)


def tools() -> Dataset:
    import json

    tool = json.dumps([{"type": "function", "function": {"name": "f"}}])
    return Dataset.from_list([{"messages": [*question(number), reply(number)], "tools": tool} for number in range(4)])
