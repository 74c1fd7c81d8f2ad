"""Zero gradients for parameters that a rank did not use, for a torch whose FSDP2 does not make them (below 2.15).

Ranks reduce the gradients of a block together, so each must have one for the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_unflatten


def use_all_parameters(block: torch.nn.Module) -> None:
    """Have all parameters of a block take part in its backward pass; call it before the block is sharded."""
    block.register_forward_hook(_use)  # FSDP's own hook, which frees the parameters, comes after it


def _use(block: torch.nn.Module, _: Any, output: Any) -> Any:
    leaves, spec = tree_flatten(output)
    first = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad), None)
    if first is None:
        return output
    leaves[first] = with_zeros(leaves[first], _own_parameters(block))
    return tree_unflatten(leaves, spec)


def with_zeros(tensor: torch.Tensor, unused: Iterable[torch.Tensor]) -> torch.Tensor:
    """The tensor; in the backward pass, what did not take part in making it gets gradients of zeros."""
    made: torch.Tensor = _Zeros.apply(tensor, *unused)
    return made


def _own_parameters(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Trained parameters of the module, without those of inner blocks that are sharded separately."""
    yield from (each for each in module.parameters(recurse=False) if each.requires_grad)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)


class _Zeros(torch.autograd.Function):
    """Its first argument; the others get gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(each.shape, each.dtype, each.device) for each in parameters]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], *(torch.zeros(shape, dtype=dtype, device=at) for shape, dtype, at in ctx.shapes)
