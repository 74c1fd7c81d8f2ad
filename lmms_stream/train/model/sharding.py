"""A model -> the part of it that each rank holds and runs: frozen, checkpointed, compiled, sharded as the run asks."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from ...errors import ConfigError
from ..run.settings import TrainConfig
from .adapters import record_base
from .model import PackedModel
from .plain import PlainModel
from .unused import use_all_parameters
from .weights import give_weights, take_weights


def shard_model(
    model: PackedModel | PlainModel,
    mesh: DeviceMesh,
    *,
    config: TrainConfig,
    device: torch.device,
    is_filled_later: bool = False,
) -> None:
    """Shard the model itself over the mesh, with the weights that rank 0 has; all ranks call it.

    is_filled_later: it has no weights yet; a checkpoint will fill each rank's part.

    Parameters keep their number format; with config.bf16 they are computed with in bfloat16, and gradients are summed
    in float32.
    """
    blocks = blocks_of(model, config.wrap)
    freeze(model.model, config.frozen)
    if config.gradient_checkpointing:
        checkpoint_blocks(model.model)
    record_base(model.model)
    weights = take_weights(model, is_filled_later=is_filled_later)
    dtype = torch.bfloat16 if config.bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (*blocks, model):
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # torch < 2.15
            use_all_parameters(part)
        fully_shard(part, mesh=mesh, mp_policy=policy)
    if isinstance(model, FSDPModule) and hasattr(model, "set_reduce_scatter_unused_params"):
        # Experts that no token of a rank's packs went to have no gradient there, and ranks would reduce other tensors.
        model.set_reduce_scatter_unused_params(True)
    if isinstance(model, PackedModel):
        for method in ("logits", "plain_logits", "dummy_tokens"):
            register_fsdp_forward_method(model, method)
    give_weights(model, weights, device=device, is_filled_later=is_filled_later)


def reshard(model: torch.nn.Module) -> None:
    """Shard the root again: it stays gathered after a forward pass that no backward pass follows."""
    if isinstance(model, FSDPModule):
        model.reshard()


def compile_blocks(model: PackedModel | PlainModel) -> None:
    """Compile each block that was sharded, for packs of any length and number of samples.

    Call it once the attention is chosen: for another one blocks would be compiled again. Those of a tower of media are
    left as they are: transformers' code there splits patches by the list of their images or windows, so that each
    number of these would be compiled anew.
    """
    of_tower = {module for tower in model.towers.values() for module in tower.modules()}
    for block in model.model.modules():
        if isinstance(block, FSDPModule) and block not in of_tower:
            block.compile(dynamic=True)


def blocks_of(model: PackedModel | PlainModel, wrap: Sequence[str]) -> list[torch.nn.Module]:
    """The blocks of a model that are gathered one by one; of one that does not name them, none."""
    if isinstance(model, PackedModel):
        return blocks_to_shard(model.model, wrap)
    if not wrap and not any(getattr(part, "_no_split_modules", None) for part in model.model.modules()):
        return []
    whole = {id(block) for block in model.kept_whole}
    return [block for block in blocks_to_shard(model.model, wrap) if id(block) not in whole]


def blocks_to_shard(model: torch.nn.Module, wrap: Sequence[str] = ()) -> list[torch.nn.Module]:
    """The repeated blocks of a model, which are gathered one by one, by the names of their classes.

    wrap: these names (default: those that transformers does not split between devices, in all parts of the model).
    ConfigError for a name that no block has, with the names that there are.
    """
    repeated = [
        block
        for modules in model.modules()
        if isinstance(modules, torch.nn.ModuleList)
        for block in modules
        if next(block.parameters(), None) is not None
    ]
    classes = sorted({type(block).__name__ for block in repeated})
    names = set(wrap) or {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    unknown = sorted(names - set(classes)) if wrap else [] if names & set(classes) else ["(none is named by the model)"]
    if unknown:
        raise ConfigError(
            f"no blocks of {type(model).__name__} to shard are of class {unknown[0]}: name some of "
            f"{', '.join(classes) or '(it has no lists of modules)'} in train.wrap"
        )
    found = [block for block in repeated if type(block).__name__ in names]
    inner = {id(module) for block in found for module in block.modules() if module is not block}
    return [block for block in found if id(block) not in inner]


def freeze(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Stop the training of parameters whose names match any pattern (fnmatch); a tied one has several names.

    ConfigError for a pattern that matches none, and where none is left to train.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matched = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(f"train.frozen {pattern!r} matches no parameter: they are named like {named[0][0]!r}")
        for parameter in matched:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(f"train.frozen {list(patterns)} leaves nothing to train: name fewer parameters")


def checkpoint_blocks(model: Any) -> None:
    """Run blocks of a model of transformers or diffusers again in the backward pass: what they computed is not kept."""
    if getattr(model, "_supports_gradient_checkpointing", False):  # of diffusers
        model.enable_gradient_checkpointing()
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"{type(model).__name__} cannot run its blocks again: set train.gradient_checkpointing to false"
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
