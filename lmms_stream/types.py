"""The values that pass between stages; no behaviour beyond arithmetic on themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from .errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

Sample = Mapping[str, Any]  # one row of a dataset: column name -> decoded value
Processed = Mapping[str, Any]  # what a processor makes of it: input_ids, labels, and what loader/collate.py has in KEYS


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a store: its key there, its size, and what changes with its content.

    tag: an entity tag, or a time of modification in nanoseconds; "" (and num_bytes 0) where the store does not say.
    """

    key: str
    num_bytes: int
    tag: str


class Role(IntEnum):
    """What a sequence of a sample is: an answer to those who compare answers, or a document beside others."""

    REJECTED = 0  # of a pair, the worse one; by itself, one that is not wanted
    CHOSEN = 1
    DOCUMENT = 2


class Columns(NamedTuple):
    """The columns of a dataset's shards, in stored order: names, MDS encodings, sizes in bytes (None: they vary)."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Where this process stands among those that share the global batch.

    Invariants: 0 <= rank < world_size; ranks of one node are consecutive; num_nodes divides world_size.
    """

    rank: int = 0
    world_size: int = 1
    num_nodes: int = 1
    replication: int = 1  # consecutive ranks that read the same packs (tensor or sequence parallel groups)

    def __post_init__(self) -> None:
        for name in ("world_size", "num_nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.world_size % self.num_nodes:
            raise ConfigError(
                f"{self.num_nodes} nodes cannot have equal shares of {self.world_size} ranks: choose a divisor of "
                f"{self.world_size} as num_nodes"
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank must be from 0 to {self.world_size - 1}, got {self.rank}")
        if self.replication < 1 or self.world_size % self.replication:
            raise ConfigError(
                f"replication {self.replication} does not divide the world size {self.world_size}: choose a divisor"
            )

    @staticmethod
    def detect() -> World:
        """Where this process stands, as torchrun puts it into the environment; alone where there is none."""
        rank, world_size, local = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        if rank is None or world_size is None:
            return World()
        num_nodes = max(1, int(world_size) // int(local or world_size))
        return World(rank=int(rank), world_size=int(world_size), num_nodes=num_nodes)

    @property
    def num_groups(self) -> int:
        """Groups of ranks that read packs of their own."""
        return self.world_size // self.replication

    @property
    def group(self) -> int:
        return self.rank // self.replication

    @property
    def num_group_nodes(self) -> int:
        """Nodes among which packs are dealt: 1 where a group spans nodes."""
        return self.num_nodes if self.num_groups % self.num_nodes == 0 else 1

    @property
    def groups_per_node(self) -> int:
        """Groups among which the packs of one of these nodes are dealt."""
        return self.num_groups // self.num_group_nodes


Kind = Literal["quarantined", "dropped"]


@dataclass(frozen=True, slots=True)
class LeftOutSample:
    """A sample by its source's name and its number there, why it is left out, and from which step on.

    since_step: the first step of the run in which it is padding; 0 is the beginning. Raises DataError.
    """

    source: str
    sample_id: int
    reason: str
    since_step: int
    kind: Kind

    def __post_init__(self) -> None:
        _check_left_out(self)

    @property
    def name(self) -> str:
        return f"{self.source}:{self.sample_id}"


class Segments(NamedTuple):
    """Samples, or pieces of them, that stand one after another in packs: int64[num_segments] each.

    Segment s is the tokens [starts[s], starts[s] + lengths[s]) of sample sample_ids[s], which is sample indices[s] of
    shard shard_ids[s] and has expected[s] tokens in all (-1: that is not known).
    """

    sample_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    shard_ids: NDArray[np.int64]
    indices: NDArray[np.int64]
    expected: NDArray[np.int64]


class Rows(NamedTuple):
    """What the tokens of packs, one after another, are written into: int64[1, T] each; see Batch.

    position_ids: int64[axes, 1, T] where a family of models has axes of its own.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]


@dataclass(kw_only=True, slots=True)  # not frozen: that takes eight times as long to make
class Batch:
    """One pack as one sequence, ready for a model.

    input_ids, labels, position_ids: int64[1, T]; labels are -100 where nothing is learnt, and always at
    the first token of a segment, so that no sample predicts the next; position_ids restart at 0 there.
    With a family of models that has axes of its own (time, height, width), position_ids are int64[1 + axes, 1, T]:
    those that restart by one a token, then the family's; float32 where the family's have fractions (Qwen3-Omni).
    inputs: named tensors of the media, those of all samples one after another on axis 0, in the order of their tokens.
    token_inputs: named values of tokens, int64[1, T] each, which some families' models take; 0 where a sample has none.
    cu_seqlens: int32[num_segments + 1], token offsets of the segments; max_seqlen: the longest, in tokens.
    num_loss_tokens: labels that are not -100. sample_ids: int64[num_samples]; empty in a pad pack.
    source: the source of the samples. step: the step it belongs to, counted from where the loader began;
    micro_batch: its number among this rank's packs of the step. num_patches: rows that its samples give to the tower
    of their media, as measured.
    sequences: int64[n, 4] where samples consist of several sequences, as a pair of answers does, or documents that do
    not see each other: the index of its sample in sample_ids, its tokens [start, stop), and its role (see Role), in the
    order of their tokens. Each is a segment of its own; padding is none of them. None where each sample is one segment.
    left_out: of the samples in sample_ids, those whose tokens are padding here; see plan/left_out.py. And samples that
    lanes passed over on the way to this pack, as they cannot be measured.

    Batches of tokenized samples share memory with others of their step: clone a tensor that is to be saved by itself.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    num_loss_tokens: int
    sample_ids: torch.Tensor
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    token_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    source: str = ""
    step: int = 0
    micro_batch: int = 0
    num_patches: int = 0
    sequences: torch.Tensor | None = None
    left_out: Sequence[LeftOutSample] = ()

    @property
    def num_segments(self) -> int:
        """Segments of samples; of one pack, the first ones of cu_seqlens. Padding is none of them."""
        return len(self.sample_ids if self.sequences is None else self.sequences)

    @property
    def sample_bounds(self) -> list[tuple[int, int]]:
        """The tokens [start, stop) of each sample of one pack."""
        bounds = self.cu_seqlens[: self.num_segments + 1].tolist()
        if self.sequences is not None:
            indices = self.sequences[:, 0].tolist()
            bounds = [bounds[0], *(bounds[indices.index(index)] for index in sorted({*indices})[1:]), bounds[-1]]
        return list(pairwise(bounds))

    def sample_of(self, segment: int) -> int:
        """The id of the sample that a segment of one pack is of."""
        index = segment if self.sequences is None else int(self.sequences[segment, 0])
        return int(self.sample_ids[index])

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, padding included."""
        return int(self.input_ids.shape[1])

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory (called by torch's DataLoader)."""
        return self._map(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def record_stream(self, stream: Any) -> None:
        """Have the memory of the tensors, which are on a GPU, stay until what a stream was given is done."""
        self._map(lambda tensor: (tensor.record_stream(stream), tensor)[1])

    def _map(self, change: Any) -> Batch:
        from dataclasses import fields, replace

        import torch

        values = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = {name: change(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
        named: dict[str, Any] = {
            group: {name: change(tensor) for name, tensor in getattr(self, group).items()}
            for group in ("inputs", "token_inputs")
        }
        return replace(self, **changed, **named)


def _check_left_out(sample: LeftOutSample) -> None:
    numbers = (sample.sample_id, sample.since_step)
    whole = all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 1 << 63 for each in numbers)
    texts = isinstance(sample.source, str) and isinstance(sample.reason, str)
    if not whole or not texts or sample.kind not in get_args(Kind):
        raise DataError(
            f"{sample!r} is no sample that was left out: sample_id and since_step must be numbers from 0 on, source "
            f"and reason texts, and kind {' or '.join(get_args(Kind))}"
        )
