"""LLaVA-OneVision with slow and fast frames of videos, as in LLaVA-Video: transformers' model, changed in place.

One frame of a few has all its pooled features, the others a quarter of them, and a learnt vector ends each frame.
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

STRIDE = "faster_token_stride"  # in a model's config, as LMMS Engine writes it: frames from one slow frame to the next
SLOW, FAST = 2, 4  # features of a side become one


class LlavaOnevisionModel(theirs.LlavaOnevisionModel):  # transformers finds rules for weights by its name
    """Its part that reads media. faster_token: float[H], behind the features of each frame."""

    faster_token: nn.Parameter

    @classmethod
    def is_custom_code(cls) -> bool:
        """Whether transformers keeps its rules for the weights of files from this class."""
        return False

    def _init_weights(self, module: nn.Module) -> None:
        """Give faster_token its first values where no file holds them; transformers calls it for each module."""
        if module is not self:
            super()._init_weights(module)
        elif not getattr(self.faster_token, "_is_hf_initialized", False):
            nn.init.normal_(self.faster_token, std=len(self.faster_token) ** -0.5)

    def apply_pooling(self, image_features: torch.Tensor) -> torch.Tensor:
        """The features as they are: get_video_features pools them, by frame."""
        return image_features

    def get_video_features(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of transformers' method, with features [videos, tokens of a video, H]."""
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
        """Features of the frames of a video, [n, side, side, H] -> [tokens, H]."""
        end = self.faster_token[None].to(frames)
        stride = getattr(self.config, STRIDE)
        pieces: list[torch.Tensor] = []
        for number, frame in enumerate(frames):
            pieces += _pooled(frame, SLOW if number % stride == 0 else FAST), end
        return torch.cat(pieces)


class LlavaOnevisionForConditionalGeneration(theirs.LlavaOnevisionForConditionalGeneration):
    """The whole model. Its weights are LLaVA-OneVision's and `model.faster_token`, which begins at random."""

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
    """Write the stride into a model's config; ConfigError for a model that is no LLaVA-OneVision."""
    if config.model_type != LlavaOnevisionConfig.model_type:
        raise ConfigError(
            f"model.slow_every {slow_every} is of LLaVA-OneVision's videos, and the model is {config.model_type}: "
            "leave it out"
        )
    setattr(config, STRIDE, slow_every)


def _pooled(frame: torch.Tensor, stride: int) -> torch.Tensor:
    """[side, side, H] -> [ceil(side / stride) ** 2, H], by bilinear interpolation as transformers pools frames."""
    size = math.ceil(len(frame) / stride)
    rows = interpolate(frame.permute(2, 0, 1)[None], size=(size, size), mode="bilinear")
    return rows[0].flatten(1).T
