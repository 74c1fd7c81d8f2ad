"""Traces of some steps by torch's profiler, one for each rank, which Perfetto and chrome://tracing read."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from torch.profiler import profile, schedule

from ...errors import StorageError
from ...storage.disk_errors import disk_errors
from ..run.settings import ProfileConfig

ROOM = "free some, or set train.profile.folder, or no train.profile"
_END_BYTES = 1 << 13  # read from the end of a trace, which holds its path


class StepProfiler:
    """While entered, traces steps [first, stop) of this run, counted from its start, which has `step` behind it.

    The file is `folder`/rank-N-step-S.json, S the first step in it as the log counts, so that a resumed run leaves the
    traces of the one before. A run that ends before writes what it has. Without a config nothing is traced.
    StorageError when the disk refuses the file.
    """

    def __init__(self, config: ProfileConfig | None, *, output_dir: Path, rank: int, step: int):
        self._profile: profile | None = None
        if config is not None:
            folder = Path(config.folder) if config.folder else output_dir / "profile"
            self._path = folder / f"rank-{rank}-step-{step + config.first + 1}.json"
            # The profiler's step n is the nth step of this run; its step 0, before the first one, is empty.
            steps = schedule(skip_first=config.first, wait=0, warmup=1, active=config.stop - config.first, repeat=1)
            # acc_events: of the one cycle that there is; without it torch warns that several would not be kept.
            self._profile = profile(schedule=steps, on_trace_ready=self._write, acc_events=True)

    def __enter__(self) -> StepProfiler:
        if self._profile is not None:
            self._profile.start()
            self._profile.step()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._profile is not None:
            self._profile.stop()

    def step(self) -> None:
        """A step has ended."""
        if self._profile is not None:
            self._profile.step()

    def _write(self, traced: profile) -> None:
        with disk_errors(str(self._path), room=ROOM):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(b"")  # torch reports no disk errors; Python raises those of the path here
            traced.export_chrome_trace(str(self._path))
            if not _is_whole(self._path):
                for part in self._path.parent.glob(f"{self._path.name}*"):  # also the .tmp file that torch writes first
                    part.unlink()
                raise StorageError(f"{self._path}: the trace could not be written whole, as on a full disk: {ROOM}")


def _is_whole(path: Path) -> bool:
    """Whether a trace has the end that torch writes last."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
        end = file.read(_END_BYTES)
    return b'"traceName"' in end and end.rstrip().endswith(b"}")
