"""A mixture's experts -> the experts of each rank, by transformers' plan for the model.

A plan names the parameters that hold all experts of a block, one after another in their first dimension
("grouped_gemm"). Each rank of a group has some of these experts, as DTensors, and FSDP shards them again over the ranks
with the same experts. Ranks read different packs. Before a block's experts run, the ranks of a group send each other
their tokens; each rank runs its experts for all tokens, and sends back the sums of the experts' outputs (dispatch).

Other parts of a plan are not used: they make all ranks run the same tokens, and cut attention like tensor parallelism.
transformers' own hooks are for inference: they sum the experts' outputs outside of autograd, and each rank's gradients
of hidden states and of the router lack the experts of the other ranks.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import pad

from ...errors import ConfigError
from ...train.model.sharding import with_zeros
from ...train.run.distributed import takes_cpu_tensors
from ...versions.transformers import GIVES_WEIGHTS_OF_CHOSEN_EXPERTS
from .exchanges import exchanged, swapped

# Tokens of each rank -> the ranks with their experts -> the experts' outputs, back at the tokens' own rank.
#
# Ranks run packs of different lengths. Each rank sends as many rows as the longest pack of its group has: ranks
# exchange one number in a forward pass, instead of counts of tokens at each block of experts.

Inputs = Mapping[str, torch.Tensor]


class Dispatch(Protocol):
    """Arguments of a module of experts: for the tokens of this rank -> for the tokens of all ranks of a group."""

    def num_tokens(self, inputs: Inputs) -> int:
        """Number of tokens of this rank."""

    def sent(self, inputs: Inputs, *, longest: int) -> dict[str, torch.Tensor]:
        """Arguments of the module for this rank's experts. longest: the maximum tokens of a rank."""

    def returned(self, output: torch.Tensor) -> torch.Tensor:
        """Return the result for this rank's tokens and all experts."""


class ByToken:
    """Arguments of gpt-oss's experts: each token once, its experts, and their weights.

    hidden_states float[…, T, H], router_indices int64[T, k], routing_weights float[T, E] -> float[…, T, H]. Indices of
    other ranks' experts become num_own, one above the last, and the module skips them.
    """

    names = ("hidden_states", "router_indices", "routing_weights")

    def __init__(self, group: dist.ProcessGroup, num_experts: int):
        self._group, self._num_own = group, num_experts // group.size()
        self._shape = torch.Size()

    def num_tokens(self, inputs: Inputs) -> int:
        return inputs["routing_weights"].shape[0]

    def sent(self, inputs: Inputs, *, longest: int) -> dict[str, torch.Tensor]:
        hidden, indices, weights = (inputs[name] for name in self.names)
        self._shape = hidden.shape
        every = _gather(padded(indices, longest, value=-1), self._group)
        own = every - self._group.rank() * self._num_own
        of_ranks = padded(weights, longest).unflatten(1, (self._group.size(), -1)).transpose(0, 1)
        return {
            "hidden_states": gathered(padded(hidden.flatten(0, -2), longest), self._group)[None],
            "router_indices": own.where((every >= 0) & (own >= 0) & (own < self._num_own), self._num_own),
            "routing_weights": swapped(of_ranks, self._group).flatten(0, 1),  # [ranks * longest, E / ranks]
        }

    def returned(self, output: torch.Tensor) -> torch.Tensor:
        own = scattered(output.flatten(0, -2), self._group)
        return own[: self._shape[:-1].numel()].view(self._shape)


