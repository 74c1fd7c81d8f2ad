"""Qwen2.5-Omni, its thinker: 25 positions and 25 tokens of sound a second; released models read clips of at most
300 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .omni import Omni
from .qwen2_audio import num_tokens

START, END = "<|vision_bos|>", "<|vision_eos|>"
AUDIO_START, AUDIO_END = "<|audio_bos|>", "<|audio_eos|>"
_POSITIONS_OF_CHUNK = 50


class Qwen25Omni(Omni):
    """See Family."""

    name = "Qwen2.5-Omni"
    model_types = ("qwen2_5_omni_thinker", "qwen2_5_omni")
    processor_classes = ("Qwen2_5OmniProcessor",)
    model_class = "Qwen2_5OmniThinkerForConditionalGeneration"
    placeholders: ClassVar[Mapping[str, str]] = {"image": "<|IMAGE|>", "video": "<|VIDEO|>", "audio": "<|AUDIO|>"}
    surroundings = (START, END)
    media_tokens: ClassVar[tuple[str, ...]] = (*placeholders.values(), START, END, AUDIO_START, AUDIO_END)
    attentions = ("flash_attention_2", "sdpa_varlen", "sdpa", "eager")
    video_defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
        "fps": 2.0,
        "min_frames": 4,
        "max_frames": 768,
    }
    positions_per_second = 25
    pads_clips = True
    fewest_samples = 321  # three frames become a token
    sound_surroundings = (AUDIO_START, AUDIO_END)

    def num_tokens(self, frames: int) -> int:
        """See Omni."""
        return num_tokens(frames)

    def interleaved(self, times: NDArray[Any], num_sounds: int) -> tuple[tuple[str, int], ...]:
        """See Omni. Two seconds of frames, then two of sound, repeated."""
        frames, sounds = (_chunks(each) for each in (times, np.arange(num_sounds)))
        runs = []
        for number in range(max(len(frames), len(sounds))):
            runs += [
                (kind, each[number]) for kind, each in (("video", frames), ("audio", sounds)) if number < len(each)
            ]
        return tuple(runs)

    def around(self) -> tuple[NDArray[Any], Any]:
        """See Omni. The two tokens have one position."""
        return np.zeros(2, np.int64), 1

    def num_frames(self, num_samples: int) -> int:
        """See Omni. A partial frame counts."""
        return -(-num_samples // self.clips.hop)


def _chunks(times: NDArray[Any]) -> list[int]:
    """Count ascending times in each interval of two seconds; like the model's code, with at most one new interval per
    time.
    """
    chunk, first, counts = 1, 0, []
    for number, time in enumerate(times.tolist()):
        if time >= chunk * _POSITIONS_OF_CHUNK:
            counts.append(number - first)
            first = number
            chunk += 1
    return [*counts, len(times) - first]


FAMILY = Qwen25Omni
