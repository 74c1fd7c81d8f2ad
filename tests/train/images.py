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

from .runs import train_settings

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
        "train": train_settings(path, global_batch=4) | train,
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


def write_rows(path: Path, *, num_rows: int) -> Path:
    """Rows of JSON: the paths of images that are written beside it, and labels, of which every fifth is missing."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for number in range(num_rows):
            width, height = rng.integers(6, 30, 2).tolist()
            (path.parent / f"{number}.png").write_bytes(encoded(width, height, rng))
            label = {} if number % 5 == 4 else {"label": number % NUM_CLASSES}
            file.write(json.dumps({"image": f"{number}.png", **label}) + "\n")
    return path


def save_encoder(folder: Path, kind: str = "siglip") -> Path:
    """A vision encoder whose images have SIZE pixels and 16 patches."""
    import transformers

    sizes: dict[str, Any] = {
        "image_size": SIZE, "patch_size": 2, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    made: Any
    if kind == "siglip":
        made = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes, intermediate_size=32))
    else:
        made = transformers.Dinov2Model(transformers.Dinov2Config(**sizes, mlp_ratio=2))
    made.save_pretrained(folder)
    return folder


def write_typed_run(folder: Path, dataset_type: str) -> Path:
    """The config of a run on rows of images by their dataset_type, in packs of 3; that of a rae has no model."""
    rows = write_rows(folder / "rows.jsonl", num_rows=50)
    kind = dataset_type.removesuffix("_iterable")
    processor_type = {"sit": "sit", "rae": "rae_siglip"}[kind]
    dataset: dict[str, Any] = {
        "dataset_type": dataset_type, "dataset_format": "jsonl", "dataset_path": str(rows), "packing": True,
        "packing_length": 3, "cache_dir": str(folder / "cache"), "num_canonical_nodes": 4,
        "processor_config": {"processor_type": processor_type, "extra_kwargs": {"image_size": SIZE, "flip": True}},
    }  # fmt: skip
    train = {
        "output_dir": str(folder / "default"), "global_batch": 4, "per_device_batch": 2, "learning_rate": 1e-3,
        "max_steps": 6, "save_steps": 1, "num_workers": 1, "timeout_s": 60, "log_sample_ids": True, "ema_decay": 0.9,
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    settings: dict[str, Any] = {"dataset": dataset, "train": train}
    if kind == "sit":
        settings["model"] = {"config": DIT | {"sample_size": SIZE // 2}}
        settings["task"] = {"type": "flow_matching", "vae": str(save_vae(folder / "vae"))}
    else:
        save_encoder(folder / "encoder")
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


class TinyDecoder(torch.nn.Module):
    """Tokens of 16 patches -> images."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.write = torch.nn.Linear(16, 3 * 4)
        self.join = torch.nn.Sequential(torch.nn.PixelShuffle(2), torch.nn.Upsample((size, size)))
        self.look = torch.nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        grid = self.write(tokens).transpose(1, 2).unflatten(2, (4, 4))
        made: torch.Tensor = self.look(self.join(grid))
        return made


def adversary() -> Any:
    from lmms_stream.plugins.tasks.reconstruction import Adversary

    torch.manual_seed(0)
    judge = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, 2, 1), torch.nn.LeakyReLU(0.2), torch.nn.Conv2d(4, 1, 3))
    return Adversary(TinyDecoder(), judge)
