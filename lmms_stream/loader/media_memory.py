"""Reusable shared memory for media of batches. Media of a pack -> blocks -> batch.

Fresh memory from the system costs more than writing the data: 6000 pages for the patches of a one-megapixel image,
20 ms, twice the time of decoding and cutting the image. Therefore a worker keeps its blocks. A block begins with a
number: free or lent. The worker sets the number to lent; the process that receives the batch sets the number to free
when the last tensor in the block is gone. A batch that nobody received keeps the block.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Sequence
from mmap import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from ..errors import WorkerError
from ..types import TokenRows

HEADER = 64  # bytes before the data: the data begin at a cache line
FREE, LENT = 0, 1


class Block:
    """Memory for one array; other processes open the memory through this running process's file descriptor.

    No name outlives a killed process, and /dev/shm, often small in containers, stays free.
    """

    def __init__(self, num_bytes: int):
        self.num_bytes = HEADER + num_bytes
        self.file = os.memfd_create("media of lmms_stream")
        weakref.finalize(self, os.close, self.file).atexit = False
        os.ftruncate(self.file, self.num_bytes)
        whole = np.frombuffer(mmap(self.file, self.num_bytes), np.uint8)
        self.data = whole[HEADER:]
        self.state = whole[:8].view(np.int64)


class SharedBlocks:
    """The blocks of a worker."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return SharedBlocks, ()  # blocks belong to one process

    def take(self, num_bytes: int) -> Block:
        """Return the smallest free block with enough bytes, or a new block, which replaces the largest free block."""
        free = sorted((each for each in self._blocks if each.state[0] == FREE), key=lambda each: len(each.data))
        found = next((each for each in free if len(each.data) >= num_bytes), None)
        if found is None:
            if free:
                self._blocks.remove(free[-1])
            found = Block(num_bytes)
            self._blocks.append(found)
        found.state[0] = LENT
        return found

    def sendable(self, tensor: torch.Tensor) -> SentTensor:
        """Return a tensor for another process, in the tensor's own block or copied to a block."""
        array = tensor.numpy()
        block = self._block_of(array)
        if block is None:
            block = self.take(array.nbytes)
            block.data[: array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        return SentTensor(block, array.shape, array.dtype)

    def copied(self, tensor: torch.Tensor) -> NDArray[Any]:
        """Copy a tensor out of a block for sending through a pipe, and free the block."""
        array = tensor.numpy()
        block = self._block_of(array)
        if block is None:
            return array
        array = array.copy()
        block.state[0] = FREE
        return array

    def _block_of(self, array: NDArray[Any]) -> Block | None:
        """Return the block with the array at the beginning of the data."""
        address = array.ctypes.data
        return next((each for each in self._blocks if each.data.ctypes.data == address), None)


class PackMemory:
    """Memory for the media of one pack, array by array. num_rows: total number of rows; 0 if unknown."""

    def __init__(self, blocks: SharedBlocks, num_rows: int):
        self._blocks = blocks
        self._rows_left = num_rows
        self._regions: dict[str, _Region] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """See Memory. Arrays of a name are adjacent in a block; arrays beyond the block's end have separate memory."""
        region = self._regions.get(name)
        if region is None and self._rows_left:
            row_bytes = np.dtype(dtype).itemsize * math.prod(shape[1:])
            block = self._blocks.take(self._rows_left * row_bytes)
            rows = block.data[: self._rows_left * row_bytes].view(dtype).reshape(-1, *shape[1:])
            region = self._regions[name] = _Region(block, rows)
        self._rows_left = max(0, self._rows_left - shape[0])
        given = region.next(shape, np.dtype(dtype)) if region is not None else None
        return np.empty(shape, dtype) if given is None else given

    def joined(self, name: str, arrays: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
        """Join the arrays of a name if they are adjacent in memory; otherwise return None."""
        region = self._regions.get(name)
        found = None if region is None else region.joined(arrays)
        if found is not None:
            del self._regions[name]  # the block stays lent to the receiver of the tensor
        return found

    def give_back(self) -> None:
        """Free the blocks of names that were not joined, for example after a failed sample between other arrays."""
        for region in self._regions.values():
            region.block.state[0] = FREE
        self._regions = {}


class _Region:
    """Part of a block. rows: given to arrays, some rows each."""

    def __init__(self, block: Block, rows: NDArray[Any]):
        self.block = block
        self._rows = rows
        self._num_used = 0
        self._given: list[NDArray[Any]] = []

    def next(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
        stop = self._num_used + shape[0]
        if stop > len(self._rows) or shape[1:] != self._rows.shape[1:] or dtype != self._rows.dtype:
            return None
        array = self._rows[self._num_used : stop]
        self._num_used = stop
        self._given.append(array)
        return array

    def joined(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
        if len(arrays) != len(self._given) or any(a is not b for a, b in zip(arrays, self._given, strict=True)):
            return None
        return self._rows[: self._num_used]


class SentTensor:
    """A tensor for another process: unpickling returns the tensor in the same memory."""

    def __init__(self, block: Block, shape: tuple[int, ...], dtype: np.dtype[Any]):
        self._block, self._shape, self._dtype = block, shape, dtype

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        return _received, (os.getpid(), self._block.file, self._block.num_bytes, self._shape, self._dtype.str)


def _received(pid: int, file: int, num_bytes: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return the tensor in a block; the block becomes free when nobody refers to the tensor."""
    # The file is opened again each time: torch's file passing asks a thread of the worker, and the thread has to wait.
    try:
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
    except FileNotFoundError as error:
        raise ConnectionError(f"worker {pid} has ended before its batch was received") from error
    except OSError as error:
        raise WorkerError(
            f"the memory of worker {pid} cannot be opened ({error}): let processes of a user open each other's files "
            "below /proc, or set num_workers to 0"
        ) from error
    try:
        memory = mmap(opened, num_bytes)
    finally:
        os.close(opened)
    # Views keep the base array alive.
    lent = np.frombuffer(memory, np.uint8)
    weakref.finalize(lent, _give_back, memory, os.getpid()).atexit = False
    data = lent[HEADER : HEADER + math.prod(shape) * np.dtype(dtype).itemsize]
    return torch.from_numpy(data.view(dtype).reshape(shape))


def _give_back(memory: mmap, pid: int) -> None:
    if os.getpid() == pid:  # a fork has a copy of the tensor while this process still uses the block
        memory[:8] = FREE.to_bytes(8, "little")


# Reusable memory of batches. tokens -> [rows] -> arrays.
#
# Without reuse the system would allocate and free pieces of this size page by page, at a higher cost than filling.

MAX_FREE = 4  # pieces kept for later; a consumer that frees a batch after receiving the next batch needs two
GAP = 8 * 9  # between rows: the same token of two rows has different offsets in a page


def new_rows(num_tokens: int) -> TokenRows:
    """Return newly allocated, uninitialised rows."""
    return TokenRows(*np.empty((3, 1, num_tokens), np.int64))


class RowMemory:
    """Memory for rows, reused once all arrays and tensors that share the memory are gone."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.int64]] = []

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return RowMemory, ()  # memory belongs to one process

    def rows(self, num_tokens: int) -> TokenRows:
        """Return uninitialised rows."""
        needed = 3 * (num_tokens + GAP)
        piece = None
        while self._free and (piece is None or len(piece) < needed):  # free pieces below the needed size
            piece = self._free.pop()
        if piece is None or len(piece) < needed:
            piece = np.empty(needed, np.int64)
        lent = np.frombuffer(piece.data, np.int64)  # views keep the base array alive
        weakref.finalize(lent, self._take_back, piece).atexit = False
        whole = lent[None]
        first, second, third = (number * (num_tokens + GAP) for number in range(3))
        return TokenRows(
            whole[:, first : first + num_tokens],
            whole[:, second : second + num_tokens],
            whole[:, third : third + num_tokens],
        )

    def _take_back(self, piece: NDArray[np.int64]) -> None:
        if len(self._free) < MAX_FREE:
            self._free.append(piece)
