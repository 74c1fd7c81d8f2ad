"""When the gradients of the micro-batches of a step are summed over ranks: after each of them, or once, after the last.

Summed once, each rank keeps the gradients of the whole model between its micro-batches, in float32, and a step of n
micro-batches has one reduce-scatter for each block instead of n. Copies of the model (HSDP) are summed once in any
case, which costs no memory.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from ..run.distributed import gather
from ..run.settings import TrainConfig

MEMORY_SHARE = 0.25  # of what is free once weights, gradients and the optimizer's states are counted
_STATES = 3 * 4  # bytes of a parameter's own gradient and of two states of AdamW, in float32
logger = logging.getLogger("lmms_stream")


class Accumulation:
    """Says to a sharded model what happens to the gradients of a micro-batch. All ranks make the same calls.

    is_unsharded: gradients stay on their rank until the last micro-batch. stays_gathered: so do parameters.
    """

    def __init__(self, model: torch.nn.Module, *, is_unsharded: bool, stays_gathered: bool = False):
        self._model, self._stays_gathered = model, stays_gathered
        self.is_unsharded = is_unsharded

    def begin(self, *, is_last: bool) -> None:
        """Call it before the forward pass of each micro-batch. is_last: of its step."""
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
    """As config.accumulate says; "auto" looks at the memory of GPUs. All ranks call it, once the model is sharded."""
    is_unsharded = config.accumulate == "unsharded"
    if config.accumulate == "auto" and num_micro_batches > 1:
        is_unsharded = _fits(model, device, world_size)
    stays_gathered = not config.reshard_after_forward and num_micro_batches > 1
    return Accumulation(model, is_unsharded=is_unsharded, stays_gathered=stays_gathered)


def _fits(model: torch.nn.Module, device: torch.device, world_size: int) -> bool:
    """Whether every rank has room for the gradients of the whole model. On CPUs it is not looked at: no."""
    if device.type != "cuda":
        return False
    trained = [each for each in model.parameters() if each.requires_grad]
    free, _ = torch.cuda.mem_get_info(device)
    is_so = fits(sum(each.numel() for each in trained), num_own=sum(map(_num_own, trained)), free_bytes=free)
    everywhere = bool(gather([float(is_so)], world_size).all())
    if dist.get_rank() == 0:
        logger.info(
            "gradients of micro-batches are summed over ranks %s: accumulate is auto, and those of the model take %.2f "
            "GB", "once a step" if everywhere else "each time", sum(each.numel() for each in trained) * 4 / 1e9,
        )  # fmt: skip
    return everywhere


def fits(num_trained: int, *, num_own: int, free_bytes: int) -> bool:
    """Whether gradients of all trained parameters, in float32, take a small share of the memory that is free.

    num_own: of the trained parameters, those in this rank's shard, whose gradients and states are still to come.

    >>> fits(10**9, num_own=10**9 // 8, free_bytes=70 * 10**9), fits(8 * 10**9, num_own=10**9, free_bytes=50 * 10**9)
    (True, False)
    """
    return num_trained * 4 <= MEMORY_SHARE * (free_bytes - num_own * _STATES)


def _num_own(parameter: torch.Tensor) -> int:
    local = getattr(parameter, "to_local", None)
    return int(local().numel() if local is not None else parameter.numel())
