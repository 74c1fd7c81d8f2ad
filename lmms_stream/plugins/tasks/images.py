"""Shared code of tasks on images: batches that count images, and images as inputs and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...errors import ConfigError
from ...loader.collate import collate
from ...train.model.build import PlainModel
from ...train.model.sharding import reshard
from ...train.tasks.task import LossSum
from ...types import Batch, Processed

PIXELS, LABELS = "pixel_values", "class_labels"  # of ImageProcessor
NO_LABEL = -1  # of a sample without a label
_CLOSE = 1e-3  # of the spread of outputs: sums of several images have other roundings
_CLOSE_BF16 = 5e-2


def collate_images(samples: Sequence[Processed], sample_ids: Sequence[int], **options: Any) -> Batch:
    """See collate; each image counts as a loss token."""
    return replace(collate(samples, sample_ids, **options), num_loss_tokens=len(sample_ids))


def scaled(pixels: torch.Tensor) -> torch.Tensor:
    """Scale uint8 pixels to float32 from -1 to 1; return float pixels unchanged."""
    return pixels.float() / 127.5 - 1 if pixels.dtype == torch.uint8 else pixels


def frozen(part: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Freeze a part, whole on each rank."""
    return part.requires_grad_(False).eval().to(device)


def pixels_of(batch: Batch) -> torch.Tensor | None:
    """Images of a batch, -1 to 1: float32[n, 3, S, S]; None if its packs have no images."""
    if PIXELS not in batch.inputs:
        if len(batch.sample_ids):
            raise ConfigError(
                f"a batch has no {PIXELS}, the input of this task: set processor.type of its dataset to image"
            )
        return None
    return scaled(batch.inputs[PIXELS])


def loss_sum(of_images: torch.Tensor, packs: Sequence[Batch]) -> LossSum:
    """Sum the losses of images, float32[n], per pack; without images, n is 1, and this loss does not count."""
    counts = [len(pack.sample_ids) for pack in packs]
    if not sum(counts):
        return LossSum(0 * of_images.sum(), torch.zeros(len(packs), dtype=torch.float64, device=of_images.device))
    return LossSum.of(of_images, counts)


def check_apart(
    model: PlainModel, make: Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor],
    inputs: Mapping[str, torch.Tensor], *, bf16: bool,
) -> None:  # fmt: skip
    """Raise ConfigError for a model whose output for an image depends on other images; all ranks call it.

    inputs: of several images, on axis 0. make: runs the model on inputs; its results are on axis 0 too.
    """
    allowed_share = _CLOSE_BF16 if bf16 else _CLOSE
    with torch.no_grad():
        together = model(lambda inner: make(inner, inputs).clone()).float()
        allowed = allowed_share * max(float(together.std()), 1e-6)
        differ = 0.0
        for index in range(len(together)):
            one = {name: each[index : index + 1] for name, each in inputs.items()}
            alone = model(lambda inner, one=one: make(inner, one).clone()).float()
            differ = max(differ, float((alone[0] - together[index]).abs().max()))
    reshard(model)
    if not differ <= allowed:
        raise ConfigError(
            f"{type(model.model).__name__} gives other results for an image next to other images: use norms over "
            "single images (GroupNorm, LayerNorm), not over a batch (BatchNorm)"
        )
