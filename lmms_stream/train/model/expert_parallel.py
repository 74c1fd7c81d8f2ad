"""A mixture's experts -> those of each rank, by the plan that transformers has for the model.

A plan names the parameters that hold all experts of a block, one after another in their first dimension
("grouped_gemm"): each rank of a group has some of these experts, as DTensors, and FSDP shards them again over the ranks
that have the same. Ranks read packs of their own. Before a block's experts run, the ranks of a group send each other
their tokens; each runs its experts for the tokens of all, and the sums of what experts make go back (dispatch).

The rest of a plan is not followed: it has all ranks run the same tokens, and cuts attention as tensor parallelism does.
transformers' own hooks are for inference. They sum what experts make outside of autograd, so that each rank's gradients
of hidden states and of the router lack the experts of the others.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ...errors import ConfigError
from ...versions.transformers import GIVES_WEIGHTS_OF_CHOSEN_EXPERTS
from .dispatch import ByChoice, ByExpert, ByToken, Dispatch, Longest, OwnChoices, averaged, run_again_to
from .unused import with_zeros

_OF_EXPERTS = "grouped_gemm"  # a plan's word for parameters of all experts of a block
_EXPERTS = "moe_tp_experts"  # for the module that has them, where a plan for tensor parallelism alone is there
_CALLS: Mapping[tuple[str, ...], Callable[[dist.ProcessGroup, int], Dispatch]] = {
    **(dict.fromkeys(OwnChoices.names, ByChoice) if GIVES_WEIGHTS_OF_CHOSEN_EXPERTS else {ByToken.names: ByToken}),
    ByExpert.names: ByExpert,
}


def split_experts(model: Any, mesh: DeviceMesh) -> list[torch.nn.Module]:
    """Have each rank of a mesh hold and run some experts of a transformers model, which has no weights yet.

    Returns the modules that hold experts, for shard_experts. ConfigError for a model without a plan, whose experts run
    otherwise than is known here, and for a degree that does not divide the experts.
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

    Each has some of them whole, or, where the ranks do not divide their number, a part of every one. ConfigError where
    they cannot have equal parts.
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
    """The modules whose parameters hold experts, by the model's plan, in their order."""
    # That of gpt-oss, until 5.0, and that of Llama 4, in late versions, is in its plan for tensor parallelism.
    plans: list[Mapping[str, str]] = [getattr(model, name, None) or {} for name in ("_ep_plan", "_tp_plan")]
    words = (_OF_EXPERTS, _EXPERTS)
    plan, word = next(((each, word) for each in plans for word in words if word in each.values()), ({}, ""))
    if not word:
        is_cut = any("experts" in name for name in plans[1])
        raise ConfigError(
            f"transformers has no plan for expert parallelism of {type(model).__name__}, as it has for those of "
            "gpt-oss and Llama 4 and, from 5.0 on, of most mixtures: set train.expert_parallel to 1. Experts are "
            "sharded over ranks as other weights are"
            f"{', and train.tensor_parallel cuts them' if is_cut else ''}"
        )
    named = model.named_parameters() if word == _OF_EXPERTS else model.named_modules()
    names = [name for name, _ in named if plan.get(re.sub(r"\d+", "*", name)) == word]
    if not names:
        raise ConfigError(
            f"{type(model).__name__} has none of the parameters that transformers' plan names for its experts (as "
            f"{next(name for name, each in plan.items() if each == word)}; an adapter of them has others): set "
            "train.expert_parallel to 1"
        )
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names)) if word == _OF_EXPERTS else names


def _dispatch(experts: torch.nn.Module) -> Callable[[dist.ProcessGroup, int], Dispatch]:
    names = tuple(inspect.signature(experts.forward).parameters)
    if names not in _CALLS:
        raise ConfigError(
            f"{type(experts).__name__} takes {', '.join(names)}, and train.expert_parallel knows experts that take "
            f"{' or '.join(map(', '.join, _CALLS))}: set it to 1"
        )
    return _CALLS[names]


class _Experts:
    """Runs a module of experts with those of this rank, for the tokens of all ranks of its group.

    asks: it is the first in the model, so that its ranks ask each other how many tokens they run.
    """

    def __init__(self, dispatch: Dispatch, longest: Longest, mesh: DeviceMesh, *, asks: bool):
        self._dispatch, self._longest, self._asks, self._group = dispatch, longest, asks, mesh.get_group()
        self._whole: dict[str, Any] = {}
        self._used: list[torch.Tensor] = []  # whose gradients other ranks wait for, or FSDP

    def hook(self, experts: torch.nn.Module) -> None:
        """Before the module is sharded, whose hooks are to come first and last."""
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
        if used and not output.requires_grad:  # no token went to any of this rank's experts
            output = with_zeros(output, used)
        return run_again_to(self._dispatch.returned(output))
