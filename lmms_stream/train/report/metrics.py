"""Counts and times of each rank's steps -> figures of a record."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...loader.loader import PackedLoader
from ...plan.assign import LINEAR_COST
from ...storage.fetch_config import FetchCounts
from ...types import Batch, World
from ..model.flops import ImageFlops, ModelFlops, peak_tflops
from ..run.distributed import gather
from .rank_figures import WINDOW_STEPS, RankMeter

logger = logging.getLogger("lmms_stream")


class StepCounts(NamedTuple):
    """Work of a rank in a step, or the sum over several ranks; padding does not count as tokens.

    capacity: maximum tokens of the packs, without pad packs. num_positions: tokens and padding. cost: the sum over
    segments of len**2 + LINEAR_COST * len, used to deal packs. flops: see ModelFlops; 0 if unknown. wait_s: time waited
    for data. num_patches: rows of the samples for the media tower. num_packs: packs with samples; shortest_pack,
    longest_pack: tokens, meaningless as sums over ranks. num_quarantined: samples replaced by padding because they
    cannot be processed.
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
    """Return the tokens of each segment of batches on the CPU, without padding: int64[num_segments]."""
    bounds = (batch.cu_seqlens.numpy()[: batch.num_segments + 1] for batch in batches)
    lengths: NDArray[np.int64] = np.concatenate([np.diff(each) for each in bounds]).astype(np.int64)
    return lengths


def cost_of(lengths: NDArray[np.int64]) -> int:
    """Return the cost of segments of these lengths, used to deal packs."""
    return int(np.dot(lengths, lengths)) + LINEAR_COST * int(lengths.sum())


def count_step(
    batches: Sequence[Batch],
    *,
    packing_lengths: Mapping[str, int],
    flops: ModelFlops | ImageFlops | None,
    wait_s: float,
) -> StepCounts:
    """Return the counts of the batches of a rank's step. packing_lengths: by source."""
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
    """Steps since the last record, from counts of all ranks. replication: consecutive ranks with the same packs."""

    def __init__(self, world_size: int, *, replication: int):
        self._replication = replication
        self._waits = np.zeros(world_size)
        self._longest_waits: deque[float] = deque(maxlen=WINDOW_STEPS)
        self.begin()

    def begin(self) -> None:
        """Forget the steps; only the quantiles of waiting times keep WINDOW_STEPS steps."""
        self.num_steps = 0
        self.sums = StepCounts(*np.zeros(len(StepCounts._fields)).tolist())
        self._waits = np.zeros_like(self._waits)
        self._rank_tokens: list[tuple[float, float, float]] = []  # mean, least and most of each step
        self._imbalances: list[float] = []
        self._tower_imbalances: list[float] = []  # of steps with media
        self._pack_bounds = [math.inf, 0.0]

    def end(self) -> StepWindow:
        """Return the steps in a window of their own, and begin the next steps."""
        ended = copy(self)
        ended._longest_waits = self._longest_waits.copy()
        self.begin()
        return ended

    def add(self, everyone: NDArray[np.float64]) -> StepCounts:
        """Add a step, float64[world_size, counts]; return the sums over ranks with different packs."""
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
        """Return the figures perf/ and data/ of a record, except MFU. seconds: total time of the steps.

        Figures of the tower are included if the steps have media.
        """
        sums = self.sums
        means, least, most = zip(*self._rank_tokens, strict=True)
        p50, p99 = np.quantile(self._longest_waits, [0.5, 0.99]).tolist()
        of_towers = {}
        if self._tower_imbalances:
            of_towers["perf/tower_imbalance"] = float(np.mean(self._tower_imbalances))
            of_towers["perf/patches_per_s"] = sums.num_patches / seconds
        return {
            "perf/tokens_per_s": sums.num_tokens / seconds,
            "perf/samples_per_s": sums.num_samples / seconds,
            "perf/packing_efficiency": sums.num_tokens / max(1, sums.capacity),
            "perf/padding_share": 1 - sums.num_tokens / max(1, sums.num_positions),
            "perf/global_seq_len_avg": float(np.mean(means)),
            "perf/global_seq_len_min": min(least),
            "perf/global_seq_len_max": max(most),
            "perf/cost_imbalance": float(np.mean(self._imbalances)),
            **of_towers,
            "data/wait_share": float(self._waits.max()) / seconds,
            "data/wait_p50_s": p50,
            "data/wait_p99_s": p99,
        }

    @property
    def pack_tokens(self) -> tuple[float, float, float]:
        """Tokens per pack in the steps: mean, least, most; without padding."""
        shortest, longest = self._pack_bounds
        return self.sums.num_tokens / max(1, self.sums.num_packs), shortest, longest


def finite_mean(values: Sequence[float]) -> float | None:
    """Return the mean of the finite values; None without finite values.

    >>> finite_mean([1.0, math.nan, 3.0])
    2.0
    """
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def source_losses(sources: Sequence[str], summed: Sequence[float]) -> dict[str, float]:
    """Return loss/NAME of each source with tokens in the steps; empty for a single source.

    summed: the sum of losses of each source, then the number of loss tokens of each source.
    """
    if len(sources) == 1:
        return {}
    pairs = zip(sources, summed[: len(sources)], summed[len(sources) :], strict=True)
    return {f"loss/{source}": loss / count for source, loss, count in pairs if count}


