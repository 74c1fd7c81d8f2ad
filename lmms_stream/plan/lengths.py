"""Lengths of a dataset's samples, as plans read them; without the compiled loops of packing, which take 0.1 s."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """lengths: integers[num_samples], tokens, in shard order, possibly memory-mapped. content_hash: hash of them.

    patches: integers[num_samples], rows that each sample gives to the tower of its media; None where no sample has any.
    patches_hash: hash of them, "" for none.
    """

    lengths: NDArray[np.integer[Any]]
    content_hash: str
    patches: NDArray[np.integer[Any]] | None = None
    patches_hash: str = ""

    def view(self) -> NDArray[np.integer[Any]]:
        """The lengths as an array that is quick to index, which a memory-mapped one is not."""
        return np.asarray(self.lengths)

    def release(self) -> None:
        """Give memory back that reading all over the lengths took, where they can be read again."""


def hash_lengths(lengths: NDArray[np.integer[Any]]) -> str:
    """The hash of lengths, or patches, as uint32: hex digits of HASH_BYTES bytes of BLAKE2b."""
    content = hashlib.blake2b(np.ascontiguousarray(lengths, dtype=np.uint32).data, digest_size=HASH_BYTES)
    return content.hexdigest()
