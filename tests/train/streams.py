"""Streams of a GPU, simulated on the CPU by CUDA's rules, with the worst of the legal schedules.

The tensors are on the CPU; the code is the product's and torch's. Work that only writes to tensors of the device, and
copies in a side stream, are queued in the stream of the thread that starts them. A schedule decides when they run: in
order within a stream, after the events that the stream waits for, and before a host reads what they write. Other work
of the default stream runs at once, after queued work on the same memory. A copy from the device into memory that is not
page-locked lets the host wait for all of its stream.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.train.run import copies
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

OWN_DEVICE = 3  # of this rank; a new thread is on device 0
EARLY, LATE, COPIES_LATE = "all work early", "all work late", "copies late, other work early"
VERSIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView).add(torch._C.DispatchKey.AutogradCPU)
Schedule = str | int  # a name, or the seed of random turns


class Event:
    """A moment of a stream."""

    def __init__(self, stream: Stream):
        self.stream, self.is_over = stream, False

    def synchronize(self) -> None:
        self.stream.gpu.host_waits_for(self)


class Stream:
    """Work in its order. An item is a function with the memory it touches, or an event to wait for or to end."""

    device_type = "cuda"

    def __init__(self, gpu: Gpu):
        self.gpu = gpu
        self.items: deque[tuple[Callable[[], object] | Event, frozenset[int]]] = deque()
        gpu.streams.append(self)

    def record_event(self) -> Event:
        event = Event(self)
        self.gpu.add(self, event)
        return event

    def wait_event(self, event: Event) -> None:
        self.gpu.add(self, event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.gpu.num_waits += 1
        self.record_event().synchronize()

    def run_next(self) -> None:
        item, _ = self.items.popleft()
        if isinstance(item, Event):
            if item.stream is self:
                item.is_over = True
            item.stream.run_to(item)
        else:
            item()

    def run_to(self, event: Event) -> None:
        while not event.is_over:
            self.run_next()

    def run_for(self, memory: frozenset[int]) -> None:
        """Run all that must be over before other work of this stream on some memory begins."""
        num = max(
            (n for n, (item, used) in enumerate(self.items, 1) if isinstance(item, Event) or used & memory), default=0
        )
        for _ in range(num):
            self.run_next()


class Gpu(TorchDispatchMode):
    """A device with streams.

    num_waits: waits of hosts for all work of a stream. num_late: waits for copies that were not over. on_wrong_device:
    names of threads.
    """

    def __init__(self, schedule: Schedule):
        super().__init__()  # type: ignore[no-untyped-call]
        self.streams: list[Stream] = []
        self.num_waits, self.on_wrong_device, self.num_late = 0, set[str](), 0
        self._schedule = schedule
        self._turns = np.random.default_rng(schedule if isinstance(schedule, int) else 0)
        self._memory: set[int] = set()  # of the device: addresses of storages
        self._locked: dict[int, int] = {}  # page-locked memory of the host: address, bytes
        self._lock = threading.RLock()
        self._of_thread = threading.local()
        self._default = Stream(self)
        self._of_thread.device = OWN_DEVICE  # the main thread has chosen it

    def owns(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let these be tensors of the device."""
        self._memory |= {address for each in tensors for address in _memory_of([each])}

    # What torch.cuda has.

    def current_device(self) -> int:
        return getattr(self._of_thread, "device", 0)

    def set_device(self, device: int) -> None:
        self._of_thread.device = device

    def current_stream(self, device: object = None) -> Stream:
        return getattr(self._of_thread, "stream", self._default)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._of_thread.stream = stream
        yield
        self._of_thread.stream = before

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self._look_at_the_device()
        self._locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self._locked[address]
        return 0

    # What a schedule decides.

    def add(self, stream: Stream, item: Callable[[], object] | Event, memory: frozenset[int] = frozenset()) -> None:
        with self._lock:
            self._look_at_the_device()
            stream.items.append((item, memory))
            self._take_turns()

    def run_all(self) -> None:
        """Run all queued work now, as each schedule may."""
        with self._lock:
            for stream in self.streams:
                while stream.items:
                    stream.run_next()

    def host_waits_for(self, event: Event) -> None:
        with self._lock:
            self._look_at_the_device()
            self.num_late += not event.is_over
            event.stream.run_to(event)

    def _take_turns(self) -> None:
        """Run some of the queued work, or all, or none."""
        if self._schedule == LATE:
            return
        if self._schedule in (EARLY, COPIES_LATE):
            for stream in self.streams if self._schedule == EARLY else [self._default]:
                while stream.items:
                    stream.run_next()
            return
        stream = self.streams[self._turns.integers(len(self.streams))]
        for _ in range(min(len(stream.items), self._turns.geometric(0.5) - 1)):
            if stream.items:  # work of another stream may run this stream's
                stream.run_next()

    def _look_at_the_device(self) -> None:
        if self.current_device() != OWN_DEVICE:
            self.on_wrong_device.add(threading.current_thread().name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if any(map(is_traceable_wrapper_subclass, leaves)):
            return NotImplemented  # a sharded tensor calls the operation on its parts
        if func.is_view or "empty" in func.name() or any(isinstance(each, FakeTensor) for each in leaves):
            return func(*args, **kwargs)  # without work of the device
        with self._lock:
            return self._launch(func, args, kwargs)

    def _launch(self, func: Any, args: Any, kwargs: Any) -> Any:
        arguments = list(func._schema.arguments)
        given = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
        written = [
            given[each.name]
            for each in arguments
            if each.alias_info and each.alias_info.is_write and each.name in given
        ]
        memory, stream = _memory_of((args, kwargs)), self.current_stream()
        is_in_place = bool(written) and all(
            each.alias_info and each.alias_info.is_write for each in func._schema.returns
        )
        is_aside = stream is not self._default
        if not (is_in_place and (is_aside or _memory_of(written) & self._memory)):
            self._take_turns()
            stream.run_for(memory)
            return func(*args, **kwargs)
        if is_aside:
            assert func is torch.ops.aten.copy_.default, (
                f"only copies of saved tensors are in a side stream, not {func}"
            )
            self._memory |= _memory_of(args[1])
        self.add(stream, lambda: self._run(func, args, kwargs), memory)
        if is_aside and not (given.get("non_blocking") and self._is_locked(args[0])):
            stream.synchronize()
        return written[0] if len(func._schema.returns) == 1 else tuple(written) if func._schema.returns else None

    def _run(self, func: Any, args: Any, kwargs: Any) -> None:
        with _disable_current_modes(), torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(VERSIONS):  # counted before
            func(*args, **kwargs)

    def _is_locked(self, tensor: torch.Tensor) -> bool:
        first = tensor.data_ptr()
        return any(begin <= first and first + tensor.nbytes <= begin + num for begin, num in self._locked.items())


def _memory_of(values: Any) -> frozenset[int]:
    found = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
    parts = [part for each in found for part in copies._plain(each)]
    return frozenset(each.untyped_storage().data_ptr() for each in parts) - {0}


@contextmanager
def simulated_gpu(schedule: Schedule) -> Iterator[Gpu]:
    """A simulated device for the copies of checkpoints, by a schedule."""
    gpu = Gpu(schedule)
    with pytest.MonkeyPatch.context() as patch, gpu:
        patch.setattr(copies, "has_streams", lambda: True)
        for name in ("current_device", "set_device", "current_stream", "stream"):
            patch.setattr(torch.cuda, name, getattr(gpu, name))
        patch.setattr(torch.cuda, "Stream", lambda: Stream(gpu))
        patch.setattr(torch.cuda, "cudart", lambda: gpu)
        yield gpu
