"""Latents of images by a frozen AutoencoderKL of diffusers, as task bagel takes them."""

from __future__ import annotations

from typing import Any

import torch


class KLLatents:
    """vae: an AutoencoderKL, whose latents of stride x stride pixels become one, as BAGEL's of 2 x 2.

    A latent is the mean of its distribution, scaled as the autoencoder's config says, so it has channels x (stride /
    the autoencoder's own stride)^2 values: by row, column and channel.
    """

    def __init__(self, vae: Any, *, stride: int = 16):
        self.vae, self.stride = vae.requires_grad_(False).eval(), stride
        own = 2 ** (len(vae.config.block_out_channels) - 1)
        if stride % own:
            raise ValueError(
                f"stride {stride} is no multiple of the autoencoder's {own}: set vae.stride to one that is"
            )
        self.patch = stride // own
        self.scale, self.shift = vae.config.scaling_factor, vae.config.shift_factor or 0.0

    def __call__(self, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """pixels: float32[L, stride * stride * 3], grids: int64[n, 2] -> float32[L, D]."""
        self.vae.to(pixels.device)
        counts = grids.prod(dim=1).tolist()
        made = []
        for (rows, columns), cells in zip(grids.tolist(), pixels.split(counts), strict=True):
            side, patch = self.stride, self.patch
            image = cells.view(rows, columns, side, side, 3).permute(4, 0, 2, 1, 3)
            image = image.reshape(1, 3, rows * side, columns * side).to(self.vae.dtype)
            latents = (self.vae.encode(image).latent_dist.mean[0].float() - self.shift) * self.scale
            cut = latents.view(-1, rows, patch, columns, patch).permute(1, 3, 2, 4, 0)
            made.append(cut.reshape(rows * columns, -1))
        return torch.cat(made)
