"""Tiny models of the families that read sound, with their processors, and samples for them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.model.towers import family_of
from lmms_stream.types import Processed

from tests.processors.tiny_sound import clip, save_sound_processor, sound_config, sounding_film
from tests.processors.tiny_vlm import film, picture, stored

from . import vision

SETTINGS: dict[str, Any] = {"video_max_pixels": 16 * 28 * 28, "video_min_pixels": 4 * 28 * 28}
# Sources of samples: of one kind of media each, of several kinds in a sample, and of text alone.
KINDS = {
    "qwen2_audio": ("sound", "text"),
    "qwen2_5_omni": ("sound", "image", "video", "heard", "several", "text"),
    "qwen3_omni": ("sound", "image", "video", "heard", "several", "text"),
}


class Tiny:
    """A tiny model of a family with its processor."""

    def __init__(self, family: str, folder: Path):
        save_sound_processor(folder, family)
        self.family, self.folder = family, folder
        settings = {} if family == "qwen2_audio" else SETTINGS
        self.processor = MultimodalProcessor.from_pretrained(str(folder), **settings)
        if family != "qwen2_audio":
            settings = {**SETTINGS, "use_audio_in_video": True}
            self.hearing = MultimodalProcessor.from_pretrained(str(folder), **settings)
        self.config = sound_config(family, folder)

    def build(self, attention: Any = "auto") -> Any:
        return ModelConfig(config=self.config, attention=attention, seed=3).build()

    def plain(self) -> Any:
        """A model that plain transformers is exact in: its sdpa mixes the clips of Qwen3-Omni."""
        return self.build("sdpa" if self.family != "qwen3_omni" else "eager")

    def packed(self, attention: Any = "auto") -> PackedModel:
        model = self.build(attention)
        packed = PackedModel(model, family_of([self.processor], model.config))
        packed.model.config.get_text_config()
        return packed

    def sample(self, *parts: Any) -> Processed:
        return self.processor.process(stored(("user", list(parts)), ("assistant", "It is a tone of 42, said twice.")))

    def kinds(self) -> dict[str, list[Processed]]:
        """Samples of each mixture of media that a pack may hold."""
        short, long = ("audio", clip(5000, hertz=300)), ("audio", clip(41234, hertz=900, seed=1))
        # Plain transformers mixes the clips of a sample in Qwen3-Omni, as it mixes those of a pack.
        two = ["a"] if self.family == "qwen3_omni" else [short, "a"]
        sounds = [self.sample(*two, long), self.sample("no sound"), self.sample("b", ("audio", clip(20000)))]
        if self.family == "qwen2_audio":
            return {"sounds": sounds}
        image, video = ("image", picture(90, 60)), ("video", film(64, 64, num_frames=9))
        images = [self.sample(image, long), sounds[0], self.sample(image, "?", image, short)]
        videos = [self.sample(short, video, "?"), sounds[1], self.sample(video, long)]
        both = [self.sample(image, video, short)] if self.family == "qwen2_5_omni" else []
        made = {"sounds": sounds, "images": images, "videos": videos, "heard": [self.heard(), sounds[1], self.heard(9)]}
        return made | ({"both": both + sounds} if both else {})

    def heard(self, number: int = 0) -> Processed:
        """A video with its sound among its frames, which ends before they do."""
        video = sounding_film(num_frames=20, fps=5, samples=20000 + 3000 * number)
        return self.hearing.process(stored(("user", [f"{number}: ", ("video", video)]), ("assistant", "It is said.")))

    def of(self, source: str, number: int) -> Processed:
        """The sample of a number in a source that is one of KINDS."""
        if source == "heard":
            return self.heard(number)
        sound, image = ("audio", clip(4000 + 2500 * number, seed=number)), ("image", picture(60 + 4 * number, 60))
        video = ("video", film(64, 64, num_frames=9))
        other = [image, video] if self.family == "qwen2_5_omni" else [image]  # Qwen3-Omni reads not both in one sample
        parts = {"sound": [sound], "image": [image], "video": [video], "several": [sound, *other], "text": []}
        return self.sample(f"{number}: ", *parts[source])


@lru_cache
def tiny_of(family: str) -> Tiny:
    return Tiny(family, Path(mkdtemp()) / family)


@lru_cache
def source_of(family: str, source: str) -> list[Processed]:
    return [tiny_of(family).of(source, number) for number in range(12)]


class Processor(vision.Processor):
    """Gives the samples whose tokens a dataset holds."""

    def __init__(self, family: str, source: str):
        self.made = {
            np.asarray(sample["input_ids"], np.int64).tobytes(): sample for sample in source_of(family, source)
        }
        self.family: Any = tiny_of(family).processor.family
