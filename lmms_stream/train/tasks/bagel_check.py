"""The proof that a model keeps the samples of a pack apart, and sees no image that is to be made from outside of it.

Small samples of random tokens and pixels, with all kinds of blocks, are run as one pack, with other noise, with another
last token, and one by one, with the very model, device and number format.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...errors import ConfigError
from ...loader.collate import collate
from ...processors.base import IGNORED_LABEL
from ...processors.blocks import LATENTS, Kind
from ...types import Batch
from ..model.plain import PlainModel
from ..model.sharding import reshard
from .bagel_draw import draw_blocks
from .bagel_model import block_config, run_blocks
from .noise import Draw

_CLOSE, _CLOSE_BF16 = 1e-3, 5e-2  # of the spread of what the model says: other shapes have other roundings
_ROWS, _COLUMNS = 2, 3
_SAMPLES = (
    (Kind.TEXT, Kind.CONDITION, Kind.SEEN, Kind.TEXT, Kind.MADE, Kind.TEXT),
    (Kind.SEEN, Kind.TEXT),
    (Kind.TEXT, Kind.MADE, Kind.SEEN, Kind.MADE, Kind.TEXT),
)


def check_blocks(model: PlainModel, *, device: torch.device, bf16: bool) -> None:
    """ConfigError for a model that does not keep to the mask of its blocks; all ranks call it."""
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
            f"{type(model.model).__name__} {fault}: let its attention be block_attention.attend with the layout "
            "that it is given, and norms look at one token"
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
        """Logits and velocities of samples, with their ids, as one pack: float32[n, vocabulary], float32[m, D]."""
        pack: Batch = collate([sample for _, sample in samples], [number for number, _ in samples])
        latent_size = block_config(self._model).latent_size
        drawn = draw_blocks([pack], Draw(seed=0, step=step), latent_size=latent_size)
        batch = pack.to(self._device)
        latents = batch.inputs.get("latents", torch.zeros(0, latent_size, device=self._device))
        made, _ = run_blocks(self._model, batch, drawn, latents)
        return made.logits.float(), made.velocity.float()


def _sample(config: Any, kinds: tuple[Kind, ...], number: int) -> dict[str, Any]:
    """A processed sample of blocks of these kinds, with latents instead of the pixels that they are made of."""
    rng = np.random.default_rng(number)
    cells = _ROWS * _COLUMNS
    lengths = [int(rng.integers(4, 9)) if kind == Kind.TEXT else cells + 2 for kind in kinds]
    ids = rng.integers(0, config.vocab_size, sum(lengths))
    is_learnt = np.repeat([kind == Kind.TEXT for kind in kinds], lengths)
    is_learnt[np.cumsum(lengths) - lengths] = False  # the first token of a block would be predicted in another one
    num_seen, num_latent = (sum(kind in of for kind in kinds) for of in ((Kind.SEEN,), LATENTS))
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
