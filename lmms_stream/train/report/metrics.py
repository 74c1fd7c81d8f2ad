"""Counts of each rank's steps -> the figures of a record; arithmetic only."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...plan.assign import LINEAR_COST
from ...types import Batch
from ..model.flops import ImageFlops, ModelFlops

WINDOW_STEPS = 1000  # quantiles of waiting times are taken over so many steps


class StepCounts(NamedTuple):
    """What a rank did in a step, or the sum over several ranks; padding does not count as tokens.

    capacity: tokens that its packs could hold (pad packs left out). num_positions: tokens and padding. cost: the sum
    over segments of len**2 + LINEAR_COST * len, by which packs are dealt. flops: see ModelFlops, 0 where not known.
    wait_s: time waited for data. num_patches: rows that the samples give to the tower of their media. num_packs: those
    with samples; shortest_pack, longest_pack: tokens, whose sums over ranks mean nothing. num_quarantined: samples
    whose tokens are padding, as they cannot be processed.
    """

    num_loss_tokens: float
    num_tokens: float
    num_samples: float
    capacity: float
    num_positions: float
    cost: float
    flops: float
    wait_s: float
    num_patches: float = 0
    num_packs: float = 0
    shortest_pack: float = math.inf
    longest_pack: float = 0
    num_quarantined: float = 0


def segment_lengths(batches: Sequence[Batch]) -> NDArray[np.int64]:
    """Tokens of each segment of batches on the CPU, without padding: int64[num_segments]."""
    bounds = (batch.cu_seqlens.numpy()[: batch.num_segments + 1] for batch in batches)
    lengths: NDArray[np.int64] = np.concatenate([np.diff(each) for each in bounds]).astype(np.int64)
    return lengths


def cost_of(lengths: NDArray[np.int64]) -> int:
    """The cost of segments of these lengths, by which packs are dealt."""
    return int(np.dot(lengths, lengths)) + LINEAR_COST * int(lengths.sum())


def count_step(
    batches: Sequence[Batch],
    *,
    packing_lengths: Mapping[str, int],
    flops: ModelFlops | ImageFlops | None,
    wait_s: float,
) -> StepCounts:
    """Counts of the batches of a rank's step. packing_lengths: of each source."""
    lengths = segment_lengths(batches)
    num_tokens, num_loss_tokens = int(lengths.sum()), sum(batch.num_loss_tokens for batch in batches)
    of_packs = [(each, int(each.cu_seqlens[each.num_segments])) for each in batches if len(each.sample_ids)]
    packs = [tokens for _, tokens in of_packs]
    inputs = [batch.inputs for batch in batches]
    return StepCounts(
        num_loss_tokens=num_loss_tokens,
        num_tokens=num_tokens,
        num_samples=sum(len(batch.sample_ids) for batch in batches),
        capacity=sum(max(packing_lengths[batch.source], tokens) for batch, tokens in of_packs),
        num_positions=sum(batch.num_tokens for batch in batches),
        cost=cost_of(lengths),
        flops=flops.of(lengths, num_loss_tokens=num_loss_tokens, inputs=inputs) if flops is not None else 0.0,
        wait_s=wait_s,
        num_patches=sum(batch.num_patches for batch in batches),
        num_packs=len(packs),
        shortest_pack=min(packs, default=math.inf),
        longest_pack=max(packs, default=0),
        num_quarantined=sum(each.kind == "quarantined" for batch in batches for each in batch.left_out),
    )


class StepWindow:
    """The steps since the last record, by the counts of all ranks; `replication` consecutive ranks read the same."""

    def __init__(self, world_size: int, *, replication: int):
        self._replication = replication
        self._waits = np.zeros(world_size)
        self._longest_waits: deque[float] = deque(maxlen=WINDOW_STEPS)
        self.begin()

    def begin(self) -> None:
        """Forget the steps; the quantiles of waiting times go on over WINDOW_STEPS."""
        self.num_steps = 0
        self.sums = StepCounts(*np.zeros(len(StepCounts._fields)))
        self._waits[:] = 0
        self._rank_tokens: list[tuple[float, float, float]] = []  # mean, least and most of each step
        self._imbalances: list[float] = []
        self._tower_imbalances: list[float] = []  # of steps with media
        self._pack_bounds = [math.inf, 0.0]

    def add(self, everyone: NDArray[np.float64]) -> StepCounts:
        """Add a step, float64[world_size, counts]; returns its sums over ranks that read packs of their own."""
        column = StepCounts._fields.index
        readers = everyone[:: self._replication]
        waits, tokens, costs = (
            everyone[:, column("wait_s")],
            readers[:, column("num_tokens")],
            readers[:, column("cost")],
        )
        self._waits += waits
        self._longest_waits.append(float(waits.max()))
        self._rank_tokens.append((float(tokens.mean()), float(tokens.min()), float(tokens.max())))
        self._imbalances.append(float(costs.max() / costs.mean()))
        shortest, longest = readers[:, column("shortest_pack")].min(), readers[:, column("longest_pack")].max()
        self._pack_bounds = [min(self._pack_bounds[0], float(shortest)), max(self._pack_bounds[1], float(longest))]
        patches = readers[:, column("num_patches")]
        if patches.any():
            self._tower_imbalances.append(float(patches.max() / patches.mean()))
        step = StepCounts(*readers.sum(axis=0).tolist())
        self.num_steps += 1
        self.sums = StepCounts(*(total + more for total, more in zip(self.sums, step, strict=True)))
        return step

    def figures(self, seconds: float) -> dict[str, float]:
        """The figures perf/ and data/ of a record whose steps took `seconds` in all, except MFU.

        Those of the tower are told where the steps have media.
        """
        sums = self.sums
        means, least, most = zip(*self._rank_tokens, strict=True)
        p50, p99 = np.quantile(self._longest_waits, [0.5, 0.99]).tolist()
        return {
            "perf/tokens_per_s": sums.num_tokens / seconds,
            "perf/samples_per_s": sums.num_samples / seconds,
            "perf/packing_efficiency": sums.num_tokens / max(1, sums.capacity),
            "perf/padding_share": 1 - sums.num_tokens / max(1, sums.num_positions),
            "perf/global_seq_len_avg": float(np.mean(means)),
            "perf/global_seq_len_min": min(least),
            "perf/global_seq_len_max": max(most),
            "perf/cost_imbalance": float(np.mean(self._imbalances)),
            **self._tower_figures(seconds),
            "data/wait_share": float(self._waits.max()) / seconds,
            "data/wait_p50_s": p50,
            "data/wait_p99_s": p99,
        }

    @property
    def pack_tokens(self) -> tuple[float, float, float]:
        """Tokens of the packs of the steps: mean, least, most; padding does not count."""
        shortest, longest = self._pack_bounds
        return self.sums.num_tokens / max(1, self.sums.num_packs), shortest, longest

    def _tower_figures(self, seconds: float) -> dict[str, float]:
        if not self._tower_imbalances:
            return {}
        return {
            "perf/tower_imbalance": float(np.mean(self._tower_imbalances)),
            "perf/patches_per_s": self.sums.num_patches / seconds,
        }


