"""A model's matrices -> each rank's part of them, by the plan that transformers has for the model.

A plan names linear maps and how they are cut. "colwise": each rank computes some of the outputs, of the whole input.
"rowwise": of its part of the input, each rank computes a part of the sum that is the output. Between the two, as in an
attention or an MLP, ranks have heads or channels of their own, and nothing is sent (Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053). "colwise_rep" joins the outputs, "rowwise_rep" cuts the input.

transformers applies its plans for inference as it loads weights. Here weights come later, from rank 0, FSDP shards the
parts again, and every parameter is to have its whole gradient: so all parameters are DTensors of the tensor parallel
ranks, those that no plan names the same on each, and modules compute with the local tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import gcd
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from ...errors import ConfigError
from .adapters import adapter_of
from .cuts import copied, gathered, split, summed

# How a plan's word cuts the weight of a linear map, and its bias.
_CUTS: Mapping[str, tuple[Placement, Placement]] = {
    "colwise": (Shard(0), Shard(0)),
    "colwise_rep": (Shard(0), Shard(0)),
    "rowwise": (Shard(1), Replicate()),
    "rowwise_rep": (Shard(1), Replicate()),
    "replicate": (Replicate(), Replicate()),
}
_HEAD_NORMS = ("q_norm", "k_norm")  # of each head by itself: each rank sees those of its heads


def cut_model(model: Any, mesh: DeviceMesh) -> None:
    """Have each rank of a mesh hold and compute its part of a transformers model, which has no weights yet.

    All ranks of the mesh run the model on the same inputs, and get the same outputs and the same losses. ConfigError
    for a model without a plan, with a plan that cuts what cannot be cut here, and where the degree divides no heads.
    """
    plan = _plan(model)
    words = {name: plan[key] for name, _ in model.named_modules() if (key := re.sub(r"\d+", "*", name)) in plan}
    _check_words(model, words)
    _check_heads(model, words, mesh.size())
    words = {name: word for name, word in words.items() if _divides(model, name, word, mesh.size())}
    shared = _used_by(model)
    words = {name: word for name, word in words.items() if not _is_shared(model.get_submodule(name), words, shared)}
    partial = set(_inside(model, words))
    made: dict[int, torch.nn.Parameter] = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if not own:
            continue
        cuts = dict(zip(("weight", "bias"), _CUTS[words.get(name, "replicate")], strict=True))
        for key, parameter in own.items():
            if id(parameter) not in made:
                whole = distribute_tensor(parameter.data, mesh, [cuts.get(key, Replicate())])
                made[id(parameter)] = torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)
            setattr(module, key, made[id(parameter)])
        _Part(word=words.get(name, "replicate"), mesh=mesh, is_partial=name in partial).hook(module)


@contextmanager
def cut_heads_told(degree: int) -> Iterator[None]:
    """Have an error of the proof that a model runs on packs say that its heads are cut, if they are."""
    try:
        yield
    except ConfigError as error:
        if degree == 1:
            raise
        raise ConfigError(
            f"{error}. train.tensor_parallel {degree} cuts its heads, which not every model's code can take: with 1 "
            "it may run"
        ) from error


class _Part:
    """Runs a module with the local tensors of its parameters. is_partial: it sees what this rank's part makes alone."""

    def __init__(self, *, word: str, mesh: DeviceMesh, is_partial: bool):
        self._word, self._mesh = word, mesh
        self._of_gradients = [Partial()] if is_partial else None  # to be summed over ranks
        self._bias: torch.Tensor | None = None
        self._whole: dict[str, Any] = {}

    def hook(self, module: torch.nn.Module) -> None:
        """Before the module is sharded, whose hooks are to come first and last."""
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def _begin(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self._whole = dict(module._parameters)
        for name, each in self._whole.items():
            if isinstance(each, DTensor):
                local = each.to_local(grad_placements=self._of_gradients)
                module._parameters[name] = local  # type: ignore[assignment]
        if self._word == "replicate":
            return inputs
        given, *others = inputs
        group = self._mesh.get_group()
        if self._word in ("colwise", "colwise_rep"):
            return copied(given, group), *others
        self._bias, module._parameters["bias"] = module._parameters.get("bias"), None
        return split(given, group) if self._word == "rowwise_rep" else given, *others

    def _end(self, module: torch.nn.Module, _: Any, output: Any) -> Any:
        module._parameters.update(self._whole)
        self._whole = {}
        group = self._mesh.get_group()
        if self._word == "colwise_rep":
            return gathered(output, group)
        if self._word in ("rowwise", "rowwise_rep"):
            output, bias = summed(output, group), self._bias
            self._bias = None
            return output if bias is None else output + bias
        return output


def _plan(model: Any) -> dict[str, str]:
    """Names of modules, with * for numbers -> how they are cut."""
    if adapter_of(model) is not None:
        raise ConfigError(
            "train.tensor_parallel does not cut adapters: set it to 1, as ranks share the frozen weights in any case "
            "(FSDP), or train the whole model"
        )
    # transformers 4.57 replaces what a class says of its head by what the config says of the blocks.
    plan: dict[str, str] = {
        **(getattr(type(model), "_tp_plan", None) or {}),
        **(getattr(model, "_tp_plan", None) or {}),
    }
    if not any(word != "colwise_rep" or "*" in name for name, word in plan.items()):  # of the head alone
        raise ConfigError(
            f"transformers has no plan for tensor parallelism of {type(model).__name__}: set train.tensor_parallel to "
            "1, and shard the model over more ranks"
        )
    return plan


def _check_words(model: Any, words: Mapping[str, str]) -> None:
    for name, word in words.items():
        module = model.get_submodule(name)
        kind = type(module).__name__
        if word not in _CUTS or (word != "replicate" and not isinstance(module, torch.nn.Linear)):
            raise ConfigError(
                f"transformers' plan for {type(model).__name__} cuts {name} ({kind}) by {word!r}, which is not here: "
                "set train.tensor_parallel to 1, and shard the model over more ranks"
            )


def _check_heads(model: Any, words: Mapping[str, str], degree: int) -> None:
    """Heads are cut where the projections to them are, and nothing joins their outputs."""
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
    """Whether a map can be cut; a head whose vocabulary cannot be stays whole, others are refused."""
    module = model.get_submodule(name)
    cut = _CUTS[word][0]
    if not isinstance(cut, Shard) or module.weight.shape[cut.dim] % degree == 0:
        return True
    if word == "colwise_rep":
        return False
    count, what = module.weight.shape[cut.dim], ("outputs", "inputs")[cut.dim]
    raise ConfigError(
        f"train.tensor_parallel {degree} does not divide the {count} {what} of {name}: choose a divisor of {count}"
    )


def _used_by(model: torch.nn.Module) -> dict[int, list[str]]:
    """The names of the modules that have each parameter, by its id."""
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            found.setdefault(id(parameter), []).append(name)
    return found


def _is_shared(module: torch.nn.Module, words: Mapping[str, str], shared: Mapping[int, list[str]]) -> bool:
    """Whether a map has the weight of another module that is not cut as it is, as a head that of an embedding."""
    return any(len({words.get(name) for name in shared[id(each)]}) > 1 for each in module.parameters(recurse=False))


def _inside(model: Any, words: Mapping[str, str]) -> Iterator[str]:
    """The modules that no plan cuts, and that see this rank's heads alone; ConfigError for those that are not known.

    Their gradients are sums over ranks.
    """
    parents = {name.rpartition(".")[0] for name, word in words.items() if word == "colwise"}
    for parent in sorted(parents):
        for inner, module in model.get_submodule(parent).named_modules():
            name = f"{parent}.{inner}" if inner else parent
            own = dict(module.named_parameters(recurse=False))
            if not own or name in words:
                continue
            head_dim = getattr(model.get_submodule(parent), "head_dim", None)
            if inner not in _HEAD_NORMS or any(each.shape != (head_dim,) for each in own.values()):
                raise ConfigError(
                    f"transformers' plan for {type(model).__name__} cuts maps of {parent} and does not say what "
                    f"becomes of {name}.{next(iter(own))}, which lies between them: set train.tensor_parallel to 1"
                )
            yield name
