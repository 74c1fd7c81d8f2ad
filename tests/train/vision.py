"""Tiny models of the Qwen-VL families, samples with media for them, and what plain transformers makes of a sample."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from lmms_stream.processors.families.qwen_vl import QwenVL
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.model.towers import model_inputs
from lmms_stream.types import Batch, Processed, Sample
from numpy.typing import NDArray

from tests.versions import IS_5

VOCABULARY = 131
IDS = {"image": 1, "video": 2, "vision_start": 3, "vision_end": 4}
FIRST_PLAIN = 5
PATCH = 4
PATCH_VALUES = 3 * 2 * PATCH**2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
_AXES = {"mrope_section": [1, 1, 2]}
_PIXELS = {"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2}
_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "depth": 3, "hidden_size": 16, "intermediate_size": 40, "out_hidden_size": 32, "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "depth": 3, "hidden_size": 16, "intermediate_size": 40, "out_hidden_size": 32, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}  # fmt: skip
MODEL_TYPES = tuple(_TOWERS)
Part = int | tuple[str, tuple[int, int, int]]  # a number of text tokens, or a medium: its kind and its grid of patches


def model_config(model_type: str) -> dict[str, Any]:
    """What a transformers config takes."""
    rotary = {"type": "mrope", **_AXES} if model_type != "qwen3_vl" else {"rope_type": "default", **_AXES}
    head = {"head_dim": 8} if model_type == "qwen3_vl" else {}
    return {
        "model_type": model_type,
        "text_config": {**SIZES, **head, "rope_scaling": rotary},
        "vision_config": {**_PIXELS, **_TOWERS[model_type]},
        **{f"{name}_token_id": number for name, number in IDS.items()},
    }


def build(model_type: str, *, attention: Any = "auto") -> Any:
    return ModelConfig(config=model_config(model_type), attention=attention, seed=3).build()


def packed_model(model_type: str, attention: Any = "auto") -> PackedModel:
    family: Any = Family(model_type)
    return PackedModel(build(model_type, attention=attention), family)


class Family:
    """As those of lmms_stream, but of tiny models."""

    num_axes = 3
    tower = "visual"
    attentions: tuple[str, ...] = ("flash_attention_2", "flex_attention", "sdpa_varlen", "sdpa", "eager")
    pieces = staticmethod(QwenVL.pieces)

    def __init__(self, *model_types: str):
        self.model_types = model_types

    def dummy(self) -> Mapping[str, Mapping[str, NDArray[Any]]]:
        smallest, grid = np.zeros((4, PATCH_VALUES), np.float32), np.array([[1, 2, 2]])
        return {
            "image": {"pixel_values": smallest, "image_grid_thw": grid},
            "video": {"pixel_values_videos": smallest, "video_grid_thw": grid},
        }

    def check_model(self, config: Mapping[str, Any]) -> None:
        assert config["image_token_id"] == IDS["image"]

    def kinds_of(self, inputs: Container[str]) -> set[str]:
        names = {"image": "pixel_values", "video": "pixel_values_videos"}
        return {kind for kind, name in names.items() if name in inputs}


def sample_of(model: Any, parts: Sequence[Part], rng: np.random.Generator) -> Processed:
    """Random text and media; positions are transformers' own."""
    ids: list[int] = []
    media: dict[str, list[NDArray[Any]]] = {}
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(FIRST_PLAIN, VOCABULARY, part).tolist()
            continue
        kind, grid = part
        ids += _tokens_of(model.config.model_type, kind, grid)
        suffix = "_videos" if kind == "video" else ""
        values = rng.standard_normal((int(np.prod(grid)), PATCH_VALUES)).astype(np.float32)
        media.setdefault(f"pixel_values{suffix}", []).append(values)
        media.setdefault(f"{kind}_grid_thw", []).append(np.array([grid]))
    joined = {name: np.concatenate(arrays) for name, arrays in media.items()}
    tokens = np.array(ids)
    grids = {name: torch.from_numpy(value) for name, value in joined.items() if name.endswith("_grid_thw")}
    if IS_5:
        grids["mm_token_type_ids"] = torch.from_numpy((tokens == IDS["image"]) + 2 * (tokens == IDS["video"]))[None]
    positions, _ = model.model.get_rope_index(torch.from_numpy(tokens)[None], **grids)
    learnt = (tokens >= FIRST_PLAIN) & (rng.random(len(tokens)) < 0.7)
    return {
        "input_ids": tokens,
        "labels": np.where(learnt, tokens, -100),
        "position_ids": positions[:, 0].numpy(),
        "media": joined,
    }


