"""Costs of a step besides its arithmetic: collectives, and tensor reads that make the host wait for the device.

On a CPU nothing waits for a device, but reads are counted like on a GPU. Reads of tensors in host memory (batches
before their copy, counts exchanged by ranks) are left out.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lmms_stream
import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

_COLLECTIVES = {
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::broadcast_": "broadcast",
    "c10d::alltoall_base_": "all_to_all",
}
_CALLS = {getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu", "__array__")}
_OPERATIONS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
# Functions of this project that read tensors in host memory.
_ON_HOST = {
    "count_step", "gather", "units", "check_tokens", "check_lengths", "join", "seed_step", "record",
    "total", "agree", "_gathered_ids", "ids_on_host", "digest_words", "_attend", "router_loss",
}  # fmt: skip
_HOME = str(Path(lmms_stream.__file__).parent)


@contextmanager
def collectives() -> Iterator[Counter[str]]:
    """Yield the number of this rank's collectives inside, by kind; filled at the end."""
    counts: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        yield counts
    for event in found.events():
        if event.name in _COLLECTIVES:
            counts[_COLLECTIVES[event.name]] += 1


@contextmanager
def reads() -> Iterator[Counter[str]]:
    """Yield the number of reads inside that wait for the device, by file and function."""
    counts: Counter[str] = Counter()
    with _Operations(counts), _Calls(counts):
        yield counts


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counter[str]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OPERATIONS:
            _count(self._counts)
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """Count the waiting calls without a dispatched operation if a tensor is on the CPU."""

    def __init__(self, counts: Counter[str]):
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CALLS:
            _count(self._counts)
        return func(*args, **(kwargs or {}))


def _count(counts: Counter[str]) -> None:
    frame: FrameType | None = sys._getframe(2)
    line: str | None = None
    while frame is not None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(_HOME) and code.co_filename != __file__
        if is_ours and code.co_name in _ON_HOST:
            return
        if line is None and (is_ours or "transformers" in code.co_filename):
            line = f"{Path(code.co_filename).name}:{code.co_name}"
        frame = frame.f_back
    counts[line or "torch"] += 1
