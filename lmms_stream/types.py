"""The values that pass between stages; no behaviour beyond arithmetic on themselves."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from enum import IntEnum
from importlib import import_module
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args

from .checks import check_fields
from .errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

Sample = Mapping[str, Any]  # one row of a dataset: column name -> decoded value
Processed = Mapping[str, Any]  # what a processor makes of it: input_ids, labels, and what loader/collate.py has in KEYS


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Object of a store: key, size, and a tag of the content.

    tag: entity tag, or time of modification in nanoseconds; "" (and num_bytes 0) if the store does not report a tag.
    written_s: time of the write by the store's clock, in seconds since 1970; 0 if not reported, and in lists.
    has_opaque_tag: the tag looks like a digest of the content but is not a digest; set only by `stat`.
    """

    key: str
    num_bytes: int
    tag: str
    written_s: float = field(default=0.0, compare=False)
    has_opaque_tag: bool = field(default=False, compare=False)


class Role(IntEnum):
    """Role of a sequence in a sample: an answer in a comparison, or one of several documents."""

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
    """The ranks that share the global batch, and the rank of this process among them.

    ranks_per_node: of each node in turn, where nodes have unequal numbers of ranks; empty where all have
    world_size / num_nodes. is_guess: other ranks may see other nodes; then packs are dealt as on one node.
    Invariants: 0 <= rank < world_size; ranks of one node are consecutive.
    """

    rank: int = 0
    world_size: int = 1
    num_nodes: int = 1
    replication: int = 1  # consecutive ranks that read the same packs (tensor or sequence parallel groups)
    ranks_per_node: Sequence[int] = ()
    is_guess: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        self._set_nodes()
        for name in ("world_size", "num_nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.world_size % self.num_nodes and not self.ranks_per_node:
            raise ConfigError(
                f"{self.num_nodes} nodes cannot have equal shares of {self.world_size} ranks: choose a divisor of "
                f"{self.world_size} as num_nodes, or give ranks_per_node, the ranks of each node"
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank must be from 0 to {self.world_size - 1}, got {self.rank}")
        if self.replication < 1 or self.world_size % self.replication:
            raise ConfigError(
                f"replication {self.replication} does not divide the world size {self.world_size}: choose a divisor"
            )

    def _set_nodes(self) -> None:
        """Make num_nodes and ranks_per_node agree: equal nodes have one form only."""
        sizes = tuple(self.ranks_per_node)
        if sizes and (min(sizes) < 1 or sum(sizes) != self.world_size or self.num_nodes not in (1, len(sizes))):
            raise ConfigError(
                f"ranks_per_node {sizes} must name at least one rank for each node, and {self.world_size} ranks "
                f"(world_size) in all{f' on {self.num_nodes} nodes (num_nodes)' if self.num_nodes > 1 else ''}"
            )
        if sizes:
            object.__setattr__(self, "num_nodes", len(sizes))
        object.__setattr__(self, "ranks_per_node", sizes if len(set(sizes)) > 1 else ())

    @staticmethod
    def detect() -> World:
        """Read the world from the environment of torchrun; without one, this process is the only rank.

        The environment of a rank tells the size of its own node only. Nodes are equal where that size fits the number
        of ranks and nodes. Of two unequal nodes both sizes follow; of more the world is a guess (is_guess).
        """
        rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        if rank is None or world_size is None:
            return World()
        return _world_of(int(rank), int(world_size), os.environ)

    def refuse_guess(self, remedy: str = "") -> None:
        """Raise ConfigError if other ranks may see other nodes. remedy: default for loaders, which take a world."""
        if self.is_guess:
            remedy = remedy or (
                "initialize torch.distributed before the first batch, or give "
                f"world=World(rank={self.rank}, world_size={self.world_size}, ranks_per_node=[…])"
            )
            raise ConfigError(
                f"nodes have unequal numbers of ranks (this node {self.nodes[self.node]} of {self.world_size}), and a "
                f"rank's environment does not tell the numbers of other nodes: {remedy}"
            )

    @property
    def nodes(self) -> tuple[int, ...]:
        """Ranks of each node."""
        return tuple(self.ranks_per_node) or (self.world_size // self.num_nodes,) * self.num_nodes

    @property
    def first_ranks(self) -> list[int]:
        """The first rank of each node."""
        return [0, *accumulate(self.nodes)][:-1]

    @property
    def node(self) -> int:
        """Number of the node that this rank is on."""
        return bisect_right(self.first_ranks, self.rank) - 1

    @property
    def is_first_of_node(self) -> bool:
        return self.rank == self.first_ranks[self.node]

    @property
    def num_groups(self) -> int:
        """Groups of ranks that read packs of their own."""
        return self.world_size // self.replication

    @property
    def group(self) -> int:
        return self.rank // self.replication

    @property
    def group_nodes(self) -> tuple[int, ...]:
        """Groups on each of the nodes among which packs are dealt: all on one where a group spans nodes."""
        if self.is_guess or any(ranks % self.replication for ranks in self.nodes):
            return (self.num_groups,)
        return tuple(ranks // self.replication for ranks in self.nodes)

    @property
    def group_node(self) -> int:
        """Number of this rank's node among group_nodes."""
        return self.node if len(self.group_nodes) > 1 else 0

    @property
    def num_equal_nodes(self) -> int:
        """Nodes with equal numbers of groups: 1 where nodes are unequal, or a group spans nodes."""
        return len(self.group_nodes) if len(set(self.group_nodes)) == 1 else 1


def nodes_of_ranks(local_sizes: Sequence[int]) -> tuple[int, ...]:
    """Ranks of each node, of the number of ranks on its node (LOCAL_WORLD_SIZE) that each rank was given.

    >>> nodes_of_ranks([2, 2, 1])
    (2, 1)
    """
    nodes: list[int] = []
    while (first := sum(nodes)) < len(local_sizes):
        size = local_sizes[first]
        if size < 1 or [*local_sizes[first : first + size]] != [size] * size:
            raise ConfigError(
                f"ranks do not agree on the ranks of their nodes: LOCAL_WORLD_SIZE is {size} at rank {first}, and "
                f"{[*local_sizes[first : first + max(1, size)]]} from there on: give the ranks of a node consecutive "
                "numbers, and set LOCAL_WORLD_SIZE of all of them to the number of ranks on their node"
            )
        nodes.append(size)
    return tuple(nodes)


def _world_of(rank: int, world_size: int, environment: Mapping[str, str]) -> World:
    local = min(world_size, max(1, int(environment.get("LOCAL_WORLD_SIZE", world_size))))
    num_nodes = int(environment.get("GROUP_WORLD_SIZE") or -(-world_size // local))
    first = max(0, rank - int(environment.get("LOCAL_RANK", rank % local)))  # of this node
    expected = int(environment.get("GROUP_RANK", first // local)) * local  # where nodes are equal
    if local * num_nodes == world_size and (first == expected or "GROUP_RANK" not in environment):
        return World(rank=rank, world_size=world_size, num_nodes=num_nodes)
    sizes = [size for size in (first, local, world_size - first - local) if size > 0]
    if sum(sizes) != world_size:
        sizes = [world_size]
    is_guess = not (num_nodes == len(sizes) == 2 and "GROUP_WORLD_SIZE" in environment)
    return World(rank=rank, world_size=world_size, ranks_per_node=sizes, is_guess=is_guess)


Kind = Literal["quarantined", "dropped"]


@dataclass(frozen=True, slots=True)
class LeftOutSample:
    """Left-out sample: name of the source, number in the source, reason, and first step as padding.

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


class PackSegments(NamedTuple):
    """Consecutive samples or pieces of samples in packs: int64[num_segments] each.

    Segment s is the tokens [starts[s], starts[s] + lengths[s]) of sample sample_ids[s], which is sample indices[s] of
    shard shard_ids[s] and has expected[s] tokens in all (-1: that is not known).
    """

    sample_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    shard_ids: NDArray[np.int64]
    indices: NDArray[np.int64]
    expected: NDArray[np.int64]


class TokenRows(NamedTuple):
    """Output arrays for the tokens of consecutive packs: int64[1, T] each; see Batch.

    position_ids: int64[axes, 1, T] for families of models with their own axes.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]


class SeveralSamples:
    """Attention mask of a batch of several samples, for mappings: any use raises ConfigError."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(
            "the batch has several samples, and model(**batch) would mix them: call model(**batch.for_model(model))"
        )


@dataclass(kw_only=True, slots=True)  # not frozen: that takes eight times as long to make
class Batch:
    """One pack as one sequence, ready for a model.

    input_ids, labels, position_ids: int64[1, T]; labels are -100 for tokens not trained on, and always at the first
    token of a segment, to prevent one sample from predicting the next; position_ids restart at 0 at each segment.
    For families of models with their own axes (time, height, width), position_ids are int64[1 + axes, 1, T]: first the
    token count within the segment, then the family's axes; float32 for families with fractions (Qwen3-Omni).
    inputs: named tensors of the media, concatenated over samples on axis 0, in the order of their tokens.
    token_inputs: named values per token, int64[1, T] each, for some families' models; 0 for samples without values.
    cu_seqlens: int32[num_segments + 1], token offsets of the segments; max_seqlen: the longest, in tokens.
    num_loss_tokens: number of labels other than -100. sample_ids: int64[num_samples]; empty in a pad pack.
    source: the source of the samples. step: number of the pack's step, counted from 0 at the beginning of the run, as
    by loader.step; micro_batch: number of the pack among this rank's packs of the step. num_patches: measured rows of
    the samples for the media tower.
    sequences: int64[n, 4] for samples of several sequences (a pair of answers, or documents without attention to each
    other): index of the sample in sample_ids, tokens [start, stop), and role (see Role), in token order. Each sequence
    is a segment; padding is excluded. None if each sample is one segment.
    left_out: samples in sample_ids with padding in place of their tokens, see plan/left_out.py; and samples skipped by
    lanes before this pack because their measurement failed.
    repeats: times that each of sample_ids came earlier in its epoch, for random draws; empty for zeros.
    holds_one: whether every batch of the loader, on all ranks, is one segment, by the settings; None without a loader.

    A batch can be read like a mapping: batch["input_ids"], labels, position_ids, each of inputs and token_inputs, and
    for several samples an attention_mask whose use raises ConfigError: model(**batch) takes a single sample.

    Batches of tokenized samples share memory with other batches of their step: clone a tensor before saving the tensor.
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
    repeats: Sequence[int] = ()
    holds_one: bool | None = None

    @property
    def _named(self) -> dict[str, Any]:
        tokens = {"input_ids": self.input_ids, "labels": self.labels, "position_ids": self.position_ids}
        mask = {"attention_mask": SeveralSamples()} if len(self.cu_seqlens) > 2 else {}
        return {**tokens, **self.inputs, **self.token_inputs, **mask}

    def __getitem__(self, name: str) -> Any:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def keys(self) -> KeysView[str]:
        """Names of the values."""
        return self._named.keys()

    def values(self) -> ValuesView[Any]:
        return self._named.values()

    def items(self) -> ItemsView[str, Any]:
        """Names and values."""
        return self._named.items()

    @property
    def num_segments(self) -> int:
        """Number of segments without padding; in one pack, the first segments of cu_seqlens."""
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
        """Sample id of a segment of one pack."""
        return int(self.sample_ids[self._index_of(segment)])

    def repeat_of(self, segment: int) -> int:
        """Times that the sample of a segment of one pack came earlier in its epoch; 0 for padding."""
        return self.repeats[self._index_of(segment)] if self.repeats and segment < self.num_segments else 0

    def _index_of(self, segment: int) -> int:
        return segment if self.sequences is None else int(self.sequences[segment, 0])

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, padding included."""
        return int(self.input_ids.shape[1])

    def for_model(
        self,
        model: Any,
        processor: Any = None,
        *,
        layout: Literal["packed", "padded"] = "packed",
        labels: bool = False,
    ) -> dict[str, Any]:
        """Keyword arguments of a model's forward pass.

        packed: model(**arguments).logits equal the logits of each sample alone. model is a model of transformers, and
        may be wrapped by DDP, fully_shard, torch.compile or peft. The first call for a model, and for an attention,
        checks the separation of samples (check_isolation): all ranks must call together, whatever their packs hold.
        Packs of one sample, by the loader's settings, need no check. ConfigError for a model or an attention with
        mixed samples.

        padded: for models that cannot take packs, a row for each segment: input_ids and attention_mask
        int64[num_segments, longest]; without media, of any model. processor: of packs with media. labels: with the
        labels, in the shape of input_ids.
        """
        choice = import_module(".train.model.choice", __package__)
        makers = {"packed": choice.arguments_of, "padded": choice.padded_arguments_of}
        if layout not in makers:
            raise ConfigError(f"layout {layout!r} is not known: choose one of {', '.join(makers)}")
        arguments: dict[str, Any] = makers[layout](self, model, processor)
        if not labels:
            del arguments["labels"]
        return arguments

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory (called by torch's DataLoader)."""
        return self._map(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def record_stream(self, stream: Any) -> None:
        """Keep the tensors' GPU memory until the stream has finished its queued work."""
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
