"""How long a step takes with the attention that is set: a forward and a backward pass of a pack, a few times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ...loader.collate import collate
from ...types import Batch
from ..run.distributed import gather
from .model import PackedModel
from .proof_samples import segments_of

Trial = Callable[[PackedModel, torch.device], float]  # seconds of a step on this rank; all ranks call it
NUM_TOKENS = 4096
_REPEATS = 3


def step_seconds(model: PackedModel, device: torch.device) -> float:
    """The shortest of a few, after one that compiles what is to be compiled; infinity where memory does not suffice.

    Gradients are zeroed.
    """
    segments = segments_of(model)
    repeats = max(1, NUM_TOKENS // sum(map(len, segments)))
    samples = [{"input_ids": ids, "labels": ids} for ids in segments * repeats]
    pack = collate(samples, range(len(samples))).to(device)
    try:
        return min([_seconds(model, pack, device) for _ in range(1 + _REPEATS)][1:])
    except torch.OutOfMemoryError:
        return math.inf
    finally:
        model.zero_grad()


def _seconds(model: PackedModel, pack: Batch, device: torch.device) -> float:
    _wait(device)
    begun = time.perf_counter()
    with torch.enable_grad():
        model(pack).tokens.sum().backward()
    _wait(device)
    return time.perf_counter() - begun


def slowest(seconds: float) -> float:
    """Of all ranks, so that they choose alike; all call it."""
    if not dist.is_initialized():
        return seconds
    return float(gather([seconds], dist.get_world_size()).max())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
