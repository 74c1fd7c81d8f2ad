"""Train a small model to say what is on a drawing, and to draw what it is told.

    torchrun --nproc-per-node 2 examples/bagel/train.py FOLDER --steps 400

Drawings, rows and a tokenizer are written to the folder, and the run's log and checkpoints to FOLDER/run. The rows are
those of LMMS Engine's `bagel_iterable`, the model is that of model.py beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lmms_stream import FSDP2SFTTrainer, TrainConfig
from lmms_stream.datasets import DatasetConfig, MultiModalDataset
from PIL import Image, ImageDraw

if __package__:
    from .model import BagelConfig, BagelModel
else:
    from model import BagelConfig, BagelModel

SIDE = 32  # pixels of a drawing
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "black": (20, 20, 20)}
SHAPES = ("circle", "square", "triangle", "cross")
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SETTINGS = {
    "vae": {"stride": 4, "min_side": SIDE, "max_side": SIDE, "positions": SIDE // 4},
    "vit": {"stride": 8, "min_side": SIDE, "max_side": SIDE, "positions": SIDE // 8},
    "text_dropout": 0.1,
}


def drawing(colour: str, shape: str, rng: np.random.Generator) -> Image.Image:
    image = Image.new("RGB", (SIDE, SIDE), "white")
    pen, fill = ImageDraw.Draw(image), COLOURS[colour]
    half = int(rng.integers(7, 12))
    x, y = (int(at) for at in rng.integers(half + 2, SIDE - half - 2, 2))
    box = (x - half, y - half, x + half, y + half)
    if shape == "circle":
        pen.ellipse(box, fill=fill)
    elif shape == "square":
        pen.rectangle(box, fill=fill)
    elif shape == "triangle":
        pen.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], fill=fill)
    else:
        pen.line([(x - half, y), (x + half, y)], fill=fill, width=5)
        pen.line([(x, y - half), (x, y + half)], fill=fill, width=5)
    return image


def write_rows(path: Path, num_rows: int, *, seed: int) -> None:
    """Every other row asks what is on a drawing; the others ask for one, every fourth of them in another colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng, rows = np.random.default_rng(seed), []

    def part(colour: str, shape: str, name: str) -> dict[str, Any]:
        drawing(colour, shape, rng).save(path.parent / name)
        return {"type": "image_url", "image_url": {"url": name}}

    for number in range(num_rows):
        colour, other = (str(each) for each in rng.choice([*COLOURS], 2, replace=False))
        shape = str(rng.choice(SHAPES))
        shown = part(colour, shape, f"{path.stem}-{number}.png")
        if number % 2:
            ask, answer = [shown, _text("What is it?")], _text(f"A {colour} {shape}.")
        elif number % 8:
            ask, answer = [_text(f"Draw a {colour} {shape}.")], shown
        else:
            ask, answer = [shown, _text(f"Draw it {other}.")], part(other, shape, f"{path.stem}-{number}-new.png")
        messages = [{"role": "user", "content": ask}, {"role": "assistant", "content": [answer]}]
        rows.append(json.dumps({"messages": messages, "id": str(number)}) + "\n")
    path.write_text("".join(rows), encoding="utf-8")


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def write_tokenizer(folder: Path) -> None:
    """A token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", *SPECIAL, *["What", "is", "it", "?", "A", "Draw", "a", ".", "Draw"], *COLOURS, *SHAPES]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(dict.fromkeys(words))}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", additional_special_tokens=SPECIAL
    ).save_pretrained(folder)


def dataset_of(folder: Path, name: str) -> MultiModalDataset:
    return MultiModalDataset(
        DatasetConfig(
            dataset_type="bagel",
            dataset_format="jsonl",
            dataset_path=str(folder / f"{name}.jsonl"),
            processor_config={
                "processor_name": str(folder / "tokenizer"), "processor_type": "bagel", "extra_kwargs": SETTINGS,
            },
            packing=True,
            packing_strategy="best_fit",
            packing_length=512,
            cache_dir=str(folder / "shards"),
            reshuffle=True,
        )
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows", type=int, default=4000)
    options = parser.parse_args()
    folder: Path = options.folder
    if int(os.environ.get("RANK", "0")) == 0 and not (folder / "validation.jsonl").exists():
        write_tokenizer(folder / "tokenizer")
        write_rows(folder / "train.jsonl", options.rows, seed=0)
        write_rows(folder / "validation.jsonl", 200, seed=1)
    args = TrainConfig(
        output_dir=str(folder / "run"),
        global_batch=2,
        max_steps=options.steps,
        learning_rate=2e-3,
        warmup=0.05,
        num_workers=0,
        logging_steps=10,
        eval_steps=options.steps,
        save_steps=options.steps,
    )
    if "RANK" in os.environ:
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        torch.distributed.barrier()  # rank 0 has written the rows
    torch.manual_seed(0)
    sides = {"num_patch_positions": (SIDE // 8) ** 2, "num_latent_positions": (SIDE // 4) ** 2}
    config = BagelConfig(
        vocab_size=32, hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=3,
        patch_values=8 * 8 * 3, latent_size=4 * 4 * 3, **sides,
    )  # fmt: skip
    trainer = FSDP2SFTTrainer(BagelModel(config), args, dataset_of(folder, "train"), dataset_of(folder, "validation"))
    trainer.train()


if __name__ == "__main__":
    main()
