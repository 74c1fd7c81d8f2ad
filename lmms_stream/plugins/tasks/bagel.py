"""Texts and images in one sequence: cross entropy for text, the velocity from latents to noise for images.

After BAGEL (Deng et al. 2025, arXiv 2505.14683): at time t, noised latents are x = (1 - t) z + t e, with latents z and
noise e, and the model predicts e - z. t is the shifted sigmoid of N(0, 1), one value per image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...errors import ConfigError
from ...loader.collate import collate
from ...processors.bagel import LATENTS, BlockKind
from ...processors.base import IGNORED_LABEL
from ...train.model.build import PlainModel
from ...train.model.loss import learnt_tokens, losses_of_logits
from ...train.model.sharding import reshard
from ...train.tasks.task import Draw, LossSum, Objective
from ...types import Batch
from .bagel_model import block_config, draw_blocks, num_made, run_blocks

CE, MSE = "ce", "mse"
# pixels of the latents float32[L, stride * stride * 3], rows and columns of each image int64[n, 2] -> float32[L, D]
Autoencoder = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Bagel:
    """ce_weight x mean cross entropy over tokens + mse_weight x mean squared error over latents, of the global batch.

    A latent's error is the mean over its values. timestep_shift: above 1, more times are near 1 (pure noise).
    autoencoder: called with pixels (values -1 to 1) and grids, returns a latent for each row of pixels, in their order;
    not trained. Default: the pixels are the latents.
    The model is a BlockModel; processors are of type bagel.

    Noise, times and drops are drawn for a sample and a step; an evaluation drops nothing.
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
        """Return the losses. draw: source of random draws; required."""
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
        """Clean latents of all images with latents: float32[L, D]."""
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
    """A BlockModel as FSDP's unit of sharding."""

    def check_processor(self, processor: Any) -> None:
        """Raise ConfigError for a processor without blocks, or with more tokens than the model."""
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


# Proof that a model keeps the samples of a pack apart, and that an image to be made is seen only from inside.
#
# Small samples of random tokens and pixels, with all kinds of blocks, are run as one pack, with other noise, with
# another last token, and one by one, with the same model, device and number format.

_CLOSE, _CLOSE_BF16 = 1e-3, 5e-2  # of the spread of outputs: other shapes have other roundings
_ROWS, _COLUMNS = 2, 3
_SAMPLES = (
    (BlockKind.TEXT, BlockKind.CONDITION, BlockKind.SEEN, BlockKind.TEXT, BlockKind.MADE, BlockKind.TEXT),
    (BlockKind.SEEN, BlockKind.TEXT),
    (BlockKind.TEXT, BlockKind.MADE, BlockKind.SEEN, BlockKind.MADE, BlockKind.TEXT),
)


def check_blocks(model: PlainModel, *, device: torch.device, bf16: bool) -> None:
    """Raise ConfigError for a model that violates the mask of its blocks; all ranks call it."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            fault = _fault(model, device, _CLOSE_BF16 if bf16 else _CLOSE)
    finally:
        model.train(was_training)
        reshard(model)
    if fault is not None:
        raise ConfigError(
            f"{type(model.model).__name__} {fault}: use block_attention.attend with the given layout as its attention, "
            "and norms of single tokens"
        )


def _fault(model: PlainModel, device: torch.device, close: float) -> str | None:
    samples = [_sample(block_config(model), kinds, number) for number, kinds in enumerate(_SAMPLES)]
    run = _Runs(model, device)
    packed = run([*enumerate(samples)])
    spread = [max(float(each.std()), 1e-6) for each in packed]
    if not all(bool(torch.isfinite(each).all()) for each in packed):
        return "gives logits or velocities that are not finite"
    alone = [run([pair]) for pair in enumerate(samples)]
    for number, name in enumerate(("logits", "velocities")):
        one_by_one = torch.cat([each[number] for each in alone])
        if float((packed[number] - one_by_one).abs().max()) > close * spread[number]:
            return f"gives other {name} for a sample in a pack than for the sample alone"
    other_noise, _ = run([*enumerate(samples)], step=1)
    if float((packed[0] - other_noise).abs().max()) > close * spread[0]:
        return "lets text see an image that is to be made, which is noise when it is made"
    ids = samples[-1]["input_ids"].copy()
    ids[-1] = (ids[-1] + 1) % block_config(model).vocab_size
    changed, _ = run([*enumerate([*samples[:-1], {**samples[-1], "input_ids": ids}])])
    if float((packed[0] - changed).abs().max()) > close * spread[0]:
        return "lets tokens see those that they are to predict"
    return None


class _Runs:
    def __init__(self, model: PlainModel, device: torch.device):
        self._model, self._device = model, device

    def __call__(self, samples: list[tuple[int, dict[str, Any]]], step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and velocities of samples, with their ids, as one pack: float32[n, vocabulary], float32[m,
        D].
        """
        pack: Batch = collate([sample for _, sample in samples], [number for number, _ in samples])
        latent_size = block_config(self._model).latent_size
        drawn = draw_blocks([pack], Draw(seed=0, step=step), latent_size=latent_size)
        batch = pack.to(self._device)
        latents = batch.inputs.get("latents", torch.zeros(0, latent_size, device=self._device))
        made, _ = run_blocks(self._model, batch, drawn, latents)
        return made.logits.float(), made.velocity.float()


def _sample(config: Any, kinds: tuple[BlockKind, ...], number: int) -> dict[str, Any]:
    """Make a processed sample with blocks of these kinds, with latents instead of pixels."""
    rng = np.random.default_rng(number)
    cells = _ROWS * _COLUMNS
    lengths = [int(rng.integers(4, 9)) if kind == BlockKind.TEXT else cells + 2 for kind in kinds]
    ids = rng.integers(0, config.vocab_size, sum(lengths))
    is_learnt = np.repeat([kind == BlockKind.TEXT for kind in kinds], lengths)
    is_learnt[np.cumsum(lengths) - lengths] = False  # the first token of a block would be predicted in another block
    num_seen, num_latent = (sum(kind in of for kind in kinds) for of in ((BlockKind.SEEN,), LATENTS))
    at = np.arange(cells)
    media: dict[str, Any] = {
        "blocks": np.array([*zip(kinds, lengths, strict=True)], np.int64),
        "dropout": np.zeros(len(kinds), np.float32),
    }
    for name, count, size, values in (
        ("vit", num_seen, config.patch_values, "vit_patches"), ("vae", num_latent, config.latent_size, "latents"),
    ):  # fmt: skip
        if count:
            media[values] = rng.standard_normal((count * cells, size), np.float32)
            media[f"{name}_positions"] = np.tile(at, count)
            media[f"{name}_grids"] = np.array([[_ROWS, _COLUMNS]] * count)
    return {"input_ids": ids, "labels": np.where(is_learnt, ids, IGNORED_LABEL), "media": media}
