"""What a run takes of memory and disk besides its model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes that a run takes besides its model.

    disk: the shards. index: the lengths of all samples, which the processes of a node map together. plan: the packs
    that each process has at hand. pack, largest_pack: of the tensors of a pack as it is in the mean, and of the largest
    one, with its media (float32). worker: of a loader worker that has two packs ready and makes a third.
    """

    disk: int
    index: int
    plan: int
    pack: int
    largest_pack: int

    @property
    def worker(self) -> int:
        return self.plan + 3 * self.largest_pack
