"""Find the layers of a model that carry state from a sample of a pack into the next.

A layer carries state if equal inputs for a sample, in two packs or in a pack and alone, give different outputs. A layer
carries state, too, if a gradient of the output for a sample reaches the input for another sample: small weights hide
differences among roundings, but hide no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from ...types import Processed
from .by_sample import BOUNDS, BySample, Calls
from .isolation import (
    Tolerances,
    gradient_reaches_others,
    other,
    pack_of,
    reaches,
    second_of,
    text_samples,
)
from .model import PackedModel

_ROUNDS = 4  # of the search: a layer is found after the layers below run by sample
_AMPLIFIED = 30  # largest factor from a difference of inputs to a difference of outputs
_NUMBERS = 8  # random sums in place of the values of a token


def run_by_sample(model: PackedModel, tolerances: Tolerances, device: torch.device) -> None:
    """Find layers of a model that carry state between samples, and run these layers by sample; all ranks call it.

    model.by_sample has the layers.
    """
    model.by_sample = by_sample = BySample([model.model, *filter(None, [model.base_model])])
    for _ in range(_ROUNDS):
        if not (found := _Search(model, tolerances, device).found()):
            break
        by_sample.add(model.model, found)


def leave_by_sample(model: PackedModel) -> None:
    """Undo run_by_sample: run all layers on whole packs."""
    if model.by_sample is not None:
        model.by_sample.remove()
        model.by_sample = None


class _Leaf(NamedTuple):
    """Tensor in the input or output of a layer. numbers: sums for each token of the second sample, float[t, k]."""

    shape: tuple[int, ...]
    is_floating: bool
    numbers: torch.Tensor | None

    def difference(self, other: _Leaf) -> float:
        """Return the largest difference of numbers, divided by the spread; 0 without numbers."""
        if self.numbers is None or other.numbers is None:
            return 0.0
        largest = float((self.numbers - other.numbers).abs().max())
        return largest / float(self.numbers.std()) if largest else 0.0


class _Call(NamedTuple):
    inputs: dict[str, _Leaf]
    outputs: dict[str, _Leaf]

    def carries_state(self, other: _Call, tolerance: float) -> bool:
        """Return whether outputs of two calls differ by more than tolerance and _AMPLIFIED times the inputs."""
        given = max((each.difference(other.inputs[path]) for path, each in self.inputs.items()), default=0.0)
        outputs = {path: each for path, each in self.outputs.items() if each.is_floating}
        returned = max((each.difference(other.outputs[path]) for path, each in outputs.items()), default=0.0)
        return returned > max(tolerance, _AMPLIFIED * given)


class _Search:
    """Search for the classes of layers that carry state between samples, and for axes of tokens in their tensors."""

    def __init__(self, model: PackedModel, tolerances: Tolerances, device: torch.device):
        self._model, self._tolerances, self._device = model, tolerances, device
        self._samples = text_samples(model)
        left_out = {id(module) for tower in model.towers.values() for module in tower.modules()}
        left_out |= {id(model.model), id(model.base_model)}
        if model.by_sample is not None:
            left_out |= {id(module) for layer in model.by_sample.layers for module in layer.modules()}
        self._layers = {
            name: module
            for name, module in model.model.named_modules()
            if id(module) not in left_out and next(module.parameters(), None) is not None
        }

    def found(self) -> dict[type[nn.Module], Calls]:
        first, second, third = self._samples
        pack = self._calls([first, second, third])
        changed = self._calls([other(self._model, first), second, third])
        shorter = self._calls([first, second])
        alone = self._calls([second])
        reaching = self._reaching()
        carrying = [
            name
            for name, call in pack.items()
            if call.carries_state(changed[name], self._tolerances.two_packs)
            or call.carries_state(alone[name], self._tolerances.alone)
            or name in reaching
        ]
        calls: dict[type[nn.Module], Calls] = {}
        classes = {type(self._layers[name]) for name in carrying}
        candidates = [name for name, layer in self._layers.items() if type(layer) in classes]
        for name in carrying:
            if not any(inner.startswith(f"{name}.") for inner in candidates):
                known = calls.setdefault(type(self._layers[name]), Calls({}, {}))
                known.inputs.update(_axes_of_tokens(pack[name].inputs, shorter[name].inputs))
                for path, axes in _axes_of_tokens(pack[name].outputs, shorter[name].outputs).items():
                    if axes == (1,) and pack[name].outputs[path].is_floating:
                        known.outputs[path] = axes
        return calls

    def _reaching(self) -> set[str]:
        """Return layers whose first call has a gradient of other samples in the input, but not in the output."""
        of_given: dict[str, list[bool]] = {}
        of_returned: dict[str, list[bool]] = {}
        _, is_other = second_of(self._samples, self._model)

        def listen(to: Any, heard: list[bool], *, if_of_tokens: bool) -> None:
            for leaf in tree_leaves(to):
                if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
                    continue
                if not if_of_tokens or leaf.shape[:2] == (1, len(is_other)):
                    leaf.register_hook(lambda gradient: heard.append(reaches(gradient, is_other)))

        def enter(name: str, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            if name in of_given:
                return None
            own = tree_map(lambda leaf: leaf.view_as(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
            listen(own, of_given.setdefault(name, []), if_of_tokens=True)
            found: tuple[Any, Any] = own
            return found

        def leave(name: str, _: nn.Module, output: Any) -> None:
            if name not in of_returned:
                listen(output, of_returned.setdefault(name, []), if_of_tokens=False)

        hooks = [
            hook
            for name, layer in self._layers.items()
            for hook in (
                layer.register_forward_pre_hook(partial(enter, name), with_kwargs=True),
                layer.register_forward_hook(lambda layer, _, output, name=name: leave(name, layer, output)),
            )
        ]
        try:
            gradient_reaches_others(self._model, self._samples, self._device)
        finally:
            for hook in hooks:
                hook.remove()
        return {name for name, heard in of_given.items() if any(heard) and not any(of_returned.get(name, []))}

    def _calls(self, samples: Sequence[Processed]) -> dict[str, _Call]:
        """Run the model on a pack; return the first call of each layer by name."""
        found: dict[str, _Call] = {}
        lengths = [len(each["input_ids"]) for each in samples]
        start = lengths[0] if len(samples) > 1 else 0
        second = slice(start, start + len(self._samples[1]["input_ids"]))

        def leaves(tree: Any) -> dict[str, _Leaf]:
            return {
                keystr(path): _Leaf(tuple(leaf.shape), leaf.is_floating_point(), _numbers(leaf, second, sum(lengths)))
                for path, leaf in tree_flatten_with_path(tree)[0]
                if isinstance(leaf, torch.Tensor) and getattr(path[-1] if path else None, "key", None) not in BOUNDS
            }

        def listen(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if name not in found:
                found[name] = _Call(leaves((args, kwargs)), leaves(output))

        hooks = [
            layer.register_forward_hook(partial(listen, name), with_kwargs=True) for name, layer in self._layers.items()
        ]
        try:
            self._model.logits(pack_of(samples).to(self._device))
        finally:
            for hook in hooks:
                hook.remove()
        return found


def _numbers(leaf: torch.Tensor, tokens: slice, num_tokens: int) -> torch.Tensor | None:
    """Return random sums of the values of each token, to show any difference; None for shapes other than [1, T, …]."""
    if leaf.shape[:2] != (1, num_tokens) or not leaf.numel():
        return None
    chosen = leaf.detach()[0, tokens].float()
    values = chosen.reshape(len(chosen), -1)
    weights = torch.randn(values.shape[1], _NUMBERS, generator=torch.Generator().manual_seed(0))
    return (values @ weights.to(values.device)).cpu()


def _axes_of_tokens(pack: Mapping[str, _Leaf], shorter: Mapping[str, _Leaf]) -> dict[str, tuple[int, ...]]:
    """Return path -> axes with different sizes in two packs of different lengths, for tensors with any."""
    found = {}
    for path in sorted(pack.keys() & shorter.keys()):
        sizes = zip(pack[path].shape, shorter[path].shape, strict=True)
        if axes := tuple(axis for axis, (ours, theirs) in enumerate(sizes) if ours != theirs):
            found[path] = axes
    return found
