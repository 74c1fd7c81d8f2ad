"""Freeze, checkpoint, compile and shard a model by the run's settings: model -> each rank's part."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.fx.experimental._config as shape_config
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from ...errors import ConfigError, nearest_name
from ...freed_memory import give_back_memory
from ...registry import imported
from ...versions.transformers import checkpoint_activations, in_float32
from ..run.distributed import from_rank_0, gather
from ..run.mesh import Meshes
from ..run.optimizers import local
from ..run.precision import check_formats, with_float32
from ..run.settings import TrainConfig
from .adapters import record_base
from .build import PlainModel
from .model import PackedModel
from .pretrained import PretrainedTensors, unread_weights

logger = logging.getLogger("lmms_stream")

_RENAMES, _RUNS_AGAIN = "transformers/utils/deprecation.py", "transformers/modeling_layers.py"


def shard_model(
    model: PackedModel | PlainModel,
    meshes: Meshes,
    *,
    config: TrainConfig,
    device: torch.device,
    is_filled_later: bool = False,
    vote: Callable[[], None] = lambda: None,
) -> None:
    """Shard the model in place over the ranks, with the weights that rank 0 holds or reads now; all ranks call it.

    is_filled_later: the model has no weights yet; a checkpoint will fill each rank's part. vote: called now and then as
    weights are sent, by all ranks.

    Parameters keep their number format; config.bf16 computes in bfloat16 and sums gradients in float32. From torch 2.15
    on, parameters that their class keeps in float32 are computed in float32.
    """
    fsdp = config.fsdp
    blocks = blocks_of(model, fsdp.wrap)
    if config.gradient_checkpointing:
        checkpoint_blocks(model.model)
    record_base(model.model)
    unread = unread_weights(model.model)
    weights = take_weights(model, is_filled_later=is_filled_later, unread=unread)
    dtype = torch.bfloat16 if config.bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    _divide(model, meshes, policy=policy, config=config)
    check_formats([*blocks, model])
    kept: set[int] = set()
    if config.bf16:
        named = ((part, *each) for part in model.modules() for each in part.named_parameters())
        kept = {id(each) for part, name, each in named if in_float32(part, name)}
        policy = with_float32(policy, kept)
    ends = model.ends if isinstance(model, PackedModel) and meshes.tp is None else ()
    if any(id(each.weight) in kept for each in ends):
        ends = ()  # what they are given is not cast
    for part in (*blocks, *ends, model):
        again = None if part is model else bool(fsdp.reshard_after_forward)  # the root's own parameters stay gathered
        if part in ends[-1:]:
            again = False  # the backward pass begins with the head
        sharded = fully_shard(part, mesh=meshes.fsdp, mp_policy=policy, reshard_after_forward=again)
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            reduce_unused_parameters(sharded)
    if len(ends) > 1:
        ends[0].set_unshard_in_backward(False)  # type: ignore[operator]  # the gradient of an embedding needs no weight
    if dtype is not None:
        for part in (*blocks, *ends[-1:]):  # some models cast to the format of the head's parameter
            cast_hidden_states(part, dtype)
    prefetch(blocks, fsdp.prefetch_blocks)
    if isinstance(model, FSDPModule) and hasattr(model, "set_reduce_scatter_unused_params"):
        # Experts without a token on a rank have no gradient there, and ranks would reduce different tensors.
        model.set_reduce_scatter_unused_params(True)
    if isinstance(model, PackedModel):
        for method in ("logits", "plain_logits", "dummy_tokens"):
            register_fsdp_forward_method(model, method)
    give_weights(model, weights, device=device, is_filled_later=is_filled_later, unread=unread, vote=vote)


def _divide(
    model: PackedModel | PlainModel, meshes: Meshes, *, policy: MixedPrecisionPolicy, config: TrainConfig
) -> None:
    """Leave each rank its parts of matrices, or its experts; ranks with the same part shard this part."""
    for setting, mesh in (("tensor_parallel", meshes.tp), ("expert_parallel", meshes.ep)):
        if mesh is not None and not isinstance(model, PackedModel):
            raise ConfigError(
                f"train.{setting} {mesh.size()} is for language models, and this is a "
                f"{type(model.model).__name__}: set it to 1, and shard the model over more ranks"
            )
    if meshes.tp is not None:
        imported("plugins.parallel.tensor_parallel:cut_model")(model.model, meshes.tp)
    if meshes.ep is not None and meshes.experts is not None:
        split_experts = imported("plugins.parallel.expert_parallel:split_experts")
        shard_experts = imported("plugins.parallel.expert_parallel:shard_experts")
        for experts in split_experts(model.model, meshes.ep):
            shard_experts(experts, meshes.experts, policy=policy, reshard=bool(config.fsdp.reshard_after_forward))


def cast_hidden_states(block: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the hidden states of a block, and their masks, to a number format; other inputs stay unchanged.

    FSDP's own cast takes every input: bfloat16 rounds a timestep of 123.4 to 123.5, and sines of positions, too.
    """
    names = list(inspect.signature(block.forward).parameters)

    def cast(value: Any, name: str) -> Any:
        is_state = name == names[0] or name.endswith(("hidden_states", "mask"))
        is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_state and is_number else value

    def cast_all(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = zip(args, [*names, *[""] * len(args)], strict=False)
        return tuple(cast(*each) for each in named), {name: cast(value, name) for name, value in kwargs.items()}

    block.register_forward_pre_hook(cast_all, with_kwargs=True)


def prefetch(blocks: Sequence[torch.nn.Module], num_blocks: int) -> None:
    """Let each block prefetch the next `num_blocks` blocks, forward and backward; 0: the order of torch.

    Blocks of a class form a sequence: media blocks and text blocks are separate.
    """
    if not num_blocks:
        return
    by_class: dict[type, list[Any]] = {}
    for block in blocks:
        by_class.setdefault(type(block), []).append(block)
    for row in by_class.values():
        for index, block in enumerate(row):
            block.set_modules_to_forward_prefetch(row[index + 1 : index + 1 + num_blocks])
            block.set_modules_to_backward_prefetch(row[max(0, index - num_blocks) : index][::-1])


def reshard(model: torch.nn.Module) -> None:
    """Shard the model again: parts stay gathered after a forward pass without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def compile_blocks(model: PackedModel | PlainModel, *, backend: str = "inductor") -> None:
    """Compile each sharded block, for packs of any length and number of samples.

    Call this after the attention is chosen: another attention compiles the blocks again. Blocks of media towers are not
    compiled: transformers splits patches there by a list of images or windows, and each length of this list would be
    compiled again. backend: torch's name of the compiler.
    """
    # Otherwise torch takes two sizes that are equal in the first pack for equal in all packs.
    shape_config.use_duck_shape = False
    others = {module for tower in model.towers.values() for module in tower.modules()}
    others |= {module for module in model.modules() if isinstance(module, torch.nn.Embedding | torch.nn.Linear)}
    for block in model.model.modules():
        is_sharded: bool = isinstance(block, FSDPModule)
        if is_sharded and block not in others:
            _leave_out_wrappers(block)
            block.compile(dynamic=True, backend=backend)


def _leave_out_wrappers(block: torch.nn.Module) -> None:
    """Let parts of a block run their own forward methods, without the wrapper that renames keywords of older versions.

    transformers wraps all forward methods with one function. torch counts this function's graphs together, and stops
    compiling once all layers exceed the limit. Since transformers 5 the wrapper for gradient checkpointing does the
    same, also without gradient checkpointing.
    """
    for module in block.modules():
        own: Any = type(module).forward
        wrappers = (_RENAMES,) if getattr(module, "gradient_checkpointing", False) else (_RENAMES, _RUNS_AGAIN)
        while hasattr(own, "__wrapped__") and own.__code__.co_filename.endswith(wrappers):
            own = own.__wrapped__
        if own is not type(module).forward and "forward" not in vars(module):
            module.forward = MethodType(own, module)


def blocks_of(model: PackedModel | PlainModel, wrap: Sequence[str]) -> list[torch.nn.Module]:
    """Return the blocks of a model that FSDP gathers one by one; [] for a plain model without named blocks."""
    if isinstance(model, PackedModel):
        return blocks_to_shard(model.model, wrap)
    if not wrap and not any(getattr(part, "_no_split_modules", None) for part in model.model.modules()):
        return []
    whole = {id(block) for block in model.kept_whole}
    return [block for block in blocks_to_shard(model.model, wrap) if id(block) not in whole]


def blocks_to_shard(model: torch.nn.Module, wrap: Sequence[str] = ()) -> list[torch.nn.Module]:
    """Return the repeated blocks of a model, by the names of their classes; FSDP gathers them one by one.

    wrap: names of classes (default: `_no_split_modules` of all parts of the model). ConfigError for an unknown name,
    with the names of the model's blocks.
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
            f"{', '.join(classes) or '(it has no lists of modules)'} in train.fsdp.wrap"
        )
    found = [block for block in repeated if type(block).__name__ in names]
    inner = {id(module) for block in found for module in block.modules() if module is not block}
    return [block for block in found if id(block) not in inner]