class ByExpert:
    """Arguments of Llama 4's experts: all tokens for each expert, with zeros for tokens of other experts.

    hidden_states float[E * T, H] -> float[E * T, H].
    """

    names = ("hidden_states",)

    def __init__(self, group: dist.ProcessGroup, num_experts: int):
        self._group, self._num_experts = group, num_experts
        self._num_tokens = 0

    def num_tokens(self, inputs: Inputs) -> int:
        return inputs["hidden_states"].shape[0] // self._num_experts

    def sent(self, inputs: Inputs, *, longest: int) -> dict[str, torch.Tensor]:
        hidden = inputs["hidden_states"].unflatten(0, (self._num_experts, -1))
        self._num_tokens = hidden.shape[1]
        of_ranks = padded(hidden, longest, dim=1).unflatten(0, (self._group.size(), -1))
        own = swapped(of_ranks, self._group)  # [ranks, E / ranks, longest, H]
        return {"hidden_states": own.transpose(0, 1).flatten(0, 2)}

    def returned(self, output: torch.Tensor) -> torch.Tensor:
        own = output.view(self._num_experts // self._group.size(), self._group.size(), -1, output.shape[-1])
        of_experts = swapped(own.transpose(0, 1), self._group).flatten(0, 1)  # [E, longest, H]
        return of_experts[:, : self._num_tokens].flatten(0, 1)


class OwnChoices:
    """Tokens with their experts -> rows for this rank's experts, one per token and expert; and back.

    hidden_states float[T, H], indices int64[T, k], weights float[T, k] -> float[n, H], int64[n, 1], float[n, 1]. The
    last row has weight 0: even without any tokens, all parameters of experts get a gradient.
    """

    names = (("hidden_states", "top_k_index", "top_k_weights"), ByToken.names)  # names of the arguments of experts

    def __init__(self, group: dist.ProcessGroup, num_experts: int):
        self._num_own = num_experts // group.size()
        self._first = group.rank() * self._num_own
        self._choices = torch.Size()
        self._chosen = torch.Tensor()

    def rows(self, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = indices.flatten() - self._first
        self._choices = indices.shape
        self._chosen = ((own >= 0) & (own < self._num_own)).nonzero()[:, 0]
        tokens = pad(self._chosen // indices.shape[1], (0, 1))
        of_rows = (own[self._chosen], weights.flatten()[self._chosen])
        return hidden[tokens], *(pad(each, (0, 1))[:, None] for each in of_rows)

    def joined(self, made: torch.Tensor) -> torch.Tensor:
        """Sum the experts' outputs of rows, float[n, H], for each token: float[T, H], zeros for tokens without experts
        here.
        """
        each = made.new_zeros(self._choices.numel(), made.shape[-1]).index_copy(0, self._chosen, made[:-1])
        return each.view(*self._choices, -1).sum(dim=1)


class ByChoice:
    """Arguments of experts in transformers 5: each token once, its experts, and their weights.

    hidden_states float[…, T, H], indices int64[T, k], weights float[T, k] -> float[…, T, H].
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int):
        self._group, self._own = group, OwnChoices(group, num_experts)
        self._shape = torch.Size()

    def num_tokens(self, inputs: Inputs) -> int:
        return [*inputs.values()][1].shape[0]

    def sent(self, inputs: Inputs, *, longest: int) -> dict[str, torch.Tensor]:
        hidden, indices, weights = inputs.values()
        self._shape = hidden.shape
        rows = self._own.rows(
            gathered(padded(hidden.flatten(0, -2), longest), self._group),
            _gather(padded(indices, longest, value=-1), self._group),
            gathered(padded(weights, longest), self._group),
        )
        return dict(zip(inputs, rows, strict=True))

    def returned(self, output: torch.Tensor) -> torch.Tensor:
        own = scattered(self._own.joined(output), self._group)
        return own[: self._shape[:-1].numel()].view(self._shape)


class Longest:
    """Maximum number of tokens that a rank of a group runs at once."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self.num_tokens = 0

    def ask(self, num_tokens: int, device: torch.device) -> None:
        """Exchange the numbers of all ranks of the group, each of which calls it; on the CPU if the group can."""
        longest = torch.tensor(num_tokens, device="cpu" if takes_cpu_tensors(self._group) else device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self._group)
        self.num_tokens = int(longest)


def padded(tokens: torch.Tensor, longest: int, *, dim: int = 0, value: float = 0) -> torch.Tensor:
    """Tokens along a dimension, with padding after them.

    >>> padded(torch.ones(1, 2, 1), 3, dim=1).flatten().tolist()
    [1.0, 1.0, 0.0]
    """
    missing = longest - tokens.shape[dim]
    return pad(tokens, (0, 0) * (tokens.ndim - 1 - dim) + (0, missing), value=value) if missing else tokens


def gathered(tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the tokens of all ranks: [n, …] -> [ranks * n, …]; gradients are summed."""
    return exchanged(tokens, group, forth=_gather, back=_scatter)


def scattered(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum the rows of all ranks; return the sum for this rank's tokens: [ranks * n, …] -> [n, …]."""
    return exchanged(rows, group, forth=_scatter, back=_gather)


def averaged(parameter: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a parameter of only this rank; its gradient, the sum over the packs of all ranks of a group, is divided
    into a mean.

    FSDP averages over the ranks that have the parameter; gradients of all other parameters are averaged over all ranks.
    """
    return exchanged(parameter, group, forth=_same, back=_divide)


def run_again_to(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor; when a block is run again for its backward pass, everything before the copy runs.

    torch stops recomputing once it has all tensors for the backward pass. A rank whose experts get no tokens would stop
    earlier, and the other ranks would wait for its communication.
    """
    made: torch.Tensor = _Needed.apply(tensor)
    return made


class _Needed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor.new_empty(0))
        return tensor.clone()  # not a view: FSDP's hooks would not follow it

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _ = ctx.saved_tensors
        return gradient


def _same(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return tensor.view_as(tensor)


def _divide(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return tensor / group.size()


def _gather(tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    made = tokens.new_empty(group.size() * tokens.shape[0], *tokens.shape[1:])
    dist.all_gather_into_tensor(made, tokens.contiguous(), group=group)
    return made


def _scatter(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    made = rows.new_empty(rows.shape[0] // group.size(), *rows.shape[1:])
    dist.reduce_scatter_tensor(made, rows.contiguous(), group=group)
    return made


_OF_EXPERTS = "grouped_gemm"  # a plan's word for parameters of all experts of a block
_EXPERTS = "moe_tp_experts"  # a plan's word for the module of experts, in a plan only for tensor parallelism
_CALLS: Mapping[tuple[str, ...], Callable[[dist.ProcessGroup, int], Dispatch]] = {
    **(dict.fromkeys(OwnChoices.names, ByChoice) if GIVES_WEIGHTS_OF_CHOSEN_EXPERTS else {ByToken.names: ByToken}),
    ByExpert.names: ByExpert,
}


def split_experts(model: Any, mesh: DeviceMesh) -> list[torch.nn.Module]:
    """Give each rank of a mesh some experts of a transformers model, which has no weights yet.

    Return the modules that hold experts, for shard_experts. ConfigError for a model without a plan, for experts with
    unsupported arguments, and for a degree that does not divide the experts.
    """
    longest = Longest(mesh.get_group())
    found = [model.get_submodule(name) for name in _names(model)]
    for number, experts in enumerate(found):
        dispatch, num_experts = _dispatch(experts), 0
        for name, parameter in list(experts.named_parameters(recurse=False)):
            num_experts = parameter.shape[0]
            if num_experts % mesh.size():
                raise ConfigError(
                    f"train.expert_parallel {mesh.size()} does not divide the {num_experts} experts of "
                    f"{type(model).__name__}: choose a divisor"
                )
            part = distribute_tensor(parameter.data, mesh, [Shard(0)])
            setattr(experts, name, torch.nn.Parameter(part, requires_grad=parameter.requires_grad))
        experts.num_experts = num_experts // mesh.size()
        _Experts(dispatch(mesh.get_group(), num_experts), longest, mesh, asks=number == 0).hook(experts)
    return found


def shard_experts(experts: torch.nn.Module, mesh: DeviceMesh, *, policy: MixedPrecisionPolicy, reshard: bool) -> None:
    """Shard a module of split_experts over the ranks that have the same experts.

    Each rank has some of the experts whole, or, if the ranks do not divide their number, a part of every expert.
    ConfigError if equal parts are not possible.
    """
    num_ranks = mesh["shard"].size()
    parts = {name: _part(each) for name, each in experts.named_parameters(recurse=False)}
    num_own = min(len(each) for each in parts.values())
    dim = 1 if num_own % num_ranks else 0
    for name, part in parts.items():
        if part.shape[dim] % num_ranks:
            raise ConfigError(
                f"{num_ranks} ranks share the same {num_own} experts by train.expert_parallel, and divide neither "
                f"these nor the {part.shape[1]} rows of {name}: choose another degree, or other train.shard_ranks"
            )
    fully_shard(
        experts,
        mesh=mesh,
        mp_policy=policy,
        reshard_after_forward=reshard,
        shard_placement_fn=lambda _: Shard(dim),
    )


def _part(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _names(model: Any) -> list[str]:
    """Names of the modules whose parameters hold experts, by the model's plan, in their order."""
    # The plans of gpt-oss (until 5.0) and of Llama 4 (late versions) for experts are in their plans for tensor
    # parallelism.
    plans: list[Mapping[str, str]] = [getattr(model, name, None) or {} for name in ("_ep_plan", "_tp_plan")]
    words = (_OF_EXPERTS, _EXPERTS)
    plan, word = next(((each, word) for each in plans for word in words if word in each.values()), ({}, ""))
    if not word:
        is_cut = any("experts" in name for name in plans[1])
        raise ConfigError(
            f"transformers has no plan for expert parallelism of {type(model).__name__} (its models with a plan are "
            "gpt-oss, Llama 4 and, from 5.0 on, most mixtures of experts): set train.expert_parallel to 1. Experts are "
            f"then sharded over ranks like other weights{', and train.tensor_parallel cuts them' if is_cut else ''}"
        )
    named = model.named_parameters() if word == _OF_EXPERTS else model.named_modules()
    names = [name for name, _ in named if plan.get(re.sub(r"\d+", "*", name)) == word]
    if not names:
        raise ConfigError(
            f"{type(model).__name__} lacks the parameters of its experts in transformers' plan (such as "
            f"{next(name for name, each in plan.items() if each == word)}; an adapter of experts has other "
            "parameters): set train.expert_parallel to 1"
        )
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names)) if word == _OF_EXPERTS else names


def _dispatch(experts: torch.nn.Module) -> Callable[[dist.ProcessGroup, int], Dispatch]:
    names = tuple(inspect.signature(experts.forward).parameters)
    if names not in _CALLS:
        raise ConfigError(
            f"{type(experts).__name__} takes {', '.join(names)}, but train.expert_parallel supports only experts that "
            f"take {' or '.join(map(', '.join, _CALLS))}: set it to 1"
        )
    return _CALLS[names]


class _Experts:
    """Runs this rank's experts of a module for the tokens of all ranks of its group.

    asks: it is the first in the model, where the ranks exchange their numbers of tokens.
    """

    def __init__(self, dispatch: Dispatch, longest: Longest, mesh: DeviceMesh, *, asks: bool):
        self._dispatch, self._longest, self._asks, self._group = dispatch, longest, asks, mesh.get_group()
        self._whole: dict[str, Any] = {}
        self._used: list[torch.Tensor] = []  # other ranks, or FSDP, wait for their gradients

    def hook(self, experts: torch.nn.Module) -> None:
        """Register the hooks, before the module is sharded: FSDP's hooks must come first and last."""
        experts.register_forward_pre_hook(self._begin, with_kwargs=True)
        experts.register_forward_hook(self._end)

    def _begin(
        self, experts: torch.nn.Module, given: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        inputs = inspect.signature(experts.forward).bind(*given, **named).arguments
        if self._asks:
            self._longest.ask(self._dispatch.num_tokens(inputs), inputs["hidden_states"].device)
        self._whole = dict(experts._parameters)
        for name, each in self._whole.items():
            if isinstance(each, DTensor):
                experts._parameters[name] = averaged(each.to_local(), self._group)  # type: ignore[assignment]
        sent = self._dispatch.sent(inputs, longest=self._longest.num_tokens)
        everything = (*sent.values(), *experts._parameters.values())
        self._used = [each for each in everything if each is not None and each.requires_grad]
        return tuple(sent.values()), {}

    def _end(self, experts: torch.nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        experts._parameters.update(self._whole)
        used, self._whole, self._used = self._used, {}, []
        if used and not output.requires_grad:  # no token has any of this rank's experts
            output = with_zeros(output, used)
        return run_again_to(self._dispatch.returned(output))
