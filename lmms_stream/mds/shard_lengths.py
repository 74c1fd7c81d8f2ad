"""What was measured of the samples of one shard, as the work folder keeps it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..processors.base import Measured
from ..processors.not_shown import KINDS, amounts_of

_LENGTH = np.dtype("<u4")
_SUM = np.dtype("<i8")
MEDIA_KINDS = ("image", "video", "audio")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLengths:
    """lengths: uint32[num_samples], tokens. patches: uint32[num_samples]; None where the processor tells none.

    media_tokens: int64[3], tokens of all samples that stand for each of MEDIA_KINDS. num_cut: int64[1], media of which
    not all is read. not_shown: int64[k], samples with content of each of KINDS that the chat template does not show,
    and answers whose end is not trained on.
    """

    lengths: NDArray[np.uint32]
    patches: NDArray[np.uint32] | None = None
    media_tokens: NDArray[np.int64]
    num_cut: NDArray[np.int64]
    not_shown: NDArray[np.int64]

    @staticmethod
    def empty(num_samples: int, *, with_patches: bool) -> ShardLengths:
        """Of a shard whose samples are put in one after another."""
        return ShardLengths(
            lengths=np.zeros(num_samples, _LENGTH),
            patches=np.zeros(num_samples, _LENGTH) if with_patches else None,
            media_tokens=np.zeros(len(MEDIA_KINDS), _SUM),
            num_cut=np.zeros(1, _SUM),
            not_shown=np.zeros(len(KINDS), _SUM),
        )

    def put(self, index: int, found: Measured) -> None:
        self.lengths[index] = found.tokens
        if self.patches is not None:
            self.patches[index] = found.patches
            self.media_tokens[:] += found[2:5]
            self.num_cut[:] += found.num_cut
        if found.not_shown:
            self.not_shown[:] += amounts_of(found.not_shown)

    def to_bytes(self) -> bytes:
        """The lengths, the patches where there are any, and the sums after them, without zeros at their end."""
        sums = np.concatenate([self.media_tokens, self.num_cut, self.not_shown])
        if self.patches is None and not sums.any():
            return self.lengths.tobytes()
        patches = np.zeros_like(self.lengths) if self.patches is None else self.patches
        num_sums = max(len(self.media_tokens), int(np.flatnonzero(sums).max(initial=-1)) + 1)
        return b"".join(array.tobytes() for array in (self.lengths, patches, sums[:num_sums]))

    @staticmethod
    def from_bytes(data: bytes, *, num_samples: int) -> ShardLengths:
        """What to_bytes gave for a shard of num_samples."""
        lengths = np.frombuffer(data, _LENGTH, num_samples)
        num_media = len(MEDIA_KINDS)
        sums = np.zeros(num_media + 1 + len(KINDS), _SUM)
        patches = None
        if len(data) > lengths.nbytes:
            patches = np.frombuffer(data, _LENGTH, num_samples, lengths.nbytes)
            known = np.frombuffer(data, _SUM, offset=2 * lengths.nbytes)
            sums[: len(known)] = known
        return ShardLengths(
            lengths=lengths,
            patches=patches,
            media_tokens=sums[:num_media],
            num_cut=sums[num_media : num_media + 1],
            not_shown=sums[num_media + 1 :],
        )