def freeze(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Stop the training of parameters whose names match any pattern (fnmatch); a tied parameter has several names.

    Raise ConfigError if a pattern matches no parameter, or no parameter is left to train.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matched = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
        if not matched:
            nearest = nearest_name(pattern, (name for name, _ in named))
            raise ConfigError(f"train.frozen {pattern!r} matches no parameter: the nearest name is {nearest!r}")
        for parameter in matched:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(f"train.frozen {list(patterns)} leaves nothing to train: name fewer parameters")


def checkpoint_blocks(model: Any) -> None:
    """Run blocks of a transformers or diffusers model again in the backward pass, instead of keeping activations."""
    if getattr(model, "_supports_gradient_checkpointing", False):  # of diffusers
        model.enable_gradient_checkpointing()
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"{type(model).__name__} cannot run its blocks again: set train.gradient_checkpointing to false"
        )
    checkpoint_activations(model)


# Weights on rank 0 -> each rank's part.
#
# A model is sharded without weights (on the meta device). Then each tensor goes from rank 0 to the ranks with parts of
# the tensor, one tensor after another: a rank needs memory for its part and the largest tensor only, and so does rank 0
# if its weights are still in their files. Parameters that a checkpoint will fill are not sent: each rank allocates its
# part.

_GIVE_BACK_BYTES = 1 << 26  # bytes of freed weights after which memory is returned to the system


