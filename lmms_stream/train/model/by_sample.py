"""Run layers on each sample of a pack alone, if transformers cannot pass the bounds of samples to these layers.

Recurrent layers (Mamba, gated delta rule, RWKV), short convolutions and attention to compressed blocks carry state from
token to token, also from a sample into the next. carried_state finds these layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path, tree_unflatten

# Arguments with the bounds of the samples of a pack, for attention and for kernels of recurrent layers.
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_SHORTEST = 0.75  # length of the shortest sample in a group, divided by the longest


class Group:
    """Samples in the rows of a batch, padded on the right. spans: half-open ranges of tokens, the longest first."""

    def __init__(self, spans: Sequence[tuple[int, int]], device: torch.device):
        self.spans, self.size, self.length = spans, len(spans), spans[0][1] - spans[0][0]
        self.tokens = torch.cat([torch.arange(start, stop) for start, stop in spans]).to(device)
        offsets = [torch.arange(stop - start) + row * self.length for row, (start, stop) in enumerate(spans)]
        self._places = torch.cat(offsets).to(device)

    def rows(self, values: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        """Return values of the group's samples from values of all tokens: [1, T, …] -> [size, length, …].

        axes: axes of tokens; a group of several samples has only axis 1.
        """
        if self.size == 1:
            for axis in axes:
                values = values.narrow(axis, self.spans[0][0], self.length)
            return values
        chosen = values[0].index_select(0, self.tokens)
        if len(chosen) < self.size * self.length:
            empty = chosen.new_zeros(self.size * self.length, *chosen.shape[1:])
            chosen = empty.index_copy(0, self._places, chosen)
        return chosen.view(self.size, self.length, *chosen.shape[1:])

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """Return values without padding, in the order of `tokens`: [size, length, …] -> [tokens, …]."""
        flat = rows.flatten(0, 1)
        return flat if len(self._places) == len(flat) else flat.index_select(0, self._places)


class PackSamples:
    """Samples of a pack. bounds: the offset in tokens of each sample, and the end."""

    def __init__(self, bounds: Sequence[int], device: torch.device):
        self._spans = sorted(
            (span for span in pairwise(bounds) if span[0] < span[1]), key=lambda span: span[0] - span[1]
        )
        self._device = device

    def __len__(self) -> int:
        return len(self._spans)

    @cached_property
    def alone(self) -> list[Group]:
        return [Group([span], self._device) for span in self._spans]

    @cached_property
    def groups(self) -> list[Group]:
        """Groups of samples of similar length."""
        found: list[list[tuple[int, int]]] = []
        for start, stop in self._spans:
            if not found or stop - start < _SHORTEST * (found[-1][0][1] - found[-1][0][0]):
                found.append([])
            found[-1].append((start, stop))
        return [Group(each, self._device) for each in found]


class Calls(NamedTuple):
    """Axes of tokens in the tensors of a class of layers.

    inputs: path in the arguments -> axes of tokens, for tensors with any. outputs: paths in the result.
    """

    inputs: dict[str, tuple[int, ...]]
    outputs: dict[str, tuple[int, ...]]


class BySample:
    """Run of some layers of a model on each sample alone, during a run of the model on a pack.

    The model, or a part called alone, takes the samples in the argument `samples_of_pack`. Layers with all inputs of
    shape [1, T, …] run on batches of samples of similar length; other layers, with masks, on a sample at a time.
    """

    ARGUMENT = "samples_of_pack"

    def __init__(self, parts: Sequence[nn.Module]):
        self.calls: dict[type[nn.Module], Calls] = {}
        self._current: PackSamples | None = None
        self.layers: list[nn.Module] = []
        self._hooks = [part.register_forward_pre_hook(self._enter, with_kwargs=True) for part in parts]

    @property
    def names(self) -> list[str]:
        """Class names of the layers."""
        return sorted(each.__name__ for each in self.calls)

    def add(self, model: nn.Module, calls: Mapping[type[nn.Module], Calls]) -> None:
        """Run all layers of the classes in `calls` by sample."""
        self.calls |= calls
        for layer in model.modules():
            if type(layer) in calls:
                self.layers.append(layer)
                run = partial(self._run, calls[type(layer)], layer.forward)
                object.__setattr__(layer, "forward", torch.compiler.disable(run))
            checkpoint = vars(layer).get("_gradient_checkpointing_func")
            if checkpoint is not None and getattr(checkpoint, "func", None) != self._checkpointed:
                object.__setattr__(layer, "_gradient_checkpointing_func", partial(self._checkpointed, checkpoint))

    def remove(self) -> None:
        """Restore the forward passes of the layers."""
        for layer in self.layers:
            del layer.forward
        for hook in self._hooks:
            hook.remove()

    def _enter(self, part: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self.ARGUMENT not in kwargs:
            return args, kwargs
        kwargs = dict(kwargs)
        self._current = kwargs.pop(self.ARGUMENT)

        def leave(*_: Any) -> None:
            self._current = None
            leaving.remove()

        leaving = part.register_forward_hook(leave, always_call=True)
        return args, kwargs

    def _checkpointed(self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
        """Checkpoint the activations of a block: the second run, in the backward pass, gets the same samples."""
        samples = self._current

        def run(*args: Any) -> Any:
            kept, self._current = self._current, samples
            try:
                return function(*args)
            finally:
                self._current = kept

        return checkpoint(run, *args)

    def _run(self, calls: Calls, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        samples = self._current
        if samples is None:
            return forward(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDS}
        if len(samples) == 1:
            return forward(*args, **kwargs)
        takes_batches = all(axes == (1,) for axes in calls.inputs.values())
        groups = samples.groups if takes_batches else samples.alone
        found = []
        for number, group in enumerate(groups):
            given = tree_map_with_path(partial(_of_group, calls.inputs, group, number), (args, kwargs))
            leaves, tree = tree_flatten_with_path(forward(*given[0], **given[1]))
            found.append([leaf for _, leaf in leaves])
        order = torch.cat([group.tokens for group in groups]).argsort()
        of_pack: list[Any] = []
        for (path, first), of_groups in zip(leaves, zip(*found, strict=True), strict=True):
            if keystr(path) in calls.outputs:
                values = [group.values(leaf) for group, leaf in zip(groups, of_groups, strict=True)]
                of_pack.append(torch.cat(values).index_select(0, order)[None])
            else:
                of_pack.append(_OfGroups(of_groups) if isinstance(first, torch.Tensor) else first)
        return tree_unflatten(of_pack, tree)


class _OfGroups:
    """Tensors returned by a layer, a tensor per group, for later layers; for example indices of tokens."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self.tensors = tensors


def _of_group(axes: Mapping[str, tuple[int, ...]], group: Group, number: int, path: Any, leaf: Any) -> Any:
    if isinstance(leaf, _OfGroups):
        return leaf.tensors[number]
    of_tokens = axes.get(keystr(path))
    return leaf if of_tokens is None or leaf is None else group.rows(leaf, of_tokens)
