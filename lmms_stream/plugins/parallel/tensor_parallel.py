"""A model's matrices -> each rank's part, by transformers' plan for the model.

A plan names linear maps and their cuts. "colwise": each rank computes some of the outputs, from the whole input.
"rowwise": from its part of the input, each rank computes a part of the sum that is the output. Between the two, e.g. in
an attention or an MLP, ranks have different heads or channels, and nothing is sent (Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053). "colwise_rep" joins the outputs, "rowwise_rep" cuts the input. "moe_tp_experts" names
modules whose parameters hold all experts of a block; transformers cuts each expert, like an MLP. Here each rank has
some experts whole, and computes their outputs for the tokens: a part of the sum that is the output.

transformers applies its plans for inference while it loads weights. Here weights come later, from rank 0, FSDP shards
the parts again, and every parameter needs its whole gradient. Therefore all parameters are DTensors of the tensor
parallel ranks; parameters outside of the plan are equal on each rank, and modules compute with the local tensors.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Set
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from ...errors import ConfigError
from ...train.model.adapters import adapter_of
from ...versions.transformers import plan_of_cuts
from .exchanges import exchanged
from .expert_parallel import OwnChoices

# A plan's word -> the cuts of the weight and the bias of a linear map.
_CUTS: Mapping[str, tuple[Placement, Placement]] = {
    "colwise": (Shard(0), Shard(0)),
    "colwise_rep": (Shard(0), Shard(0)),
    "rowwise": (Shard(1), Replicate()),
    "rowwise_rep": (Shard(1), Replicate()),
    "replicate": (Replicate(), Replicate()),
    "replicated_with_grad_allreduce": (Replicate(), Replicate()),
    "moe_tp_experts": (Shard(0), Shard(0)),
}
_EXPERTS = "moe_tp_experts"
_OF_OWN_HEADS = "replicated_with_grad_allreduce"  # a norm that sees only its rank's heads
_LINEAR = ("colwise", "colwise_rep", "rowwise", "rowwise_rep")
_HEAD_NORMS = ("q_norm", "k_norm")  # norms of single heads: each rank sees only its own heads


def cut_model(model: Any, mesh: DeviceMesh) -> None:
    """Give each rank of a mesh its part of a transformers model, which has no weights yet, and make it compute with
    this part.

    All ranks of the mesh run the model on the same inputs, and get the same outputs and the same losses. ConfigError
    for a model without a plan, for a plan with unsupported cuts, and for a degree that does not divide the heads.
    """
    plan = _plan(model)
    words = {name: plan[key] for name, _ in model.named_modules() if (key := re.sub(r"\d+", "*", name)) in plan}
    _check_words(model, words)
    _check_heads(model, words, mesh.size())
    words = {name: word for name, word in words.items() if _divides(model, name, word, mesh.size())}
    shared = _used_by(model)
    words = {name: word for name, word in words.items() if not _is_shared(model.get_submodule(name), words, shared)}
    inner = {at: cut for name, word in words.items() for at, cut in _inner(model, name, word).items()}
    partial = {*_inside(model, {*words, *inner}, words), *(at for at, cut in inner.items() if cut.is_partial)}
    partial |= {name for name, word in words.items() if word == _OF_OWN_HEADS}
    inputs = {_parent(name): _SharedInput() for name, word in words.items() if word.startswith("rowwise")}
    made: dict[int, torch.nn.Parameter] = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        word = words.get(name, "replicate")
        if not own and name not in words:
            continue
        cuts = dict(zip(("weight", "bias"), inner[name].placements if name in inner else _CUTS[word], strict=True))
        choices = None
        if word == _EXPERTS:
            cuts, choices = dict.fromkeys(own, Shard(0)), OwnChoices(mesh.get_group(), module.num_experts)
            module.num_experts //= mesh.size()
        for key, parameter in own.items():
            if id(parameter) not in made:
                whole = distribute_tensor(parameter.data, mesh, [cuts.get(key, Replicate())])
                made[id(parameter)] = torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)
            setattr(module, key, made[id(parameter)])
        shared_input = inputs.get(_parent(name))
        _Part(word=word, mesh=mesh, is_partial=name in partial, shared=shared_input, choices=choices).hook(module)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


class _SharedInput:
    """Shared input of several maps of a block: its gradient is summed over the maps, then over ranks, once."""

    _given: torch.Tensor | None = None
    _copied: torch.Tensor | None = None

    def copied(self, given: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        if given is not self._given or self._copied is None:
            self._given, self._copied = given, copied(given, group)
        return self._copied

    def forget(self) -> None:
        self._given = self._copied = None


class _Part:
    """Runs a module with the local tensors of its parameters. is_partial: it sees only results of this rank's part.

    shared: input shared by the maps before a rowwise map, which comes last. choices: of a module of experts.
    """

    def __init__(
        self,
        *,
        word: str,
        mesh: DeviceMesh,
        is_partial: bool,
        shared: _SharedInput | None,
        choices: OwnChoices | None,
    ):
        self._word, self._mesh = word, mesh
        self._shared, self._choices = shared, choices
        self._of_gradients = [Partial()] if is_partial else None  # sums over ranks
        self._bias: torch.Tensor | None = None
        self._whole: dict[str, Any] = {}

    def hook(self, module: torch.nn.Module) -> None:
        """Register the hooks, before the module is sharded: FSDP's hooks must come first and last."""
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def _begin(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self._whole = dict(module._parameters)
        for name, each in self._whole.items():
            if isinstance(each, DTensor):
                local = each.to_local(grad_placements=self._of_gradients)
                module._parameters[name] = local  # type: ignore[assignment]
        group = self._mesh.get_group()
        if self._choices is not None:
            hidden, indices, weights = inputs
            return self._choices.rows(copied(hidden, group), indices, copied(weights, group))
        if self._word not in _LINEAR:
            return inputs
        given, *others = inputs
        if self._word in ("colwise", "colwise_rep"):
            return copied(given, group) if self._shared is None else self._shared.copied(given, group), *others
        if self._shared is not None:
            self._shared.forget()
        if (bias := module._parameters.get("bias")) is not None:
            self._bias, module._parameters["bias"] = bias, None
        return split(given, group) if self._word == "rowwise_rep" else given, *others

    def _end(self, module: torch.nn.Module, _: Any, output: Any) -> Any:
        module._parameters.update(self._whole)
        self._whole = {}
        group = self._mesh.get_group()
        if self._choices is not None:
            return summed(self._choices.joined(output), group)
        if self._word == "colwise_rep":
            return gathered(output, group)
        if self._word in ("rowwise", "rowwise_rep"):
            output, bias = summed(output, group), self._bias
            self._bias = None
            return output if bias is None else output + bias
        return output


def _plan(model: Any) -> dict[str, str]:
    """Names of modules, with * for numbers -> a word for their cuts."""
    adapter = adapter_of(model)
    if adapter is not None and (adapter.config.get("peft_type") != "LORA" or adapter.config.get("use_dora")):
        raise ConfigError(
            f"train.tensor_parallel cuts adapters of peft_type LORA without use_dora alone, and this one is "
            f"{adapter.config.get('peft_type')}: set it to 1, as ranks share the frozen weights in any case (FSDP)"
        )
    plan = plan_of_cuts(model)
    if not any(word != "colwise_rep" or "*" in name for name, word in plan.items()):  # only the head
        raise ConfigError(
            f"transformers has no plan for tensor parallelism of {type(model).__name__}: set train.tensor_parallel to "
            "1, and shard the model over more ranks"
        )
    return plan


def _check_words(model: Any, words: Mapping[str, str]) -> None:
    for name, word in words.items():
        module = model.get_submodule(name)
        kind = type(module).__name__
        is_linear = isinstance(base_of(module), torch.nn.Linear)
        is_known = _are_experts(module) if word == _EXPERTS else word in _CUTS and (is_linear or word not in _LINEAR)
        if not is_known or _adds_bias(module, word):
            raise ConfigError(
                f"transformers' plan for {type(model).__name__} cuts {name} ({kind}) by {word!r}, which is not here: "
                "set train.tensor_parallel to 1, and shard the model over more ranks"
            )


def _are_experts(module: torch.nn.Module) -> bool:
    """Return whether a module has only parameters of its experts, one after another, and supported arguments."""
    own = list(module.parameters(recurse=False))
    is_called = tuple(inspect.signature(module.forward).parameters) in OwnChoices.names
    count = getattr(module, "num_experts", None)
    return is_called and len(own) == len(list(module.parameters())) and all(len(each) == count for each in own)


def _check_heads(model: Any, words: Mapping[str, str], degree: int) -> None:
    """Raise ConfigError if the projections to heads are cut, and the degree does not divide the heads."""
    if not any(word == "colwise" and name.endswith(("q_proj", "k_proj")) for name, word in words.items()):
        return
    config = model.config.get_text_config()
    heads = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    counts = {name: int(count) for name, count in heads.items() if count}
    for name, count in counts.items():
        if count % degree:
            raise ConfigError(
                f"train.tensor_parallel {degree} does not divide {name} {count} of {type(model).__name__}: choose a "
                f"divisor of {gcd(*counts.values())}"
            )


def _divides(model: Any, name: str, word: str, degree: int) -> bool:
    """Return whether a map can be cut. A head with an indivisible vocabulary stays whole; ConfigError for other
    maps.
    """
    module = model.get_submodule(name)
    cut = _CUTS[word][0]
    if word == _EXPERTS:
        if module.num_experts % degree:
            raise ConfigError(
                f"train.tensor_parallel {degree} does not divide the {module.num_experts} experts of {name}: choose a "
                f"divisor of {module.num_experts}"
            )
        return True
    if not isinstance(cut, Shard) or module.weight.shape[cut.dim] % degree == 0:
        return True
    if word == "colwise_rep":
        return False
    count, what = module.weight.shape[cut.dim], ("outputs", "inputs")[cut.dim]
    raise ConfigError(
        f"train.tensor_parallel {degree} does not divide the {count} {what} of {name}: choose a divisor of {count}"
    )


def _used_by(model: torch.nn.Module) -> dict[int, list[str]]:
    """Id of each parameter -> names of the modules that have it."""
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            found.setdefault(id(parameter), []).append(name)
    return found


def _is_shared(module: torch.nn.Module, words: Mapping[str, str], shared: Mapping[int, list[str]]) -> bool:
    """Return whether a map shares its weight with a module that is cut differently, e.g. a head with an embedding."""
    return any(len({words.get(name) for name in shared[id(each)]}) > 1 for each in module.parameters(recurse=False))


class _Inner(NamedTuple):
    """Cuts of a map inside of another map. is_partial: its gradient is a sum over ranks."""

    placements: tuple[Placement, Placement]
    is_partial: bool = False


def base_of(module: torch.nn.Module) -> torch.nn.Module:
    """Return the map inside of peft's wrapper, or the module itself."""
    base = getattr(module, "base_layer", None)
    return base if isinstance(base, torch.nn.Module) else module


def _adds_bias(module: torch.nn.Module, word: str) -> bool:
    """Return whether each rank would add the bias of a map with an adapter, whose outputs are summed over ranks with
    the map's.
    """
    has_bias = any(getattr(each, "bias", None) is not None for each in module.modules() if each is not module)
    return base_of(module) is not module and word.startswith("rowwise") and has_bias


def _inner(model: Any, name: str, word: str) -> dict[str, _Inner]:
    """Cuts of the maps inside of a map with LoRA: x W + x A B. A rowwise W cuts A, a colwise W cuts B, like W itself.

    The other of the two is equal on each rank, and its gradient is a sum over ranks.
    """
    module = model.get_submodule(name)
    if base_of(module) is module or word not in _LINEAR:
        return {}
    cuts, whole = _CUTS[word], _CUTS["replicate"]
    of_outputs = word.startswith("colwise")
    made = {f"{name}.base_layer": _Inner(cuts)}
    for adapter in module.lora_A:
        made[f"{name}.lora_A.{adapter}"] = _Inner(whole, is_partial=True) if of_outputs else _Inner(cuts)
        made[f"{name}.lora_B.{adapter}"] = _Inner(cuts) if of_outputs else _Inner(whole, is_partial=True)
    return made


def _inside(model: Any, known: Set[str], words: Mapping[str, str]) -> Iterator[str]:
    """Yield modules without a cut that see only this rank's heads; ConfigError for unknown modules.

    Their gradients are sums over ranks.
    """
    parents = {_parent(name) for name, word in words.items() if word == "colwise"}
    for parent in sorted(parents):
        for inner, module in model.get_submodule(parent).named_modules():
            name = f"{parent}.{inner}" if inner else parent
            own = dict(module.named_parameters(recurse=False))
            if not own or name in known:
                continue
            head_dim = getattr(model.get_submodule(parent), "head_dim", None)
            if inner not in _HEAD_NORMS or any(each.shape != (head_dim,) for each in own.values()):
                raise ConfigError(
                    f"transformers' plan for {type(model).__name__} cuts maps of {parent} and has no entry for "
                    f"{name}.{next(iter(own))} between them: set train.tensor_parallel to 1"
                )
            yield name


# Communication of tensor parallel ranks: activations forward, their gradients backward.


def copied(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a tensor that all ranks have, for different computations: its gradient is the sum of theirs."""
    return exchanged(tensor, group, forth=_same, back=_sum)


def summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum a tensor over ranks; all ranks get the sum."""
    return exchanged(tensor, group, forth=_sum, back=_same)


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the parts of all ranks in the last dimension: [..., n] -> [..., n * ranks]."""
    return exchanged(tensor, group, forth=_join, back=_own)


def split(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part of the last dimension of a tensor that all ranks have: [..., n] -> [..., n / ranks]."""
    return exchanged(tensor, group, forth=_own, back=_join)


def _same(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return tensor.view_as(tensor)


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _join(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = part.new_empty(group.size(), *part.shape)
    dist.all_gather_into_tensor(parts.view(-1), part.reshape(-1), group=group)
    return torch.cat(parts.unbind(), dim=-1)


def _own(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return whole.chunk(group.size(), dim=-1)[group.rank()].contiguous()
