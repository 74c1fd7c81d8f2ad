"""Gradients of a head that makes logits of some tokens at a time: summed in float32, whatever its own format.

In bfloat16 each of many sums would lose bits: with 128 parts the gradient is 1 % off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SharedParameters:
    """The parameters of a module that is called several times before one backward pass; None: no module."""

    def __init__(self, module: torch.nn.Module | None):
        self._module = module
        found = module.named_parameters(recurse=False) if module is not None else ()
        rounded = {name: each for name, each in found if each.requires_grad and each.dtype != torch.float32}
        self._sums = {name: _Sum() for name in rounded}
        self._shared = {name: _Share.apply(each, self._sums[name]) for name, each in rounded.items()}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, a call of the module adds its gradients in float32."""
        before = {name: self._module._parameters[name] for name in self._shared} if self._module is not None else {}
        try:
            for name, shared in self._shared.items():
                assert self._module is not None
                self._module._parameters[name] = _Use.apply(shared, self._sums[name])
            yield
        finally:
            if self._module is not None:
                self._module._parameters.update(before)


class _Sum:
    value: torch.Tensor | None = None  # float32


class _Share(torch.autograd.Function):
    """A parameter as it is; its gradient is the sum that its uses have made."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, total: _Sum) -> torch.Tensor:
        ctx.total, ctx.dtype = total, parameter.dtype
        ctx.set_materialize_grads(False)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        value, ctx.total.value = ctx.total.value, None
        return None if value is None else value.to(ctx.dtype), None


class _Use(torch.autograd.Function):
    """The shared parameter; its gradient is added to the sum and goes no further."""

    @staticmethod
    def forward(ctx: Any, shared: torch.Tensor, total: _Sum) -> torch.Tensor:
        ctx.total = total
        return shared.view_as(shared)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        value = ctx.total.value
        ctx.total.value = gradients[0].float() if value is None else value.add_(gradients[0])
        return None, None
