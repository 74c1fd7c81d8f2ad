"""FLOPs of models that make images, of any class: counted by torch on one image. model, what runs it -> FLOPs.

The model runs forward and backward once on the meta device, which computes shapes alone, so that nothing is read or
written. Frozen parts beside the model, as an autoencoder or an encoder, do not count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFlops:
    """See ModelFlops, of which these are the same for tasks whose units are images."""

    per_image: float

    def of(
        self, lengths: NDArray[np.int64], *, num_loss_tokens: int, inputs: Sequence[Mapping[str, torch.Tensor]] = ()
    ) -> float:
        """Forward and backward over the images of batches, which num_loss_tokens counts (see collate_images)."""
        return self.per_image * num_loss_tokens


def image_flops(model: torch.nn.Module, run: Callable[[Any], torch.Tensor | None]) -> ImageFlops | None:
    """run: what a task does with the model of one image, all of whose tensors are on the meta device.

    None where it does nothing, and, with a line in the log, for a model that cannot run there.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    tensors = {name: _empty(each) for name, each in (*model.named_parameters(), *model.named_buffers())}
    inside = {f"model.{name}": each for name, each in tensors.items()}
    try:
        # Other kernels than that of products compute some of the scores again in the backward pass.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.device("meta"):
            made = torch.func.functional_call(_Run(model, run), inside, ())
            if made is None:
                return None
            if made.requires_grad:
                made.sum().backward()
    except Exception as error:  # noqa: BLE001 - a model of the user's own, that may ask for values
        reason = " ".join(str(error).split())[:200]
        log.info(
            "the arithmetic of %s is not known, which does not run on the meta device: %s", type(model).__name__, reason
        )
        return None
    return ImageFlops(per_image=float(counter.get_total_flops()))


class _Run(torch.nn.Module):
    """A model as a task runs it."""

    def __init__(self, model: torch.nn.Module, run: Callable[[Any], torch.Tensor | None]):
        super().__init__()
        self.model = model
        self._run = run

    def forward(self) -> torch.Tensor | None:
        return self._run(self.model)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
