"""A tiny model of texts and images in blocks, and conversations of all kinds for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples.bagel.model import BagelConfig, BagelModel
from lmms_stream.processors.bagel import BagelProcessor
from lmms_stream.processors.bagel_images import BagelSettings
from streaming import MDSWriter

from tests.processors.tiny_vlm import picture, save_tokenizer, stored

SETTINGS: dict[str, dict[str, Any]] = {
    "vae": {"stride": 4, "min_side": 8, "max_side": 16, "positions": 4},
    "vit": {"stride": 4, "min_side": 8, "max_side": 12, "positions": 3},
}
WORDS = ("see", "a chart", "What is this?", "yes", "42, é!", "bars of three")


def build_model(seed: int = 0) -> BagelModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BagelModel(
            BagelConfig(
                hidden_size=32, intermediate_size=32, patch_values=48, num_patch_positions=9, latent_size=48,
                num_latent_positions=16,
            )
        )  # fmt: skip


def save_words(folder: Path) -> Path:
    """The tokenizer, in a folder."""
    save_tokenizer(folder).save_pretrained(folder)
    return folder


def build_processor(folder: Path, **settings: Any) -> BagelProcessor:
    sections = {name: values | settings.pop(name, {}) for name, values in SETTINGS.items()}
    return BagelProcessor.from_pretrained(str(folder), BagelSettings(**sections, **settings))


def conversation(number: int) -> dict[str, Any]:
    """A sample as it is stored: one of five kinds in turn: of text, with an image to see, to make, to make by another,
    and of all of them.
    """
    return stored(*_turns(number))


def _turns(number: int) -> list[tuple[str, Any]]:
    rng = np.random.default_rng(number)

    def words() -> str:
        return " ".join(str(word) for word in rng.choice(WORDS, int(rng.integers(1, 4))))

    def image() -> tuple[str, bytes]:
        width, height = (int(side) for side in rng.integers(6, 40, 2))
        return "image", picture(width, height, seed=number)

    ask: list[Any] = [words()]
    turns: list[list[tuple[str, Any]]] = [
        [("user", ask), ("assistant", words())],
        [("user", [image(), *ask]), ("assistant", words())],
        [("user", ask), ("assistant", [image()])],
        [("user", [*ask, image()]), ("assistant", [words(), image()])],
        [("user", [image()]), ("assistant", [words(), image(), words()]), ("user", [image(), *ask]),
         ("assistant", [image(), words()])],
    ]  # fmt: skip
    return turns[number % len(turns)]


def write_rows(folder: Path, num_rows: int) -> Path:
    """The same as rows of LMMS Engine, with images in files."""
    folder.mkdir(parents=True)
    rows = []
    for number in range(num_rows):
        messages = []
        for turn, (role, content) in enumerate(_turns(number)):
            parts: list[dict[str, Any]] = []
            for part, each in enumerate([content] if isinstance(content, str) else content):
                if isinstance(each, str):
                    parts.append({"type": "text", "text": each})
                    continue
                name = f"{number}-{turn}-{part}.png"
                (folder / name).write_bytes(each[1])
                parts.append({"type": "image_url", "image_url": {"url": name}})
            messages.append({"role": role, "content": parts})
        rows.append(json.dumps({"messages": messages, "id": str(number)}) + "\n")
    (folder / "rows.jsonl").write_text("".join(rows))
    return folder / "rows.jsonl"


def dataset_of(folder: Path, dataset_type: str, **given: Any) -> dict[str, Any]:
    """A DatasetConfig of the rows and the tokenizer in a folder."""
    extra = {name: values | {"dropout": 0.2} for name, values in SETTINGS.items()} | {"text_dropout": 0.2}
    return {
        "dataset_type": dataset_type,
        "dataset_format": "jsonl",
        "dataset_path": str(folder / "rows" / "rows.jsonl"),
        "processor_config": {
            "processor_name": str(folder / "words"), "processor_type": "bagel", "extra_kwargs": extra,
        },
        "packing": True,
        "packing_length": 160,
        **given,
    }  # fmt: skip


def write_conversations(folder: Path, num_samples: int) -> Path:
    """A plain MDS dataset of them."""
    with MDSWriter(columns={"messages": "str", "media": "bytes"}, out=str(folder), hashes=["xxh3_64"]) as writer:
        for number in range(num_samples):
            writer.write(conversation(number))
    return folder