class Logged(Protocol):
    """An objective of a task in a record."""

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
    """Return the loss, total and by source. Of several objectives: the weighted sum, and each loss as loss/OBJECTIVE.

    Figures with units are added by their own names.

    summed: for each objective the sums by source, then the units by source, see source_losses. units: of each objective
    in all sources.
    """
    trained = [each for each in objectives if not each.is_figure]
    figures: dict[str, float] = {}
    for each, (losses, counts), count in zip(objectives, summed, units, strict=True):
        if each.is_figure and not count:
            continue
        name = each.name if each.is_figure else f"loss/{each.name}" if len(trained) > 1 else "loss"
        figures[name] = sum(losses) / max(1, count)
        of_sources = source_losses(sources, [*losses, *counts])
        figures |= {f"{name}{key.removeprefix('loss')}": loss for key, loss in of_sources.items()}
    if len(trained) > 1:
        figures["loss"] = sum(each.weight * figures[f"loss/{each.name}"] for each in trained)
    return figures


def by_source(name: str, values: Mapping[str, float]) -> dict[str, Any]:
    """Return a single value as `name`, several values as name/SOURCE."""
    if len(values) == 1:
        return {name: next(iter(values.values()))}
    return {f"{name}/{source}": value for source, value in values.items()}


# The figures of a record by LMMS Engine's names. record -> [this] -> more figures; arithmetic only.

