"""What was measured of the samples of one shard, as the work folder keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..processors.base import Measured

_LENGTH = np.dtype("<u4")
_SUM = np.dtype("<i8")
MEDIA_KINDS = ("image", "video", "audio")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLengths:
    """lengths: uint32[num_samples], tokens. patches: uint32[num_samples]; None where the processor tells none.

    media_tokens: int64[3], tokens of all samples that stand for each of MEDIA_KINDS. num_cut: int64[1], media of which
    not all is read.
    """

    lengths: NDArray[np.uint32]
    patches: NDArray[np.uint32] | None = None
    media_tokens: NDArray[np.int64]
    num_cut: NDArray[np.int64]

    @staticmethod
    def empty(num_samples: int, *, with_patches: bool) -> ShardLengths:
        """Of a shard whose samples are put in one after another."""
        return ShardLengths(
            lengths=np.zeros(num_samples, _LENGTH),
            patches=np.zeros(num_samples, _LENGTH) if with_patches else None,
            media_tokens=np.zeros(len(MEDIA_KINDS), _SUM),
            num_cut=np.zeros(1, _SUM),
        )

    def put(self, index: int, found: Measured) -> None:
        self.lengths[index] = found.tokens
        if self.patches is not None:
            self.patches[index] = found.patches
            self.media_tokens[:] += found[2:5]
            self.num_cut[:] += found.num_cut

    def to_bytes(self) -> bytes:
        """The lengths, and where there are patches those and the sums after them, the last only if it is not 0."""
        arrays: list[NDArray[Any]] = [self.lengths]
        if self.patches is not None:
            arrays += [self.patches, self.media_tokens]
        if self.num_cut.any():
            arrays += [self.num_cut]
        return b"".join(array.tobytes() for array in arrays)

    @staticmethod
    def from_bytes(data: bytes, *, num_samples: int) -> ShardLengths:
        """What to_bytes gave for a shard of num_samples."""
        lengths = np.frombuffer(data, _LENGTH, num_samples)
        if len(data) == lengths.nbytes:
            sums = np.zeros(len(MEDIA_KINDS) + 1, _SUM)
            patches = None
        else:
            patches = np.frombuffer(data, _LENGTH, num_samples, lengths.nbytes)
            sums = np.append(np.frombuffer(data, _SUM, offset=2 * lengths.nbytes), _SUM.type(0))
        return ShardLengths(lengths=lengths, patches=patches, media_tokens=sums[:3], num_cut=sums[3:4])