def take_weights(
    model: torch.nn.Module, *, is_filled_later: bool = False, unread: PretrainedTensors | None = None
) -> dict[str, torch.Tensor]:
    """Return the model's tensors by name, and leave tensors of the same shapes on the meta device in the model.

    Tied parameters stay tied. Only the tensors of rank 0 are used later. is_filled_later: parameters are on the meta
    device of rank 0, too. unread: tensors that are still in files, by their names in the transformers model.
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
    unread: PretrainedTensors | None = None, vote: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Fill a sharded model, on each rank's device, with the weights taken by rank 0; all ranks call it.

    Each weight is freed after it is sent. unread: weights that rank 0 reads from files when they are sent.
    is_filled_later: parameters hold arbitrary values afterwards. vote: see shard_model.
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
        if kept_bytes >= _GIVE_BACK_BYTES:  # parts between the freed tensors keep the heap from shrinking
            del source
            give_back_memory()
            kept_bytes = 0
            vote()  # the shapes, and so the bytes, are the same on all ranks


def _part(
    full_name: str,
    source: torch.Tensor,
    tensor: torch.Tensor,
    *,
    device: torch.device,
    unread: PretrainedTensors | None,
) -> torch.Tensor:
    """Return this rank's part of a tensor that rank 0 holds or reads; a buffer whole."""
    if dist.get_rank() == 0:
        name = _name_in_files(full_name)
        whole = (source.detach() if unread is None or name not in unread else unread.read(name)).to(device)
    else:
        whole = torch.empty_like(source, device=device)
    if isinstance(tensor, DTensor):
        return distribute_tensor(whole, tensor.device_mesh, tensor.placements)
    whole = whole.contiguous()
    dist.broadcast(whole, src=0)
    return whole


def _name_in_files(full_name: str) -> str:
    """Return a tensor's name in the transformers model, the attribute `model` of the sharded module."""
    return full_name.removeprefix("model.")


def _tensors(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, str, torch.Tensor]]:
    """Yield parameters, buffers and plain tensors (of rotary embeddings): module, own name, full name, tensor."""
    for path, module in model.named_modules():
        named = (
            module.named_parameters(recurse=False, remove_duplicate=False),
            module.named_buffers(recurse=False, remove_duplicate=False),
            ((name, value) for name, value in vars(module).items() if isinstance(value, torch.Tensor)),
        )
        for name, tensor in [found for each in named for found in each]:
            yield module, name, f"{path}.{name}", tensor


def _check(weights: dict[str, torch.Tensor], *, is_filled_later: bool, unread: PretrainedTensors | None) -> None:
    """Raise ConfigError, on all ranks, if rank 0 lacks weights or a rank has another model."""
    mine = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()]
    missing = [
        name
        for name, tensor in weights.items()
        if tensor.is_meta
        and not (is_filled_later and isinstance(tensor, torch.nn.Parameter))
        and (unread is None or _name_in_files(name) not in unread)
    ]
    theirs, missing = from_rank_0((mine, missing))
    if missing:
        raise ConfigError(
            f"the model of rank 0 has no weights for {missing[0]}: build it on the CPU, or with ModelConfig.build"
        )
    differ = sorted({name for name, *_ in {*mine} ^ {*theirs}})
    if gather([float(len(differ))], dist.get_world_size()).any():
        where = f" in {differ[0]}" if differ else ", on some rank"
        raise ConfigError(f"the model differs from that of rank 0{where}: build the same on all ranks")


# When ranks sum the gradients of a step: after each micro-batch, or once, after the last micro-batch.
#
# Summed once, each rank keeps float32 gradients of the whole model between micro-batches, and a step of n micro-batches
# has one reduce-scatter a block instead of n. Copies of the model (HSDP) are always summed once, without more memory.


