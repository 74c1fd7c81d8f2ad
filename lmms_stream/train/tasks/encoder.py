"""A frozen vision encoder of transformers: images -> the tokens of their patches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...checks import plain_path
from ...errors import ConfigError
from .images import frozen

_MEAN, _STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)  # of processors of SigLIP: images from -1 to 1


class VisionEncoder:
    """model: of transformers, as SiglipVisionModel or Dinov2Model. mean, std: of the values 0 to 1 that it takes."""

    def __init__(self, model: Any, *, mean: Sequence[float] = _MEAN, std: Sequence[float] = _STD):
        self.model = getattr(model, "vision_model", model) if hasattr(model, "text_model") else model
        config = getattr(self.model.config, "vision_config", self.model.config)
        if not (hasattr(config, "image_size") and hasattr(config, "patch_size")):
            raise ConfigError(
                f"{type(model).__name__} is no vision encoder, whose config has image_size and patch_size: take one as "
                "SiglipVisionModel or Dinov2Model"
            )
        self.image_size, self.patch_size = int(config.image_size), int(config.patch_size)
        self.hidden_size = int(config.hidden_size)
        self._mean, self._std = (torch.tensor(each).view(1, 3, 1, 1) for each in (mean, std))

    @staticmethod
    def load(path: str | Path) -> VisionEncoder:
        """The encoder in a folder or of a hub id, with the mean and deviation that its image processor has."""
        import transformers

        path = plain_path("encoder", path)
        try:
            model = transformers.AutoModel.from_pretrained(str(path))
        except (OSError, ValueError) as error:
            message = " ".join(str(error).split())[:200]
            raise ConfigError(f"encoder {path} is no model of transformers: {message}") from error
        try:
            processor: Any = transformers.AutoImageProcessor.from_pretrained(str(path))
        except (OSError, ValueError):  # a folder without one
            return VisionEncoder(model)
        return VisionEncoder(model, mean=processor.image_mean, std=processor.image_std)

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    def to(self, device: torch.device) -> None:
        """Freeze it, whole on each rank."""
        frozen(self.model, device)
        self._mean, self._std = self._mean.to(device), self._std.to(device)

    @torch.no_grad()
    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """images: float32[n, 3, S, S], -1 to 1; resized to its own size. Returns float32[n, patches, hidden]."""
        if images.shape[-1] != self.image_size:
            size = (self.image_size, self.image_size)
            images = torch.nn.functional.interpolate(images, size, mode="bicubic", antialias=True).clamp(-1, 1)
        values = ((images + 1) / 2 - self._mean) / self._std
        dtype = next(self.model.parameters()).dtype
        tokens = self.model(pixel_values=values.to(dtype)).last_hidden_state
        of_patches: torch.Tensor = tokens[:, -self.num_patches :]  # what comes before are tokens of the whole image
        return of_patches.float().clone()
