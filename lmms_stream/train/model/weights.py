"""Weights that rank 0 alone has -> each rank's part of them.

A model is sharded without weights (on the meta device), then each tensor goes from rank 0 to the ranks that hold parts
of it, one after another: no rank but the first needs room for more than its part and the largest tensor, and neither
does the first where its weights are still in their files. Parameters that a checkpoint will fill do not go: each rank
makes room for its part of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from ...errors import ConfigError
from ...freed_memory import give_back_memory
from ..run.distributed import cpu_group, gather
from .pretrained import PretrainedTensors

_GIVE_BACK_BYTES = 1 << 26  # of weights, after which what they took is returned to the system


def take_weights(
    model: torch.nn.Module, *, is_filled_later: bool = False, unread: PretrainedTensors | None = None
) -> dict[str, torch.Tensor]:
    """The model's tensors by name; it is left with tensors of the same shapes on the meta device.

    Parameters that are tied stay so. Only those of rank 0 are used later. is_filled_later: its parameters are on the
    meta device of rank 0 too, as those are that `unread` has, by their names in the transformers model.
    """
    taken: dict[str, torch.Tensor] = {}
    empty: dict[int, torch.Tensor] = {}
    for module, name, full_name, tensor in _tensors(model):
        taken[full_name] = tensor
        if id(tensor) not in empty:
            empty[id(tensor)] = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, torch.nn.Parameter):
                empty[id(tensor)] = torch.nn.Parameter(empty[id(tensor)], requires_grad=tensor.requires_grad)
        setattr(module, name, empty[id(tensor)])
    _check(taken, is_filled_later=is_filled_later, unread=unread)
    return taken


def give_weights(
    model: torch.nn.Module, weights: dict[str, torch.Tensor], *, device: torch.device, is_filled_later: bool = False,
    unread: PretrainedTensors | None = None,
) -> None:  # fmt: skip
    """Fill a model that was sharded since, on each rank's device, with the weights that rank 0 took; all call it.

    Each weight is freed as soon as it is given. unread: has those that rank 0 reads when they are given.
    is_filled_later: parameters hold nothing of meaning afterwards.
    """
    given: dict[int, torch.nn.Parameter] = {}
    kept_bytes = 0
    for module, name, full_name, tensor in _tensors(model):
        source = weights.pop(full_name)
        if id(tensor) in given:
            setattr(module, name, given[id(tensor)])
            continue
        if is_filled_later and isinstance(tensor, torch.nn.Parameter):
            part = torch.empty_like(tensor.detach(), device=device)
        else:
            part = _part(full_name, source, tensor, device=device, unread=unread)
            kept_bytes += source.nbytes
        if isinstance(tensor, torch.nn.Parameter):
            part = given[id(tensor)] = torch.nn.Parameter(part, requires_grad=tensor.requires_grad)
        setattr(module, name, part)
        if kept_bytes >= _GIVE_BACK_BYTES:  # parts lie between the whole tensors that were freed, and hold the heap up
            del source
            give_back_memory()
            kept_bytes = 0


def _part(
    full_name: str,
    source: torch.Tensor,
    tensor: torch.Tensor,
    *,
    device: torch.device,
    unread: PretrainedTensors | None,
) -> torch.Tensor:
    """This rank's part of a tensor that rank 0 has, or reads: of a buffer, all of it."""
    whole = _whole(full_name, source, unread) if dist.get_rank() == 0 else torch.empty_like(source, device=device)
    whole = whole.to(device)
    if isinstance(tensor, DTensor):
        return distribute_tensor(whole, tensor.device_mesh, tensor.placements)
    whole = whole.contiguous()
    dist.broadcast(whole, src=0)
    return whole


def _whole(full_name: str, source: torch.Tensor, unread: PretrainedTensors | None) -> torch.Tensor:
    """A tensor of rank 0, read from its file where it is still there."""
    name = _name_in_files(full_name)
    return source.detach() if unread is None or name not in unread else unread.read(name)


def _name_in_files(full_name: str) -> str:
    """The name that a tensor has in the transformers model, which is called `model` in what is sharded."""
    return full_name.removeprefix("model.")


def _tensors(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, str, torch.Tensor]]:
    """Parameters, buffers and plain tensors (rotary embeddings keep some): their module, name there, and full name."""
    for path, module in model.named_modules():
        named = (
            module.named_parameters(recurse=False, remove_duplicate=False),
            module.named_buffers(recurse=False, remove_duplicate=False),
            ((name, value) for name, value in vars(module).items() if isinstance(value, torch.Tensor)),
        )
        for name, tensor in [found for each in named for found in each]:
            yield module, name, f"{path}.{name}", tensor


def _check(weights: dict[str, torch.Tensor], *, is_filled_later: bool, unread: PretrainedTensors | None) -> None:
    """ConfigError, on all ranks, where rank 0 has no weights or some rank another model."""
    mine = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()]
    missing = [
        name
        for name, tensor in weights.items()
        if tensor.is_meta
        and not (is_filled_later and isinstance(tensor, torch.nn.Parameter))
        and (unread is None or _name_in_files(name) not in unread)
    ]
    of_first: list[Any] = [mine, missing]
    dist.broadcast_object_list(of_first, src=0, group=cpu_group())
    theirs, missing = of_first
    if missing:
        raise ConfigError(
            f"the model of rank 0 has no weights for {missing[0]}: build it on the CPU, or with ModelConfig.build"
        )
    differ = sorted({name for name, *_ in {*mine} ^ {*theirs}})
    if gather([float(len(differ))], dist.get_world_size()).any():
        where = f" in {differ[0]}" if differ else ", on some rank"
        raise ConfigError(f"the model differs from that of rank 0{where}: build the same on all ranks")
