"""FLOPs of the products of a tower: by which of its parts are trained. parameters by stage -> FLOPs of a position.

As in flops.py, but without norms and biases: 2 FLOPs a parameter and position forward, 2 more for the gradient of a
parameter that is trained, 2 more for that of what comes in, where anything before it is trained. So a frozen tower
counts its forward alone, and the first product, of what is read, never the last 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

_MATRICES = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_BLOCK = re.compile(r"(?:^|\.)(?:layers?|blocks)\.(\d+)\.")


class MediaFlops(Protocol):
    """FLOPs of what reads media of some kinds."""

    def of(self, inputs: Mapping[str, torch.Tensor]) -> float:
        """Forward and backward over a batch's inputs."""
        ...


class Matrix(NamedTuple):
    """A parameter that positions are multiplied by. stage: when it is used, 0 by what reads pixels or samples."""

    stage: int
    name: str
    parameter: torch.nn.Parameter


class Products:
    """stages: of all parameters, of parts that are not multiplied too, as a trained norm needs gradients as well."""

    def __init__(self, stages: Iterable[tuple[int, torch.nn.Parameter]]):
        self._first_trained = min((stage for stage, each in stages if each.requires_grad), default=1 << 30)

    def of(self, stage: int, parameter: torch.nn.Parameter) -> float:
        """Of a position."""
        backward = 2.0 * parameter.requires_grad + 2.0 * (stage > 0 and self._first_trained <= stage)
        return parameter.numel() * (2.0 + backward)

    def of_pair(self, stage: int, width: int) -> float:
        """Of two positions that attend to each other in a block: its two products, and four backward."""
        return 4.0 * width * (3 if self._first_trained <= stage else 1)


def stage_of_block(name: str) -> int | None:
    """The number of the block that a parameter lies in; None for one in no block.

    >>> stage_of_block("encoder.layers.3.fc1.weight"), stage_of_block("conv1.weight")
    (3, None)
    """
    found = _BLOCK.search(name)
    return None if found is None else int(found[1])


def num_blocks(tower: torch.nn.Module) -> int:
    """Of the tower's first list of blocks; 0 for one without."""
    lists = (each for name, each in tower.named_modules() if name.rpartition(".")[2] in ("layers", "layer", "blocks"))
    return next((len(each) for each in lists if isinstance(each, torch.nn.ModuleList)), 0)


def matrices(modules: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The weights of linear layers and convolutions, and of projections that are parameters themselves."""
    for number, module in enumerate(modules):
        for path, part in module.named_modules():
            for name, parameter in part.named_parameters(recurse=False):
                if (isinstance(part, _MATRICES) and name == "weight") or name.endswith("projection_weight"):
                    yield f"{number}.{path}.{name}", parameter
