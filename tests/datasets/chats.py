"""Chats in files of each format, and what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

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
