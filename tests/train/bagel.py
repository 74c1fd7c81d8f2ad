"""A tiny model of texts and images in blocks, and conversations of all kinds for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples.bagel.model import BagelConfig, BagelModel
from lmms_stream.processors.bagel import BagelProcessor
from lmms_stream.processors.bagel_images import BagelSettings
from streaming import MDSWriter

from tests.processors.tiny_vlm import picture, save_tokenizer, stored

SETTINGS = BagelSettings(
    vae_stride=4, vae_min_side=8, vae_max_side=16, vae_positions=4, vit_stride=4, vit_min_side=8, vit_max_side=12,
    vit_positions=3,
)  # fmt: skip
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
    return BagelProcessor.from_pretrained(str(folder), BagelSettings(**{**_values(SETTINGS), **settings}))


def conversation(number: int) -> dict[str, Any]:
    """One of five kinds in turn: of text, with an image to see, to make, to make by another, and of all of them."""
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
    return stored(*turns[number % len(turns)])


def write_conversations(folder: Path, num_samples: int) -> Path:
    """A plain MDS dataset of them."""
    with MDSWriter(columns={"messages": "str", "media": "bytes"}, out=str(folder), hashes=["xxh3_64"]) as writer:
        for number in range(num_samples):
            writer.write(conversation(number))
    return folder


def _values(settings: BagelSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in BagelSettings.__slots__}
