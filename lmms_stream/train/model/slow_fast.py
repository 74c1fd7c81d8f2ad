"""LLaVA-OneVision with LLaVA-Video's slow and fast frames of videos: transformers' model, changed in place.

Each n-th frame is slow and has all pooled features; fast frames have a quarter. A trained vector ends each frame.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import interpolate
from transformers import LlavaOnevisionConfig
from transformers.models.llava_onevision import modeling_llava_onevision as theirs

from ...errors import ConfigError
from ...versions.transformers import ENDS_FEATURES_OF_LLAVA_VIDEOS

STRIDE = "faster_token_stride"  # LMMS Engine's field in a model's config: frames from a slow frame to the next
SLOW, FAST = 2, 4  # features of a side, pooled into a single feature


class LlavaOnevisionModel(theirs.LlavaOnevisionModel):  # transformers finds rules for weights by the class name
    """Base model, which reads media. faster_token: float[H], behind the features of each frame."""

    faster_token: nn.Parameter

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: transformers then applies rules for weights in files to this class."""
        return False

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise faster_token if no file holds values; transformers calls this method for each module."""
        if module is not self:
            super()._init_weights(module)
        elif not getattr(self.faster_token, "_is_hf_initialized", False):
            nn.init.normal_(self.faster_token, std=len(self.faster_token) ** -0.5)

    def apply_pooling(self, image_features: torch.Tensor) -> torch.Tensor:
        """Return the features unchanged: get_video_features pools frame by frame."""
        return image_features

    def get_video_features(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of transformers' method, with slow and fast features [videos, tokens of a video, H]."""
        found = super().get_video_features(*args, **kwargs)
        features = getattr(found, "pooler_output", found)
        rows = features[:, :-1] if ENDS_FEATURES_OF_LLAVA_VIDEOS else features
        side = self.config.vision_config.image_size // self.config.vision_config.patch_size
        made = torch.stack([self._joined(each.unflatten(0, (-1, side, side))) for each in rows])
        if ENDS_FEATURES_OF_LLAVA_VIDEOS:
            made = torch.cat([made, features[:, -1:]], dim=1)
        if found is features:
            return made
        found.pooler_output = made
        return found

    def _joined(self, frames: torch.Tensor) -> torch.Tensor:
        """Return the pooled features of a video, faster_token behind each frame: [n, side, side, H] -> [tokens, H]."""
        end = self.faster_token[None].to(frames)
        stride = getattr(self.config, STRIDE)
        pieces: list[torch.Tensor] = []
        for number, frame in enumerate(frames):
            pieces += _pooled(frame, SLOW if number % stride == 0 else FAST), end
        return torch.cat(pieces)


class LlavaOnevisionForConditionalGeneration(theirs.LlavaOnevisionForConditionalGeneration):
    """Whole model: weights of LLaVA-OneVision, and `model.faster_token`, initialised at random."""

    def __init__(self, config: LlavaOnevisionConfig):
        super().__init__(config)
        self.model.__class__ = LlavaOnevisionModel
        size = config.text_config.hidden_size
        self.model.faster_token = nn.Parameter(torch.randn(size, dtype=self.dtype) / math.sqrt(size))

    @classmethod
    def is_custom_code(cls) -> bool:
        """See LlavaOnevisionModel."""
        return False


def with_slow_frames(config: Any, slow_every: int) -> None:
    """Write the stride into a model's config; ConfigError for models other than LLaVA-OneVision."""
    if config.model_type != LlavaOnevisionConfig.model_type:
        raise ConfigError(
            f"model.slow_every {slow_every} is of LLaVA-OneVision's videos, and the model is {config.model_type}: "
            "leave it out"
        )
    setattr(config, STRIDE, slow_every)


def _pooled(frame: torch.Tensor, stride: int) -> torch.Tensor:
    """Pool [side, side, H] -> [ceil(side / stride) ** 2, H] by bilinear interpolation, like transformers."""
    size = math.ceil(len(frame) / stride)
    rows = interpolate(frame.permute(2, 0, 1)[None], size=(size, size), mode="bilinear")
    return rows[0].flatten(1).T