def _tokens_of(model_type: str, kind: str, grid: tuple[int, int, int]) -> list[int]:
    frames, rows, columns = grid
    of_frame = [IDS[kind]] * (rows * columns // 4)
    if model_type == "qwen3_vl" and kind == "video":  # each frame stands by itself, after the text of its time
        return [10, 11, IDS["vision_start"], *of_frame, IDS["vision_end"]] * frames
    return [IDS["vision_start"], *of_frame * frames, IDS["vision_end"]]


IMAGES: list[Part] = [3, ("image", (1, 4, 6)), 5, ("image", (1, 2, 4)), 9]
VIDEO: list[Part] = [4, ("video", (3, 4, 2)), 12]
BOTH: list[Part] = [2, ("video", (2, 6, 4)), 3, ("image", (1, 6, 6)), 7]
# An image of 48 tokens, and a video of 28: more than a rank has of a pack of 128 tokens on four ranks.
LARGE: list[Part] = [5, ("image", (1, 12, 16)), 4, ("video", (7, 4, 4)), 3]
TEXT: list[Part] = [23]
KINDS: dict[str, list[list[Part]]] = {
    "media": [IMAGES, BOTH, VIDEO],
    "images": [IMAGES, IMAGES],
    "video": [VIDEO],
    "text": [TEXT, [9], [4]],
    "mixed": [TEXT, VIDEO, [5], IMAGES, BOTH, [11]],
}


def samples_of(model: Any, kind: str, *, seed: int = 0) -> list[Processed]:
    rng = np.random.default_rng(seed)
    return [sample_of(model, parts, rng) for parts in KINDS[kind]]


def source_of(model: Any, source: str) -> list[Processed]:
    """Samples of a source that holds media of one kind, or text alone."""
    of_source: dict[str, list[list[Part]]] = {
        "images": [IMAGES], "video": [VIDEO], "text": [TEXT, [37]], "both": [BOTH, TEXT], "large": [LARGE, BOTH]
    }  # fmt: skip
    parts = of_source[source]
    rng = np.random.default_rng(len(source))
    return [sample_of(model, parts[number % len(parts)], rng) for number in range(12)]


class Processor:
    """Gives the samples whose tokens a dataset holds."""

    columns, schema = TokensProcessor.columns, TokensProcessor.schema
    description = TokensProcessor().description

    def __init__(self, model: Any, source: str):
        self.made = {sample["input_ids"].tobytes(): sample for sample in source_of(model, source)}
        self.family = Family(model.config.model_type)

    def measure(self, sample: Sample) -> int:
        return len(sample["input_ids"])

    def process(self, sample: Sample) -> Processed:
        return self.made[sample["input_ids"].astype(np.int64).tobytes()]


def plain_inputs(sample: Processed, *, model: Any, family: Any = None) -> dict[str, Any]:
    """What users of transformers give a model for a sample; family: that of its processor."""
    ids = torch.from_numpy(sample["input_ids"])[None]
    media = {name: torch.from_numpy(value) for name, value in sample.get("media", {}).items()}
    inputs = {name: torch.from_numpy(value)[None] for name, value in sample.get("token_inputs", {}).items()}
    if "position_ids" in sample:
        inputs["position_ids"] = torch.from_numpy(sample["position_ids"])[:, None]
    inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {**inputs, "use_cache": False, **model_inputs(family, model, media)}


def plain_logits(model: Any, sample: Processed, *, family: Any = None) -> torch.Tensor:
    """What transformers gives for one sample, without packing: float[T, V]."""
    logits: torch.Tensor = model(**plain_inputs(sample, model=model, family=family)).logits
    return logits[0] if logits.dtype == torch.float64 else logits[0].float()


def losses_of(logits: torch.Tensor, sample: Processed) -> torch.Tensor:
    """The sum of the losses of a sample, by its logits."""
    labels = torch.from_numpy(np.asarray(sample["labels"]))[1:]
    return torch.nn.functional.cross_entropy(logits[:-1], labels, ignore_index=-100, reduction="sum")


def plain_losses(model: Any, sample: Processed, *, family: Any = None) -> torch.Tensor:
    """The same without packing."""
    return losses_of(plain_logits(model, sample, family=family), sample)


def rows_of(batch: Batch) -> list[slice]:
    bounds = batch.cu_seqlens.tolist()
    return [slice(*pair) for pair in pairwise(bounds)]
