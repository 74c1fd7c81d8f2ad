"""Chats in files of each format, and what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from ..processors.tiny_vlm import picture

Row = dict[str, Any]


def rows(num_rows: int, *, seed: int = 0) -> list[Row]:
    """Chats of different lengths, each with its number in it."""
    rng = np.random.default_rng([seed])
    return [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": f"What is {number}?"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": "It is a number. " * int(rng.integers(1, 9))}],
                },
            ]
        }
        for number in range(num_rows)
    ]


def write_pictures(folder: Path, num_rows: int = 24) -> Path:
    """A Parquet file of chats about pictures that lie beside it in images/, some of text alone."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    made = rows(num_rows)
    for number, row in enumerate(made):
        if number % 4:
            name = f"images/{number}.png"
            (folder / name).write_bytes(picture(30 + 4 * number, 60, seed=number))
            row["messages"][0]["content"].insert(0, {"type": "image_url", "image_url": {"url": name}})
    messages = [{"messages": json.dumps(row["messages"])} for row in made]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(messages), folder / "pictures.parquet")
    return folder / "pictures.parquet"


def write_jsonl(path: Path, num_rows: int = 60) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(num_rows)))
    return path


def text_config(path: Path, tokenizer: Path, cache: Path, **changes: Any) -> dict[str, Any]:
    """As the quick start has it."""
    return {
        "dataset_type": "vision",
        "dataset_format": "jsonl",
        "dataset_path": str(path),
        "processor_config": {"processor_name": str(tokenizer), "processor_type": "qwen2"},
        "packing": True,
        "packing_length": 256,
        "cache_dir": str(cache),
    } | changes
