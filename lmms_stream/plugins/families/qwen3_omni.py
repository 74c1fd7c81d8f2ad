"""Qwen3-Omni, its thinker: 13 positions and 13 tokens of sound a second; positions may be fractions.

If 13 times the seconds of a pair of frames is not a whole number, the model's positions along time are fractions; they
are float32 here, like in the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...processors.families.family import Layout
from ...versions.transformers import CUTS_SOUNDS_OF_QWEN3_OMNI, MIXES_CLIPS_OF_QWEN3_OMNI
from .omni import Omni

START, END = "<|vision_start|>", "<|vision_end|>"
AUDIO_START, AUDIO_END = "<|audio_start|>", "<|audio_end|>"
_BLOCK, _TOKENS_OF_BLOCK = 100, 13  # mel frames in a block, and the tokens of a block


class Qwen3Omni(Omni):
    """See Family."""

    name = "Qwen3-Omni"
    model_types = ("qwen3_omni_moe_thinker", "qwen3_omni_moe")
    processor_classes = ("Qwen3OmniMoeProcessor",)
    model_class = "Qwen3OmniMoeThinkerForConditionalGeneration"
    placeholders: ClassVar[Mapping[str, str]] = {
        "image": "<|image_pad|>", "video": "<|video_pad|>", "audio": "<|audio_pad|>",
    }  # fmt: skip
    surroundings = (START, END)
    media_tokens: ClassVar[tuple[str, ...]] = (*placeholders.values(), START, END, AUDIO_START, AUDIO_END)
    attentions = ("flash_attention_2", "sdpa_varlen", *(() if MIXES_CLIPS_OF_QWEN3_OMNI else ("sdpa", "eager")))
    image_defaults: ClassVar[Mapping[str, Any]] = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    video_defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        "fps": 2.0,
        "min_frames": 4,
        "max_frames": 768,
    }
    positions_per_second = 13
    position_type = np.float32
    sound_surroundings = (AUDIO_START, AUDIO_END)
    reads_all = not CUTS_SOUNDS_OF_QWEN3_OMNI
    fewest_samples = 201  # more than half of the window of a frame

    def num_tokens(self, frames: int) -> int:
        """See Omni. Three convolutions with stride 2 over each block."""
        blocks, rest = divmod(frames, _BLOCK)
        return blocks * _TOKENS_OF_BLOCK + halved(rest, 3)

    def prepare_model(self, model: Any) -> None:
        """See Family."""
        ShortClips(model.audio_tower, block=_BLOCK, convolutions=("conv2d1", "conv2d2"))

    def interleaved(self, times: NDArray[Any], num_sounds: int) -> tuple[tuple[str, int], ...]:
        """See Omni. Ordered by their times; at equal times, frames come first."""
        kinds = ["video"] * len(times) + ["audio"] * num_sounds
        order = np.argsort(np.concatenate([times, np.arange(num_sounds)]), kind="stable")
        return tuple((kind, len(list(run))) for kind, run in groupby(kinds[number] for number in order.tolist()))

    def around(self) -> tuple[NDArray[Any], Any]:
        """See Omni."""
        return np.arange(2, dtype=np.float32), np.float32(2)

    def num_frames(self, num_samples: int) -> int:
        """See Omni. A partial frame does not count."""
        return num_samples // self.clips.hop

    never_together: ClassVar[tuple[str, str]] = ("image", "video")  # in a row of transformers' code

    def in_sample(self, layouts: Sequence[Layout]) -> Sequence[Layout]:
        """See Family."""
        if {layout.kind for layout in layouts}.issuperset(self.never_together):
            raise DataError(
                "it holds images and videos, and transformers' Qwen3-Omni cannot read both in one row: leave one of "
                "the kinds out, or train another family on it"
            )
        return layouts

    def check_pack(self, inputs: Mapping[str, Any]) -> str | None:
        """See Family."""
        if self.kinds_of(inputs).issuperset(self.never_together):
            return (
                "holds images and videos, and transformers' Qwen3-Omni cannot read both in one row: keep samples with "
                "images and samples with videos in datasets of their own, and per_device_batch at 1"
            )
        return None


FAMILY = Qwen3Omni


# Clips of sound shorter than a block, read by Qwen3-Omni's convolutions like single clips.
#
# transformers pads the blocks of all clips of a call to the longest. The first convolution turns this padding into its
# bias, not zeros, and the second convolution reads the result. A clip shorter than a block would therefore be read
# differently next to a longer clip than alone. Here the positions after a clip are set to zero after each convolution,
# like the padding of the next convolution.


class ShortClips:
    """Hooks of one tower. block: mel frames in a block; convolutions: by name, all but the last."""

    def __init__(self, tower: Any, *, block: int, convolutions: tuple[str, ...]):
        self._block = block
        self._lengths: list[int] = []  # of each block of a call, padded like a single clip
        self._begun = [0] * len(convolutions)
        tower.register_forward_pre_hook(self._begin, with_kwargs=True)
        for depth, name in enumerate(convolutions):
            getattr(tower, name).register_forward_hook(partial(self._cut, depth))

    def _begin(self, tower: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        frames = (named["feature_lens"] if "feature_lens" in named else inputs[1]).tolist()
        self._lengths = [min(clip, self._block) for clip in frames for _ in range(-(-clip // self._block))]
        self._begun = [0] * len(self._begun)

    def _cut(self, depth: int, module: Any, inputs: Any, made: Any) -> Any:
        """Set the positions after each clip to zero. made: float[blocks, channels, bins, frames], of some of the
        blocks.
        """
        begun = self._begun[depth]
        self._begun[depth] += len(made)
        lengths = [halved(length, depth + 1) for length in self._lengths[begun : self._begun[depth]]]
        width = made.shape[-1]
        if min(lengths) >= width:
            return None
        is_behind = made.new_ones(width).cumsum(0)[None] > made.new_tensor(lengths)[:, None]
        return made.masked_fill(is_behind[:, None, None], 0)


def halved(length: int, times: int) -> int:
    """Frames after `times` convolutions with stride 2.

    >>> halved(31, 1), halved(31, 2), halved(100, 3)
    (16, 8, 13)
    """
    for _ in range(times):
        length = (length - 1) // 2 + 1
    return length
