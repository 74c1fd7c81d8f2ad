"""Copies of saved tensors in CPU memory: their one owner, and all functions that write to saved tensors.

A checkpoint is written from copies. On CUDA a stream of its own makes the copies while training continues. Work on the
device that writes to a saved tensor therefore begins after the copies: each function that starts such work is a writer,
marked with `writes_saved`, or calls `fence` first. Steps of torch's optimizers are fenced by a hook.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from itertools import accumulate
from threading import Lock
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from ...errors import CheckpointError

P = ParamSpec("P")
R = TypeVar("R")
Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]  # address, shape, strides, type
Layout = list[tuple[torch.Size, tuple[int, ...], torch.dtype]]
SLOT = 64  # bytes: each copy begins at a cache line
WATCH = "LMMS_STREAM_WATCH_COPIES"  # variable of the environment: find missing fences without a GPU, too
WRITERS = {"torch.optim.Optimizer.step"}
_stagers: weakref.WeakSet[Stager] = weakref.WeakSet()


def fence() -> None:
    """Let work that the device begins from now on wait for the copies of saved tensors; the host does not wait.

    CheckpointError if a saved tensor was written to before, without a fence.
    """
    for stager in [*_stagers]:
        stager.fence()


def writes_saved(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function as a writer of saved tensors: it calls `fence` first, and WRITERS has its name."""
    WRITERS.add(f"{function.__module__}.{function.__qualname__}")

    @wraps(function)
    def fenced(*args: P.args, **kwargs: P.kwargs) -> R:
        fence()
        return function(*args, **kwargs)

    return fenced


register_optimizer_step_pre_hook(lambda *_: fence())


def has_streams() -> bool:
    """Whether this process copies from a device with streams."""
    return torch.cuda.is_available()


class SavedTensor(NamedTuple):
    """A saved tensor, and the number of writes to the tensor when its copy began; without a GPU its values, too."""

    name: str
    tensor: torch.Tensor
    version: int
    values: torch.Tensor | None

    @property
    def is_written(self) -> bool:
        if self.tensor._version != self.version:
            return True
        return self.values is not None and not torch.equal(self.tensor.nan_to_num(), self.values.nan_to_num())