MEMORY_SHARE = 0.25  # of the memory free beside weights, gradients and the optimizer's states
_STATES = 3 * 4  # bytes per parameter: a gradient and two states of AdamW, in float32


class Accumulation:
    """Schedule of the sum of micro-batches' gradients in a sharded model. All ranks make the same calls.

    is_unsharded: gradients stay on their rank until the last micro-batch. stays_gathered: parameters stay gathered
    until then, too.
    """

    def __init__(self, model: torch.nn.Module, *, is_unsharded: bool, stays_gathered: bool = False):
        self._model, self._stays_gathered = model, stays_gathered
        self.is_unsharded = is_unsharded

    def begin(self, *, is_last: bool) -> None:
        """Prepare a micro-batch; call this before its forward pass. is_last: last micro-batch of its step."""
        model = self._model
        if not isinstance(model, FSDPModule):
            return
        model.set_requires_gradient_sync(is_last or not self.is_unsharded)
        model.set_requires_all_reduce(is_last)
        if self._stays_gathered:
            model.set_reshard_after_backward(is_last)


def accumulation_of(
    model: torch.nn.Module, config: TrainConfig, *, device: torch.device, num_micro_batches: int, world_size: int
) -> Accumulation:
    """Return the Accumulation of train.fsdp: "auto" of accumulate and reshard_after_forward by the memory of GPUs.

    All ranks call this with the sharded model.
    """
    fsdp, several = config.fsdp, num_micro_batches > 1
    trained = [each for each in model.parameters() if each.requires_grad]
    gathered_bytes = sum(each.numel() for each in model.parameters()) * (2 if config.bf16 else 4)
    gradient_bytes = sum(each.numel() for each in trained) * 4
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    free_bytes -= sum(local(each).numel() for each in trained) * _STATES
    fit_gradients, fit_both = (
        gather([fits(gradient_bytes, free_bytes), fits(gradient_bytes + gathered_bytes, free_bytes)], world_size)
        .all(dim=0)
        .tolist()
    )
    is_unsharded = fsdp.accumulate == "unsharded" or (fsdp.accumulate == "auto" and several and fit_gradients)
    stays_gathered = fit_both if fsdp.reshard_after_forward == "auto" else not fsdp.reshard_after_forward
    if stays_gathered and isinstance(model, FSDPModule):
        model.set_reshard_after_forward(False)
    if dist.get_rank() == 0 and device.type == "cuda":
        logger.info(
            "sharding: gradients of micro-batches are summed over ranks %s; blocks are gathered %s (train.fsdp; the "
            "model's gradients take %.2f GB, its gathered blocks %.2f GB)",
            "once a step" if is_unsharded else "each time",
            "once a step" if stays_gathered else "for each forward and backward pass",
            gradient_bytes / 1e9, gathered_bytes / 1e9,
        )  # fmt: skip
    return Accumulation(model, is_unsharded=is_unsharded, stays_gathered=stays_gathered and several)


def fits(num_bytes: int, free_bytes: int) -> bool:
    """Return whether tensors take a small share of the free memory.

    >>> fits(4 * 10**9, 68 * 10**9), fits(32 * 10**9, 38 * 10**9)
    (True, False)
    """
    return num_bytes <= MEMORY_SHARE * free_bytes


# Zero gradients for parameters that a rank did not use.
#
# Ranks reduce the gradients of a block together: all ranks need gradients of the same parameters. FSDP2 of torch before
# 2.15 leaves unused parameters out.


def reduce_unused_parameters(part: FSDPModule) -> None:
    """Let a sharded module reduce zeros for its parameters without a gradient; for torch before 2.15."""
    group = part._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    reduce_and_reshard = group.post_backward

    def post_backward(*args: Any) -> None:
        for parameter in group.fsdp_params if group.reduce_grads else ():
            whole = getattr(parameter, "_unsharded_param", None)
            if (
                whole is not None
                and whole.requires_grad
                and whole.grad is None
                and parameter.unsharded_accumulated_grad is None
            ):
                whole.grad = torch.zeros_like(whole)
        reduce_and_reshard(*args)

    group.post_backward = post_backward  # type: ignore[method-assign]


def with_zeros(tensor: torch.Tensor, unused: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the tensor; the backward pass gives the unused tensors gradients of zeros."""
    made: torch.Tensor = _Zeros.apply(tensor, *unused)
    return made


class _Zeros(torch.autograd.Function):
    """Return the first argument; give all other arguments gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(each.shape, each.dtype, each.device) for each in parameters]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], *(torch.zeros(shape, dtype=dtype, device=at) for shape, dtype, at in ctx.shapes)
