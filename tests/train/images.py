"""Tiny datasets of images with labels, and tiny models that make them."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from streaming import MDSWriter

SIZE = 8
NUM_CLASSES = 4
DIT: dict[str, Any] = {
    "_class_name": "DiTTransformer2DModel", "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 3,
    "out_channels": 3, "num_layers": 2, "sample_size": SIZE, "patch_size": 2, "num_embeds_ada_norm": NUM_CLASSES,
    "norm_num_groups": 1,
}  # fmt: skip


def encoded(width: int, height: int, rng: np.random.Generator) -> bytes:
    buffer = BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def write_images(folder: Path, *, num_samples: int, seed: int = 0) -> None:
    """Samples of the schema "image", each of another size; every fifth has no label."""
    rng = np.random.default_rng(seed)
    with MDSWriter(columns={"image": "bytes", "facts": "str", "label": "int"}, out=str(folder)) as writer:
        for number in range(num_samples):
            width, height = rng.integers(6, 30, 2).tolist()
            facts = {"width": width, "height": height, "mime": "image/png"}
            label = -1 if number % 5 == 4 else number % NUM_CLASSES
            writer.write({"image": encoded(width, height, rng), "facts": json.dumps(facts), "label": label})


def write_image_run(path: Path, dataset: Path, *, task: dict[str, Any] | None = None, **train: Any) -> Path:
    settings = {
        "dataset": {
            "remote": str(dataset),
            "processor": {"type": "image", "image_size": SIZE},
            "packing_length": 4,
            "num_canonical_nodes": 4,
        },
        "model": {"config": DIT},
        "task": task or {},
        "train": {
            "output_dir": str(path.parent / "default"),
            "global_batch": 4,
            "learning_rate": 1e-3,
            "num_workers": 0,
            "timeout_s": 60,
            "log_sample_ids": True,
        }
        | train,
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def save_vae(folder: Path) -> Path:
    """An AutoencoderKL that halves the sides of images."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 8), layers_per_block=1, latent_channels=3, norm_num_groups=2, sample_size=SIZE,
        scaling_factor=0.5, mid_block_add_attention=False,
    )  # fmt: skip
    vae.save_pretrained(folder)
    return folder
