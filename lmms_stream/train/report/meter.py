"""Measures the steps of a run: what they hold, how long they take and wait, how much memory they need."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...loader.loader import PackedLoader
from ...storage.tally import FetchCounts
from ...types import Batch, World
from ..model.flops import ImageFlops, ModelFlops, peak_tflops
from ..run.distributed import gather
from .metrics import Logged, StepCounts, StepWindow, by_source, count_step, finite_mean, objective_losses

MIB = 1 << 20


class Meter:
    """Makes the record of the steps since the last one; all ranks call it alike.

    It never waits for the device: it is given the losses of a step with its norm, see run/counts.py. The time of a
    record is that of its steps without what is done `aside` (checkpoints, evaluation). objectives: those whose losses
    are logged. peak: TFLOP/s of a device (default: by its name). compilations: of a model that is compiled.
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
        self._packing_lengths = loader.packing_lengths
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
        self.pack_tokens = (0.0, 0.0, 0.0)  # of the last record: mean, least and most of a pack
        self._since = time.monotonic()

    def start(self) -> None:
        """Begin the time of the first record."""
        self._since = time.monotonic()
        self._aside_s = 0.0

    def waiting(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches; the time that each is waited for is counted."""
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
        """Leave the time inside out of the records; the steps before it end first."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        started = time.monotonic()
        yield
        self._aside_s += time.monotonic() - started

    def count(self, batches: Sequence[Batch]) -> StepCounts:
        """Counts of this rank's batches of a step."""
        mine = count_step(batches, packing_lengths=self._packing_lengths, flops=self._flops, wait_s=self._wait_s)
        self._wait_s = 0.0
        return mine

    def add(self, everyone: NDArray[np.float64]) -> StepCounts:
        """Add the counts of all ranks, float64[world_size, counts]; returns their sums."""
        return self._window.add(everyone)

    def end_step(self, losses: torch.Tensor, units: Sequence[float], *, grad_norm: float) -> None:
        """losses: this rank's sums by source, then their units: float64[objectives, 2, sources], on the CPU.

        units: of each objective, of all ranks.
        """
        self._losses += losses
        self._units = [total + more for total, more in zip(self._units, units, strict=True)]
        self._grad_norms.append(grad_norm)

    def record(self) -> dict[str, Any]:
        """Figures of the steps since the last record: averages and rates over them, counts in all of them."""
        fetched, losses_here = self._loader.fetched, self._losses.flatten().tolist()
        memory = self._memory()
        mine = [*losses_here, *fetched, *memory.values()]
        everyone = gather(mine, self._world.world_size)
        now = time.monotonic()
        seconds = now - self._since - self._aside_s
        num_losses = self._losses.numel()
        losses = everyone[:, :num_losses].sum(dim=0).view_as(self._losses).tolist()
        sums, readers = self._window.sums, self._world.replication
        units = [count * readers for count in self._units]  # of ranks that read the same, each has its losses
        record = {
            **by_source("epoch", self._loader.epochs),
            **objective_losses(self._objectives, self._loader.sources, losses, units),
            "grad_norm": finite_mean(self._grad_norms),
            "num_steps": self._window.num_steps,
            "num_tokens": int(sums.num_tokens),
            "num_loss_tokens": int(sums.num_loss_tokens),
            "seconds": seconds,
            **self._window.figures(seconds),
            **self._utilization(seconds),
            **({} if self._compilations is None else self._compilations.figures()),
            **self._fetches(everyone[:, num_losses : num_losses + len(fetched)], seconds),
            **dict(zip(memory, everyone[:, num_losses + len(fetched) :].amax(dim=0).tolist(), strict=True)),
        }
        self.pack_tokens = self._window.pack_tokens
        self._begin(now)
        return record

    def _begin(self, now: float) -> None:
        self._window.begin()
        self._losses.zero_()
        self._units = [0.0] * len(self._objectives)
        self._grad_norms.clear()
        self._aside_s = 0.0
        self._since = now
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _utilization(self, seconds: float) -> dict[str, float]:
        if self._flops is None:
            return {}
        tflops = self._window.sums.flops / seconds / self._world.world_size / 1e12
        figures = {"perf/tflops_per_device": tflops}
        return figures if self._peak is None else figures | {"perf/mfu": tflops / self._peak}

    def _fetches(self, everyone: torch.Tensor, seconds: float) -> dict[str, float]:
        """Of all ranks since the last record; everyone: float64[world_size, 6], since the beginning."""
        total = FetchCounts(*map(int, everyone.sum(dim=0).tolist()))
        new = FetchCounts(*(now - before for now, before in zip(total, self._fetched, strict=True)))
        self._fetched = total
        figures = {
            "data/downloaded_mb_per_s": new.num_bytes / 1e6 / seconds,
            "data/cache_hits": new.hits,
            "data/cache_misses": new.misses,
        }
        if total.from_peers or total.peer_failures:
            figures["data/from_peers"] = new.from_peers
            figures["data/from_peers_mb_per_s"] = new.peer_bytes / 1e6 / seconds
            figures["data/peer_failures"] = new.peer_failures
        return figures

    def _memory(self) -> dict[str, float]:
        """In MiB, of this rank: its process now, and the most that tensors took on its GPU since the last record."""
        memory = {"memory/process_mib": _resident_bytes() / MIB}
        if self._device.type == "cuda":
            memory["memory/cuda_peak_mib"] = torch.cuda.max_memory_allocated(self._device) / MIB
        return memory


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# How many graphs torch compiled since the steps began, and a warning where they are more than packs explain.

MOST_GRAPHS = 16  # a layer's and an attention's, of packs with and without media, some strides: see docs/speed.md
logger = logging.getLogger("lmms_stream")


class Compilations:
    """Counts from when it is made, which is after the proof of the compiled model. tells: this rank warns."""

    def __init__(self, *, tells: bool, most: int = MOST_GRAPHS):
        self._most, self._tells = most, tells
        self._before = _num_graphs()

    def figures(self) -> dict[str, int]:
        """Graphs of this rank, which each cost the time of a compilation."""
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
