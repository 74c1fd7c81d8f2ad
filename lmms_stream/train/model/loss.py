"""Losses of packed sequences: a loss per target, to be summed over the global batch.

Logits are computed only for tokens that predict a target, in chunks, and again in the backward pass: the logits of a
whole pack are never in memory together. Only the last chunk of logits is kept: the backward pass begins with this
chunk, and nothing in between needs memory.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from ...errors import ConfigError
from ...processors.base import IGNORED_LABEL
from ...types import Batch
from .adapters import run_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel


T = TypeVar("T")
Head = Callable[[torch.Tensor], torch.Tensor]  # [n, H] -> logits [n, V]
LOGITS_AT_ONCE = 1 << 26  # float32 values: 256 MiB
MEMORY_PER_LOGITS = 256  # bytes of a GPU's memory per value at once: 1 GiB of logits on 80 GiB


def learnt_tokens(
    labels: torch.Tensor, *, num_learnt: int | None = None, ahead: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions that predict a target, in order, and their targets: int64[n] each.

    labels: int64[1, T], aligned with the inputs, IGNORED_LABEL without a target; position t predicts the label at
    t + ahead. num_learnt: number of targets, from the batch; without this number the host waits for the device.
    """
    targets = labels[0, ahead:]
    is_learnt = targets != IGNORED_LABEL
    if num_learnt is None:
        learnt = torch.nonzero(is_learnt)[:, 0]
        return learnt, targets[learnt]
    positions = torch.arange(len(targets), device=labels.device)
    slots = torch.where(is_learnt, is_learnt.cumsum(0) - 1, num_learnt)  # the last slot: positions without a target
    learnt = positions.new_zeros(num_learnt + 1).scatter_(0, slots, positions)[:num_learnt]
    return learnt, targets[learnt]


