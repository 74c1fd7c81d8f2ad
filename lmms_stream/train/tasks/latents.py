"""Images <-> the latents of a frozen autoencoder of diffusers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ...checks import plain_path
from ...errors import ConfigError
from ...types import Batch
from .noise import Draw

INSTALL = "pip install 'lmms-stream[generation]'"


class Autoencoder:
    """An AutoencoderKL, or its folder or hub id; its latents are scaled as its config says, to about N(0, 1)."""

    def __init__(self, vae: Any):
        self.vae: Any = load_autoencoder(vae) if isinstance(vae, str | Path) else vae
        config = self.vae.config
        self._scale = float(config.scaling_factor)
        self._shift = float(getattr(config, "shift_factor", None) or 0.0)

    @torch.no_grad()
    def encode(self, pixels: torch.Tensor, packs: Sequence[Batch], draw: Draw) -> torch.Tensor:
        """A latent of each image, drawn from its distribution: float32[n, C, h, w]."""
        latents = self.vae.encode(pixels.to(self.vae.dtype)).latent_dist
        mean = latents.mean.float()
        noise = draw.normal(packs, mean.shape[1:], name="latent").to(mean.device)
        drawn: torch.Tensor = (mean + latents.std.float() * noise - self._shift) * self._scale
        return drawn

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """float32[n, 3, S, S], about -1 to 1."""
        made: torch.Tensor = self.vae.decode((latents / self._scale + self._shift).to(self.vae.dtype)).sample.float()
        return made


def load_autoencoder(path: str | Path) -> Any:
    """ConfigError without diffusers, and for a folder that holds none."""
    if find_spec("diffusers") is None:
        raise ConfigError(f"an autoencoder of images needs diffusers: {INSTALL}")
    from diffusers import AutoencoderKL

    path = plain_path("vae", path)
    try:
        return AutoencoderKL.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"vae {path} is no AutoencoderKL of diffusers: {' '.join(str(error).split())[:200]}"
        ) from error
