"""Texts and images in one sequence: text is learnt by cross entropy, images by the velocity from themselves to noise.

After BAGEL (Deng et al. 2025, arXiv 2505.14683): at time t latents are x = (1 - t) z + t e, of latents z and noise e,
and the model says e - z. t is the shifted sigmoid of N(0, 1), one for an image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import ConfigError
from ...loader.collate import collate
from ...types import Batch
from ..model.loss import learnt_tokens, losses_of_logits
from ..model.plain import PlainModel
from .bagel_check import check_blocks
from .bagel_draw import draw_blocks, num_made
from .bagel_model import block_config, run_blocks
from .noise import Draw
from .task import LossSum, Objective

CE, MSE = "ce", "mse"
# pixels of the latents float32[L, stride * stride * 3], rows and columns of each image int64[n, 2] -> float32[L, D]
Autoencoder = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Bagel:
    """ce_weight x mean cross entropy over tokens + mse_weight x mean squared error over latents, of the global batch.

    A latent's error is the mean over its values. timestep_shift: more than 1 has more of the times near 1, all noise.
    autoencoder: what makes latents, in order, of pixels from -1 to 1; it is not trained (default: pixels are the
    latents). The model is one that is called as BlockModel says; processors are of type bagel.

    Noise, times and what is dropped are drawn for a sample and a step; an evaluation drops nothing.
    """

    collate: Callable[..., Batch] = staticmethod(collate)

    def __init__(
        self,
        *,
        ce_weight: float = 1.0,
        mse_weight: float = 1.0,
        timestep_shift: float = 1.0,
        autoencoder: Autoencoder | None = None,
    ):
        for name, value in (("ce_weight", ce_weight), ("mse_weight", mse_weight)):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name} of task bagel must be at least 0, got {value!r}")
        if not 0 < timestep_shift < float("inf"):
            raise ConfigError(f"timestep_shift of task bagel must be above 0, got {timestep_shift!r}")
        self.ce_weight, self.mse_weight, self.timestep_shift = ce_weight, mse_weight, timestep_shift
        self.autoencoder = autoencoder

    def wrap(self, model: torch.nn.Module) -> PlainModel:
        """See Task. model: a BlockModel."""
        return BlocksModel(model)

    def objectives(self, model: PlainModel) -> Sequence[Objective]:
        return [Objective(name=CE, weight=self.ce_weight), Objective(name=MSE, weight=self.mse_weight)]

    def units(self, pack: Batch) -> Mapping[str, int]:
        return {CE: pack.num_loss_tokens, MSE: num_made(pack)}

    def losses(
        self, model: PlainModel, batch: Batch, packs: Sequence[Batch], draw: Draw | None = None
    ) -> Mapping[str, LossSum]:
        """draw: what is drawn by; it is needed."""
        assert draw is not None
        latent_size = block_config(model).latent_size
        latents = self._latents(batch.inputs, latent_size, batch.input_ids.device)
        drawn = draw_blocks(packs, draw, latent_size=latent_size, timestep_shift=self.timestep_shift)
        made, expected = run_blocks(model, batch, drawn, latents)
        _, targets = learnt_tokens(batch.labels, num_learnt=batch.num_loss_tokens)
        tokens, _ = losses_of_logits(made.logits, targets)
        errors = (made.velocity.float() - expected).square().mean(dim=-1)
        return {
            CE: LossSum.of(tokens, [pack.num_loss_tokens for pack in packs]),
            MSE: LossSum.of(errors, [num_made(pack) for pack in packs]),
        }

    def _latents(self, inputs: Mapping[str, torch.Tensor], latent_size: int, device: torch.device) -> torch.Tensor:
        """The clean latents of all images that have any: float32[L, D]."""
        pixels = inputs.get("vae_patches")
        if pixels is None:
            return torch.zeros(0, latent_size, device=device)
        if self.autoencoder is not None:
            with torch.no_grad():
                pixels = self.autoencoder(pixels, inputs["vae_grids"])
        if pixels.shape[-1] != latent_size:
            raise ConfigError(
                f"latents have {pixels.shape[-1]} values, and the model's latent_size is {latent_size}: give task "
                "bagel the autoencoder of the model, or set latent_size"
            )
        return pixels.detach().float()

    def check(self, model: PlainModel, *, device: torch.device, bf16: bool, is_compiled: bool) -> None:
        check_blocks(model, device=device, bf16=bf16)


class BlocksModel(PlainModel):
    """What FSDP shards as a whole."""

    def check_processor(self, processor: Any) -> None:
        """ConfigError for one that makes no blocks, or has tokens that the model does not have."""
        if getattr(processor, "objective", "") != "bagel":
            raise ConfigError(
                f"task bagel learns from blocks, and {type(processor).__name__} makes none: set processor.type to bagel"
            )
        most = block_config(self).vocab_size
        if processor.tokenizer.num_ids > most:
            raise ConfigError(
                f"tokenizer {processor.tokenizer.name} has token ids to {processor.tokenizer.num_ids - 1}, the model "
                f"{most} tokens: take the model's own tokenizer, or raise its vocab_size"
            )
