"""Lengths of a dataset's samples for plans, without the compiled loops of packing, which take 0.1 s to import."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of samples. lengths: integers[num_samples], tokens, in shard order, possibly memory-mapped.

    content_hash: hash of the lengths. patches: integers[num_samples], rows of each sample for the dataset's media
    tower; None for text only. patches_hash: hash of the patches, or "".
    """

    lengths: NDArray[np.integer[Any]]
    content_hash: str
    patches: NDArray[np.integer[Any]] | None = None
    patches_hash: str = ""

    def view(self) -> NDArray[np.integer[Any]]:
        """Return the lengths as a plain array: indexing a memory-mapped array is slow."""
        return np.asarray(self.lengths)

    def release(self) -> None:
        """Give memory back after reading all lengths, if the lengths can be read again."""


def hash_lengths(lengths: NDArray[np.integer[Any]]) -> str:
    """Return the hash of lengths or patches, as uint32: hex digits of HASH_BYTES bytes of BLAKE2b."""
    content = hashlib.blake2b(np.ascontiguousarray(lengths, dtype=np.uint32).data, digest_size=HASH_BYTES)
    return content.hexdigest()
