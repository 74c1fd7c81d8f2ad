"""Traces of some steps by torch's profiler, one for each rank, which Perfetto and chrome://tracing read."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from .settings import ProfileConfig


class StepProfiler:
    """While entered, traces steps [first, stop) of this run to `folder`/rank-N.json; steps count from its start.

    A run that ends before writes what it has. Without a config nothing is traced.
    """

    def __init__(self, config: ProfileConfig | None, *, output_dir: Path, rank: int):
        self._config = config
        folder = Path(config.folder) if config is not None and config.folder else output_dir / "profile"
        self._path = folder / f"rank-{rank}.json"
        self._num_steps = 0
        self._running: profile | None = None

    def __enter__(self) -> StepProfiler:
        self._turn()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._write()

    def step(self) -> None:
        """A step has ended."""
        self._num_steps += 1
        self._turn()

    def _turn(self) -> None:
        if self._config is None:
            return
        if self._num_steps == self._config.first:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._running = profile(activities=activities)
            self._running.start()
        elif self._num_steps == self._config.stop:
            self._write()

    def _write(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._running.export_chrome_trace(str(self._path))
            self._running = None