NAMES = {
    "train/loss": "loss",
    "train/ce": "loss/ce",  # losses of texts and of images in BAGEL's task
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
    """Return figures of a training record by LMMS Engine's names; empty for other records.

    pack_tokens: mean, least and most tokens of packed sequences since the last record, named perf/global_seq_len_* in
    LMMS Engine's guide.
    """
    if "loss" not in record:
        return {}
    figures = {theirs: record[ours] for theirs, ours in NAMES.items() if ours in record}
    if "perf/tokens_per_s" in record:
        figures["train/tokens_per_gpu"] = record["perf/tokens_per_s"] / world_size
    lengths = zip(("avg", "min", "max"), pack_tokens, strict=True)
    return figures | {f"perf/global_seq_len_{name}": value for name, value in lengths}


# Measurements of steps: contents, times, waits and memory.

MIB = 1 << 20


class Meter:
    """Makes the record of the steps since the last record; all ranks make the same calls.

    Counting a step does not wait for the device: losses and gradient norm arrive on the CPU, see StepReading.
    The time of a record excludes work in `aside` (checkpoints, evaluation). objectives: the logged objectives. peak:
    TFLOP/s of a device (default: by device name). compilations: of a compiled model.
    """

    def __init__(
        self,
        loader: PackedLoader,
        *,
        objectives: Sequence[Logged],
        world: World,
        device: torch.device,
        flops: ModelFlops | ImageFlops | None,
        peak: float | None = None,
        compilations: Compilations | None = None,
    ):
        self._loader = loader
        self._world = world
        self._device = device
        self._flops = flops
        if peak is None and device.type == "cuda":
            peak = peak_tflops(torch.cuda.get_device_name(device))
        self._peak = peak
        self._compilations = compilations
        self._window = StepWindow(world.world_size, replication=world.replication)
        self._fetched = FetchCounts()
        self._objectives = objectives
        self._losses = torch.zeros(len(objectives), 2, len(loader.sources), dtype=torch.float64)
        self._units = [0.0] * len(objectives)
        self._grad_norms: list[float] = []
        self._wait_s = self._aside_s = 0.0
        self.rank = RankMeter(loader)
        self.pack_tokens = (0.0, 0.0, 0.0)  # of the last record: mean, least and most of a pack
        self._since = time.monotonic()

    def start(self) -> None:
        """Begin the time of the first record."""
        self._since = time.monotonic()
        self._aside_s = 0.0

    def waiting(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and count the time waited for each."""
        waiting = iter(batches)
        while True:
            started = time.monotonic()
            batch = next(waiting, None)
            self._wait_s += time.monotonic() - started
            if batch is None:
                return
            yield batch

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the time inside out of the records; earlier steps end first."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        started = time.monotonic()
        yield
        self._aside_s += time.monotonic() - started

    def count(self, batches: Sequence[Batch]) -> StepCounts:
        """Return the counts of this rank's batches of a step."""
        lengths = self._loader.packing_lengths(batches[0].step if batches else 0)
        mine = count_step(batches, packing_lengths=lengths, flops=self._flops, wait_s=self._wait_s)
        self.rank.add(mine.num_tokens, mine.num_loss_tokens, wait_s=self._wait_s)
        self._wait_s = 0.0
        return mine

    def add(self, everyone: NDArray[np.float64]) -> StepCounts:
        """Add the counts of all ranks, float64[world_size, counts]; return the sums."""
        return self._window.add(everyone)

    def end_step(self, losses: torch.Tensor, units: Sequence[float], *, grad_norm: float) -> None:
        """Add the losses and gradient norm of a step.

        losses: this rank's sums by source, then the units: float64[objectives, 2, sources], on the CPU. units: of each
        objective, over all ranks.
        """
        self._losses += losses
        self._units = [total + more for total, more in zip(self._units, units, strict=True)]
        self._grad_norms.append(grad_norm)

    def end_record(self) -> Callable[[], dict[str, Any]]:
        """End the steps of a record; return the function for its figures: averages, rates and total counts.

        All ranks call the function, after `end_step` with the last step's losses, before the next step's.
        """
        window, fetched, memory, now = self._window.end(), [*self._loader.fetched], self._memory(), time.monotonic()
        epochs = by_source("epoch", self._loader.epochs)
        graphs = {} if self._compilations is None else self._compilations.figures()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

        def record() -> dict[str, Any]:
            mine = [*self._losses.flatten().tolist(), *fetched, *memory.values()]
            everyone = gather(mine, self._world.world_size)
            # The last step of a GPU ends when its values have arrived, now.
            ended_s = now if self._device.type == "cpu" else time.monotonic()
            seconds = ended_s - self._since - self._aside_s
            num_losses = self._losses.numel()
            losses = everyone[:, :num_losses].sum(dim=0).view_as(self._losses).tolist()
            units = [count * self._world.replication for count in self._units]  # ranks with the same packs have all
            figures = {
                **epochs,
                **objective_losses(self._objectives, self._loader.sources, losses, units),
                "grad_norm": finite_mean(self._grad_norms),
                "num_steps": window.num_steps,
                "num_tokens": int(window.sums.num_tokens),
                "num_loss_tokens": int(window.sums.num_loss_tokens),
                "seconds": seconds,
                **window.figures(seconds),
                **self._utilization(window.sums.flops, seconds),
                **graphs,
                **self._fetches(everyone[:, num_losses : num_losses + len(fetched)], seconds),
                **dict(zip(memory, everyone[:, num_losses + len(fetched) :].amax(dim=0).tolist(), strict=True)),
            }
            self.pack_tokens = window.pack_tokens
            self._losses.zero_()
            self._units = [0.0] * len(self._objectives)
            self._grad_norms.clear()
            self._aside_s, self._since = 0.0, ended_s
            return figures

        return record

    def _utilization(self, flops: float, seconds: float) -> dict[str, float]:
        if self._flops is None:
            return {}
        tflops = flops / seconds / self._world.world_size / 1e12
        figures = {"perf/tflops_per_device": tflops}
        return figures if self._peak is None else figures | {"perf/mfu": tflops / self._peak}

    def _fetches(self, everyone: torch.Tensor, seconds: float) -> dict[str, float]:
        """Return fetches of all ranks since the last record. everyone: float64[world_size, counts] from the start."""
        total = FetchCounts(*map(int, everyone.sum(dim=0).tolist()))
        new = FetchCounts(*(now - before for now, before in zip(total, self._fetched, strict=True)))
        self._fetched = total
        figures = {
            "data/downloaded_mb_per_s": new.num_bytes / 1e6 / seconds,
            "data/cache_hits": new.hits,
            "data/cache_misses": new.misses,
        }
        if total.num_retries:
            figures["data/retries"] = new.num_retries
            figures["data/throttled_s"] = new.throttled_ms / 1000
        if total.from_peers or total.peer_failures:
            figures["data/from_peers"] = new.from_peers
            figures["data/from_peers_mb_per_s"] = new.peer_bytes / 1e6 / seconds
            figures["data/peer_failures"] = new.peer_failures
        return figures

    def _memory(self) -> dict[str, float]:
        """Return this rank's memory in MiB: the process now, and the peak of GPU tensors since the last record."""
        resident_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        memory = {"memory/process_mib": resident_bytes / MIB}
        if self._device.type == "cuda":
            memory["memory/cuda_peak_mib"] = torch.cuda.max_memory_allocated(self._device) / MIB
        return memory


# Number of graphs compiled by torch since the steps began, and a warning if packs do not explain the number.

MOST_GRAPHS = 16  # of layer and attention, for packs with and without media, some strides: see docs/speed.md


class Compilations:
    """Counts compilations from its creation, after the proof of the compiled model. tells: whether this rank warns."""

    def __init__(self, *, tells: bool, most: int = MOST_GRAPHS):
        self._most, self._tells = most, tells
        self._before = _num_graphs()

    def figures(self) -> dict[str, int]:
        """Return the number of graphs of this rank; each costs the time of a compilation."""
        found = _num_graphs() - self._before
        if found > self._most and self._tells:
            self._tells = False
            logger.warning(
                "%d graphs were compiled since the steps began, and %d are expected at most: packs of this run have "
                "something that each is compiled for anew. TORCH_LOGS=recompiles says what; set train.torch_compile to "
                "false, or train.pad_to, so that packs have one length",
                found, self._most,
            )  # fmt: skip
        return {"perf/num_graphs": found}


def _num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
