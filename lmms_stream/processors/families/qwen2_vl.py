"""Qwen2-VL: two frames a second, and a pair of frames is a step of time, however far apart they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .qwen_vl import FramesOfTheirOwn


class Qwen2VL(FramesOfTheirOwn):
    """See Family."""

    name = "Qwen2-VL"
    model_types = ("qwen2_vl",)
    processor_classes = ("Qwen2VLProcessor",)
    video_defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
        "fps": 2.0,
        "min_frames": 4,
        "max_frames": 768,
    }


FAMILY = Qwen2VL