class Stager:
    """Owns the copies of saved tensors: memory that is kept for the next save, stream, device and writing thread.

    Tensors on the CPU are copied when `stage` returns. Copies from CUDA run in a stream of their own, after the work
    queued so far, into page-locked memory: a copy to other memory lets the host wait for all copies before. The thread
    of `submit` calls synchronize_staging before it reads the copies.
    """

    def __init__(self) -> None:
        self._device = torch.cuda.current_device() if has_streams() else None
        self._stream = None if self._device is None else torch.cuda.Stream()
        self._copied: torch.cuda.Event | None = None
        self._sources: Any = None  # torch may reuse the memory of a tensor that nobody refers to
        self._layout: Layout = []
        self._copies: list[torch.Tensor] = []
        self._watches = self._stream is not None or WATCH in os.environ
        self._watched: list[SavedTensor] = []
        self._written: str | None = None  # a saved tensor that was written to without a fence
        self._checking = Lock()
        _stagers.add(self)

    @torch.no_grad()
    def stage(self, state_dict: Any) -> Any:
        """Return the state with copies as tensors; on CUDA the copies are only begun."""
        self._check_writes()
        if self._watches:
            self._watched = [*_watched(state_dict, keeps_values=self._stream is None)]
        if self._stream is None:
            return self._copy_all(state_dict)
        self._sources = state_dict
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            staged = self._copy_all(state_dict)
            self._copied = self._stream.record_event()
        return staged

    def submit(self, write: Callable[..., R], *args: Any, **options: Any) -> Future[R]:
        """Call write in a thread, on this owner's device: a new thread is on GPU 0, and would reserve its memory."""
        thread = ThreadPoolExecutor(1, "lmms_stream-checkpoint", _enter, (self._device,))
        try:
            return thread.submit(write, *args, **options)
        finally:
            thread.shutdown(wait=False)

    def fence(self) -> None:
        """Let work of the device that is queued from now on begin after the copies; see `fence`."""
        self._check_writes()
        if (copied := self._copied) is not None:
            torch.cuda.current_stream().wait_event(copied)

    def synchronize_staging(self) -> None:
        """Wait until the copies can be read; CheckpointError if they may hold later values."""
        if (copied := self._copied) is not None:
            copied.synchronize()
            self._check_writes()
        self._sources = self._copied = None

    def release(self) -> None:
        """Free the memory of the copies."""
        if self._copied is not None:
            self._copied.synchronize()
        self._sources, self._watched, self._copied, self._written = None, [], None, None
        self._layout, self._copies = [], []

    def _check_writes(self) -> None:
        with self._checking:
            watched, self._watched = self._watched, []
            self._written = self._written or next((each.name for each in watched if each.is_written), None)
        if self._written is not None:
            raise CheckpointError(
                f"{self._written} was written to while it was copied for a checkpoint, and a writer waits for the "
                "copy: call lmms_stream.train.run.copies.fence() before the write, or set train.async_save to false"
            )

    def _copy_all(self, values: Any) -> Any:
        leaves, structure = tree_flatten(values)
        sources = {_place(each): each for leaf in leaves for each in _plain(leaf)}  # tied tensors are copied once
        copies = dict(zip(sources, self._like([*sources.values()]), strict=True))
        for place, source in sources.items():
            copies[place].copy_(source, non_blocking=self._stream is not None)
        return tree_unflatten([_replaced(leaf, copies) for leaf in leaves], structure)

    def _like(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return CPU tensors like the sources: those of the last save, if shapes and types are the same."""
        layout = [(each.shape, torch.empty_like(each, device="meta").stride(), each.dtype) for each in sources]
        if layout != self._layout:
            self._layout, self._copies = [], []  # frees the memory first
            sizes = [max(1, -(-each.nbytes // SLOT)) * SLOT for each in sources]
            # Storages of their own: DCP's writer copies a tensor with a larger storage again.
            memory = _memory(sum(sizes), is_locked=self._stream is not None)
            slots = [
                torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=end - size)
                for size, end in zip(sizes, accumulate(sizes), strict=True)
            ]
            self._copies = [
                slot.view(dtype).as_strided(shape, stride)
                for slot, (shape, stride, dtype) in zip(slots, layout, strict=True)
            ]
            self._layout = layout
        return self._copies


def _enter(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)


def _memory(num_bytes: int, *, is_locked: bool) -> NDArray[np.uint8]:
    """Return CPU memory; if is_locked, page-locked for all devices until the memory is freed."""
    memory = torch.empty(num_bytes, dtype=torch.uint8).numpy()
    if is_locked and num_bytes:
        cuda: Any = torch.cuda.cudart()
        if error := int(cuda.cudaHostRegister(memory.ctypes.data, num_bytes, 1)):
            raise CheckpointError(
                f"CUDA cannot page-lock {num_bytes:,} bytes of CPU memory for the copies of a checkpoint (error "
                f"{error}): free memory, raise the limit of locked memory (ulimit -l), or set train.async_save to false"
            )
        weakref.finalize(memory, cuda.cudaHostUnregister, memory.ctypes.data).atexit = False
    return memory


def _replaced(leaf: Any, copies: dict[Place, torch.Tensor]) -> Any:
    """Return a leaf with copies in place of its plain tensors."""
    if is_traceable_wrapper_subclass(leaf):
        names, context = leaf.__tensor_flatten__()
        parts = {name: getattr(leaf, name) for name in names}  # tensors, and objects such as a mesh
        inner = {
            name: _replaced(part, copies) if isinstance(part, torch.Tensor) else part for name, part in parts.items()
        }
        return type(leaf).__tensor_unflatten__(inner, context, leaf.size(), leaf.stride())
    return copies[_place(leaf)] if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def _watched(values: Any, *, keeps_values: bool) -> Iterator[SavedTensor]:
    """Yield the saved tensors, and plain tensors inside: an operation may count at either.

    Versions are on the host: reading does not wait. Only writes raise versions: no casts, reshards or gathered copies.
    Writes to tensor.detach().to_local() are not counted, but change the values.
    """
    for path, leaf in _leaves(values):
        if isinstance(leaf, torch.Tensor):
            name = ".".join(str(key).strip("[]'") for key in path)
            yield SavedTensor(name, leaf, leaf._version, None)
            for tensor in _plain(leaf):
                yield SavedTensor(name, tensor, tensor._version, tensor.clone() if keeps_values else None)


def _leaves(values: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return tree_flatten_with_path(values)[0]


def _plain(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors inside a sharded or quantized tensor, or the tensor itself; nothing for other values."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


def _place(tensor: torch.Tensor) -> Place:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
