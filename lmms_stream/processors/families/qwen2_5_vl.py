"""Qwen2.5-VL: like Qwen2-VL, but positions along time count seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...versions.transformers import CUTS_SECONDS_OF_FRAMES
from .files import ProcessorFiles
from .qwen_vl import Qwen2VL
from .vision import Section

_RELEASED = 2  # tokens a second of the released models
_UNSAID = 4  # default of a config


@dataclass(frozen=True, kw_only=True)
class Qwen25VL(Qwen2VL):
    """See Family. tokens_per_second: advance of the positions along time per second."""

    tokens_per_second: int = _RELEASED

    name = "Qwen2.5-VL"
    model_types = ("qwen2_5_vl",)
    processor_classes = ("Qwen2_5_VLProcessor",)

    @classmethod
    def further(cls, files: ProcessorFiles) -> Mapping[str, Any]:
        """See QwenVL."""
        tower = files.config.get("vision_config")
        return {} if tower is None else {"tokens_per_second": tower.get("tokens_per_second", _UNSAID)}

    def steps(self, section: Section, num_frames: int) -> float:
        """See FramesOfTheirOwn. Uses the float32 arithmetic of the installed model's own code."""
        seconds = self.videos.temporal_patch_size * section.seconds / num_frames
        if CUTS_SECONDS_OF_FRAMES:
            return int(seconds) * self.tokens_per_second
        return float(np.float32(self.tokens_per_second) * np.float32(seconds))

    def model_settings(self) -> dict[str, Any]:
        """See QwenVL."""
        return {**super().model_settings(), "vision_config.tokens_per_second": self.tokens_per_second}


FAMILY = Qwen25VL