def token_losses(
    hidden: torch.Tensor, targets: torch.Tensor, head: Head, *, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of each target and the logsumexp of the logits: float32[n] each.

    hidden: float[n, H]; targets: int64[n]. The result is differentiable even for n = 0.
    """
    size = max(64, logits_at_once(hidden.device) // vocab_size)
    *others, last = (slice(start, start + size) for start in range(0, max(1, len(targets)), size))
    parts = [checkpoint(_losses, hidden[part], targets[part], head, use_reentrant=False) for part in others]
    losses, logs = zip(*parts, _losses(hidden[last], targets[last], head), strict=True)
    return torch.cat(losses), torch.cat(logs)


def logits_at_once(device: torch.device) -> int:
    """Return the number of logits in memory at once: more on a GPU, where each chunk costs launches of kernels."""
    if device.type != "cuda":
        return LOGITS_AT_ONCE
    return max(LOGITS_AT_ONCE, torch.cuda.get_device_properties(device).total_memory // MEMORY_PER_LOGITS)


def losses_of_logits(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cross entropies and logsumexps, float32[n] each, from logits float[n, V]."""
    losses, logs = _CrossEntropy.apply(logits.float(), targets)
    return losses, logs


def _losses(hidden: torch.Tensor, targets: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    return losses_of_logits(head(hidden), targets)


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy with a gradient in a single tensor of the logits' size; autograd takes five tensors."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logs = torch.logsumexp(logits, dim=-1)
        ctx.save_for_backward(logits, targets, logs)
        return logs - logits.gather(1, targets[:, None])[:, 0], logs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_losses: torch.Tensor, of_logs: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, targets, logs = ctx.saved_tensors
        made = (logits - logs[:, None]).exp_().mul_((of_losses + of_logs)[:, None])
        return made.scatter_add_(1, targets[:, None], -of_losses[:, None]), None


# Gradients of a head that computes logits in chunks: summed in float32, for heads of any format.
#
# In bfloat16 each of many sums would lose bits: with 128 chunks the gradient is 1 % off.


class SharedParameters:
    """Parameters of a module called several times before a backward pass. module: None if there is no module."""

    def __init__(self, module: torch.nn.Module | None):
        self._module = module
        found = module.named_parameters(recurse=False) if module is not None else ()
        rounded = {name: each for name, each in found if each.requires_grad and each.dtype != torch.float32}
        self._sums = {name: _Sum() for name in rounded}
        self._shared = {name: _Share.apply(each, self._sums[name]) for name, each in rounded.items()}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let calls of the module inside this context add their gradients in float32."""
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
    """Return a parameter unchanged; the gradient is the sum over all uses."""

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
    """Return the shared parameter; add the gradient to the sum, and return no gradient."""

    @staticmethod
    def forward(ctx: Any, shared: torch.Tensor, total: _Sum) -> torch.Tensor:
        ctx.total = total
        return shared.view_as(shared)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        value = ctx.total.value
        ctx.total.value = gradients[0].float() if value is None else value.add_(gradients[0])
        return None, None


# A head that FSDP shards as a unit: its parameters are gathered once for all chunks, and their gradients are summed
# over ranks once.


def run_around(head: Any, run: Callable[..., T], *tensors: torch.Tensor) -> T:
    """Return run(*tensors), inside a forward pass of the head if FSDP shards it as a unit; `run` calls the head."""
    if not isinstance(head, FSDPModule):
        return run(*tensors)
    with replaced(head, run):  # run is given the tensors that FSDP listens to: their gradients end the head's backward
        made: T = head(*tensors)  # type: ignore[operator]
    return made


@contextmanager
def called_inside(head: Any) -> Iterator[None]:
    """Let calls of a head inside this context be its own forward method, without the hooks of FSDP."""
    if not isinstance(head, FSDPModule):
        yield
        return
    module: Any = head
    before = module._forward_pre_hooks, module._forward_hooks
    module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        with replaced(module, MethodType(type(module).forward, module)):
            yield
    finally:
        module._forward_pre_hooks, module._forward_hooks = before


@contextmanager
def replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Give a module another forward method inside this context."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


# Hidden states of models that insert outputs of towers into the text outside of the base model.
#
# Qwen2-Audio, Llama 4 and the thinkers of Qwen-Omni insert outputs in the forward pass that also computes logits. In
# this forward pass the head gets a single token, and a hook on the text decoder keeps the hidden states.


def decoder_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the part from embedded tokens to hidden states; None if the part is unknown or contains the head."""
    find = getattr(model, "get_decoder", None)
    decoder: Any = None if find is None else find()
    head = run_module(model.get_output_embeddings())
    if head is None or not isinstance(decoder, torch.nn.Module) or decoder is model:
        return None
    made: Any = decoder
    return None if any(each is head for each in decoder.modules()) else made


def run_to_hidden(model: PreTrainedModel, decoder: torch.nn.Module, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the output of the model, with logits of the first token only, and the output of the decoder."""
    found: list[Any] = []
    head: Any = run_module(model.get_output_embeddings())
    hooks = (
        decoder.register_forward_hook(lambda _, __, output: found.append(output)),
        head.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, :1], *inputs[1:])),
    )
    try:
        output = model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    (of_decoder,) = found
    return output, of_decoder


# Auxiliary loss of a mixture of experts, against a router that sends most tokens to few experts.
#
# The loss of a pack follows Switch Transformer (arXiv 2101.03961, equations 4 to 6) and transformers, over the pack's
# tokens without padding: other packs, and therefore the number of ranks, do not change the loss.

_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # fields of configs
_NUM_CHOSEN = ("num_experts_per_tok", "moe_k")


def has_experts(config: Any) -> bool:
    """Return whether a model routes tokens to experts: tokens per expert then depend on the whole pack."""
    return _field(config.get_text_config(), _NUM_EXPERTS) > 0


def router_weight(model: torch.nn.Module) -> float:
    """Return the weight of the auxiliary loss from the model's config.

    0 without a weight or known numbers of experts, for models without router logits in the output, and for models
    without experts in any layer, even if the config has a weight (Flint, Doge).
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    returns_router = "output_router_logits" in inspect.signature(model.forward).parameters
    has_layers = any("expert" in name or "router" in name for name, _ in model.named_modules())
    is_known = has_layers and _field(config, _NUM_EXPERTS) and _field(config, _NUM_CHOSEN)
    return float(getattr(config, "router_aux_loss_coef", None) or 0.0) if returns_router and is_known else 0.0


def router_loss(logits: Sequence[torch.Tensor], packs: Sequence[Batch], *, config: Any) -> torch.Tensor:
    """Return the sum over packs of auxiliary loss times tokens, to be divided by a global batch's tokens: float32[].

    logits: float[T, experts] of each layer with experts. packs: the packs in T, in order. ConfigError for logits of
    other shapes.
    """
    text = config.get_text_config()
    num_experts, num_chosen = _field(text, _NUM_EXPERTS), _field(text, _NUM_CHOSEN)
    if any(each.shape[-1] != num_experts for each in logits):
        raise ConfigError(
            f"the router of {config.model_type} gives {logits[0].shape[-1]} values a token for {num_experts} experts: "
            "set the model's router_aux_loss_coef to 0"
        )
    shares = torch.stack([each.reshape(-1, num_experts).float() for each in logits]).softmax(dim=-1)  # [layers, T, E]
    chosen = torch.zeros_like(shares).scatter_(-1, shares.topk(num_chosen, dim=-1).indices, 1.0)
    total = shares.sum() * 0  # a pack without samples takes part in the backward pass
    start = 0
    for pack in packs:
        num_tokens = int(pack.cu_seqlens[pack.num_segments])
        if num_tokens:
            of_pack = slice(start, start + num_tokens)
            balance = chosen[:, of_pack].mean(dim=(0, 1)) * shares[:, of_pack].mean(dim=(0, 1))
            total = total + num_tokens * num_experts * balance.sum()
        start += pack.num_tokens
    return total


def _field(config: Any, names: Sequence[str]) -> int:
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 0)
