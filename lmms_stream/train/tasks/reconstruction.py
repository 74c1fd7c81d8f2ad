"""Reconstruction: a decoder learns to make the image of what a frozen vision encoder makes of it (RAE).

Zheng et al. 2025, https://arxiv.org/abs/2510.11690: the encoder's tokens are the latents, and only the decoder learns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import ConfigError
from ...types import Batch
from ..model.plain import PlainModel
from .encoder import VisionEncoder
from .images import check_apart, collate_images, loss_sum, pixels_of
from .noise import Draw
from .task import LossSum, Objective
from .terms import L1, Term, weights_of


class Reconstruction:
    """Each term's loss, over the images of the global batch.

    encoder: a vision model of transformers, its folder or its hub id, which stays as it is. image_size: of the images
    (default: the encoder's). terms: what is learnt by (default: the mean absolute error).

    The model is a decoder: the encoder's tokens of patches float32[n, patches, hidden] -> images [n, 3, S, S], -1 to 1;
    with HingeGAN an Adversary of one.
    """

    collate: Callable[..., Batch] = staticmethod(collate_images)

    def __init__(self, *, encoder: Any = None, image_size: int | None = None, terms: Sequence[Term] = (L1(),)):
        if encoder is None:
            raise ConfigError(
                "a reconstruction needs encoder, a vision model of transformers or its folder: give the trainer "
                "task=Reconstruction(encoder=…), or the run's file task: {type: reconstruction, encoder: …}"
            )
        self.encoder = VisionEncoder.load(encoder) if isinstance(encoder, str | Path) else VisionEncoder(encoder)
        self.image_size = image_size or self.encoder.image_size
        self.terms = tuple(terms)
        self._weights = weights_of(self.terms)

    def wrap(self, model: torch.nn.Module) -> PlainModel:
        """See Task."""
        return PlainModel(model)

    def objectives(self, model: Any) -> Sequence[Objective]:
        return [Objective(name=name, weight=weight) for name, weight in self._weights.items()]

    def units(self, pack: Batch) -> Mapping[str, int]:
        return dict.fromkeys(self._weights, len(pack.sample_ids))

    def losses(
        self, model: Any, batch: Batch, packs: Sequence[Batch], draw: Draw | None = None
    ) -> Mapping[str, LossSum]:
        assert draw is not None
        real = pixels_of(batch)
        if real is None:
            real = torch.zeros(1, 3, self.image_size, self.image_size, device=batch.input_ids.device)
        tokens = self.encoder.encode(real)

        def run(inner: Any) -> dict[str, torch.Tensor]:
            made = decoded(inner, tokens)
            if made.shape != real.shape:
                raise ConfigError(
                    f"the decoder makes images {list(made.shape[1:])} of images {list(real.shape[1:])}: make it for "
                    "their size, or change processor.image_size"
                )
            found: dict[str, torch.Tensor] = {}
            for term in self.terms:
                found |= term(made, real, model=inner, step=draw.step)
            return found

        made = model(run)
        return {name: loss_sum(made[name], packs) for name in self._weights}

    def check(self, model: Any, *, device: torch.device, bf16: bool, is_compiled: bool) -> None:
        self.encoder.to(device)
        for term in self.terms:
            term.to(device)
        shape = (3, 3, self.image_size, self.image_size)
        images = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device) * 2 - 1
        inputs = {"tokens": self.encoder.encode(images)}
        check_apart(model, lambda inner, one: decoded(inner, one["tokens"]), inputs, bf16=bf16)

    def run_one(self, model: torch.nn.Module) -> torch.Tensor | None:
        """See Task. None beside a discriminator, whose work is not known here."""
        if hasattr(model, "discriminator"):
            return None
        return decoded(model, torch.empty(1, self.encoder.num_patches, self.encoder.hidden_size, device="meta"))

    @torch.no_grad()
    def reconstruct(self, model: Any, images: torch.Tensor) -> torch.Tensor:
        """Images as a whole model makes them again: float32[n, 3, S, S], -1 to 1, as the images that are given."""
        return decoded(model, self.encoder.encode(images))


def decoded(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The images that a decoder, or that of an Adversary, makes of tokens."""
    decoder = getattr(model, "decoder", model) if hasattr(model, "discriminator") else model
    made = decoder(tokens.to(next(decoder.parameters()).dtype))
    images: torch.Tensor = getattr(made, "sample", made)
    return images.float()
