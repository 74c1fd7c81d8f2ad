"""Tiny models of the families that read tiles, samples for them, and what plain transformers makes of a sample."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.model import PackedModel
from lmms_stream.types import Processed

from tests.processors.tile_vlm import TINY, save_tile_processor, tile_config
from tests.processors.tiny_vlm import film, picture, stored

from . import vision


@lru_cache
def processor_of(name: str) -> MultimodalProcessor:
    folder = Path(mkdtemp()) / name
    save_tile_processor(folder, name)
    return MultimodalProcessor.from_pretrained(str(folder), frame_num=2 if TINY[name].video else None)


@lru_cache
def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = tile_config(name, Path(processor_of(name).tokenizer.name)).to_dict()
    return config


def build(name: str, *, attention: Any = "sdpa", **changed: Any) -> Any:
    model = ModelConfig(config={**config_of(name), **changed}, attention=attention, seed=3).build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)  # so that what tokens see matters more than rounding
    return model


def packed_model(name: str, *, attention: Any = "sdpa", **changed: Any) -> PackedModel:
    packed = PackedModel(build(name, attention=attention, **changed), processor_of(name).family)
    packed.logits_way = packed.logits_ways[0]
    return packed


@lru_cache
def samples_of(name: str, kind: str) -> list[Processed]:
    """kind: "media": images of several tiles, several images, a video, text alone; or one of these."""
    one, other = ("image", picture(40, 30)), ("image", picture(90, 30, seed=1))
    chats: dict[str, list[list[Any]]] = {
        "image": [["see", other, "?"]],
        "images": [[one, "and", other, "?"]],
        "text": [["no image"]],
        "video": [["look", ("video", film(48, 32, num_frames=6)), "!"]] if TINY[name].video else [],
    }
    chats["media"] = [*chats["images"], *chats["text"], *chats["video"], *chats["image"]]
    process = processor_of(name).process
    return [process(stored(("user", content), ("assistant", "it is so"))) for content in chats[kind]]


@lru_cache
def source_of(name: str, source: str) -> list[Processed]:
    """Samples of a source that holds media of one kind, or text alone."""
    video = film(48, 32, num_frames=6)
    made = []
    for number in range(12):
        several = [("image", picture(20 + 6 * number, 40, seed=each)) for each in range(2)]
        contents: dict[str, list[Any]] = {
            "image": several[:1], "images": [*several], "video": [("video", video)], "text": ["no image"],
            "both": [*several[:1], ("video", video)],
        }  # fmt: skip
        content = contents[source]
        made.append(processor_of(name).process(stored(("user", [f"{number}", *content]), ("assistant", "it is so"))))
    return made


class Processor(vision.Processor):
    """Gives the samples whose tokens a dataset holds."""

    def __init__(self, name: str, source: str):
        self.made = {sample["input_ids"].tobytes(): sample for sample in source_of(name, source)}
        self.family: Any = processor_of(name).family