def finite_mean(values: Sequence[float]) -> float | None:
    """The mean of those that are finite; None where none is.

    >>> finite_mean([1.0, math.nan, 3.0])
    2.0
    """
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def source_losses(sources: Sequence[str], summed: Sequence[float]) -> dict[str, float]:
    """loss/NAME of each source that the steps have tokens of; empty where there is one source only.

    summed: the sum of losses of each source, then the number of loss tokens of each.
    """
    if len(sources) == 1:
        return {}
    pairs = zip(sources, summed[: len(sources)], summed[len(sources) :], strict=True)
    return {f"loss/{source}": loss / count for source, loss, count in pairs if count}


class Logged(Protocol):
    """An objective of a task, as a record tells it."""

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float: ...

    @property
    def is_figure(self) -> bool: ...


def objective_losses(
    objectives: Sequence[Logged],
    sources: Sequence[str],
    summed: Sequence[Sequence[Sequence[float]]],
    units: Sequence[float],
) -> dict[str, float]:
    """The loss, and that of each source. Of several objectives: their weighted sum, and each one's as loss/OBJECTIVE.

    Figures stand beside by their own names, where there are units of them.

    summed: of each objective, see source_losses: the sums by source, then the units by source. units: of each
    objective in all sources.
    """
    every = list(zip(objectives, summed, units, strict=True))
    told = {}
    for each, (losses, counts), count in every:
        if each.is_figure and count:
            of_sources = source_losses(sources, [*losses, *counts])
            told[each.name] = sum(losses) / count
            told |= {f"{each.name}{key.removeprefix('loss')}": value for key, value in of_sources.items()}
    named, sums, counts_of = zip(*(found for found in every if not found[0].is_figure), strict=True)
    return _losses(named, sources, sums, counts_of) | told


def _losses(
    objectives: Sequence[Logged],
    sources: Sequence[str],
    summed: Sequence[Sequence[Sequence[float]]],
    units: Sequence[float],
) -> dict[str, float]:
    """See objective_losses: of objectives that are no figures."""
    means = [sum(losses) / max(1, count) for (losses, _), count in zip(summed, units, strict=True)]
    if len(objectives) == 1:
        ((losses, counts),) = summed
        return {"loss": means[0], **source_losses(sources, [*losses, *counts])}
    figures = {"loss": sum(each.weight * mean for each, mean in zip(objectives, means, strict=True))}
    for each, mean, (losses, counts) in zip(objectives, means, summed, strict=True):
        figures[f"loss/{each.name}"] = mean
        of_sources = source_losses(sources, [*losses, *counts])
        figures |= {f"loss/{each.name}{key.removeprefix('loss')}": loss for key, loss in of_sources.items()}
    return figures


def by_source(name: str, values: Mapping[str, float]) -> dict[str, Any]:
    """One value as `name`, several as name/SOURCE."""
    if len(values) == 1:
        return {name: next(iter(values.values()))}
    return {f"{name}/{source}": value for source, value in values.items()}


# The figures of a record by LMMS Engine's names. record -> [this] -> more figures; arithmetic only.

NAMES = {
    "train/loss": "loss",
    "train/ce": "loss/ce",  # of texts and of images, by BAGEL's task
    "train/mse": "loss/mse",
    "train/lr": "learning_rate",
    "train/grad_norm": "grad_norm",
    "train/mfu": "perf/mfu",
    "train/total_tokens": "tokens_seen",
    "train/tokens_per_second": "perf/tokens_per_s",
    "train/epoch": "epoch",
}  # theirs -> ours


def engine_figures(
    record: Mapping[str, Any], *, pack_tokens: tuple[float, float, float], world_size: int
) -> dict[str, Any]:
    """What a record of training has by their names; nothing for other records.

    pack_tokens: mean, least and most of the packed sequences since the last record, which is what their guide has as
    perf/global_seq_len_*.
    """
    if "loss" not in record:
        return {}
    figures = {theirs: record[ours] for theirs, ours in NAMES.items() if ours in record}
    if "perf/tokens_per_s" in record:
        figures["train/tokens_per_gpu"] = record["perf/tokens_per_s"] / world_size
    lengths = zip(("avg", "min", "max"), pack_tokens, strict=True)
    return figures | {f"perf/global_seq_len_{name}": value for name, value in lengths}
