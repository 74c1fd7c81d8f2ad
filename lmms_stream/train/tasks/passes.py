"""The packs of a step by forward pass, on the device as they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ...types import Batch
from .copies import on_device


class StepPasses:
    """Gives, each time it is iterated, the batch of each forward pass on the device, with the packs it is joined of.

    packs: on the CPU, by forward pass. joined: makes one sequence of packs, checked.
    """

    def __init__(
        self,
        packs: Sequence[Sequence[Batch]],
        *,
        joined: Callable[[Sequence[Batch]], Batch],
        device: torch.device,
    ):
        self.packs = packs
        self._joined, self._device = joined, device

    def __iter__(self) -> Iterator[tuple[Batch, Sequence[Batch]]]:
        yield from zip(on_device(map(self._joined, self.packs), self._device), self.packs, strict=True)

    def changed(self, change: Callable[[Batch], Batch]) -> StepPasses:
        """The same passes of other packs."""
        packs = [[change(pack) for pack in together] for together in self.packs]
        return StepPasses(packs, joined=self._joined, device=self._device)
