"""Samples that cannot be processed: errors of a single sample, and padding instead of the sample."""

from __future__ import annotations

import errno
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from ..checks import check_fields, check_seconds
from ..errors import ConfigError, DataError, LengthsError, LmmsStreamError, ShardError, StorageError, WorkerError
from ..mds.core import PackedDataset
from ..processes.shared_tensors import SharesTensors, shared_zeros
from ..processors.base import IGNORED_LABEL
from ..storage.retry import start_thread
from ..types import Processed
from .collate import PackCollator, collate

OnBadSample = Literal["error", "quarantine"]
MAX_REASON = 500  # characters of an error that a list keeps
_NEVER = (MemoryError, ImportError, StorageError, ShardError, ConfigError, torch.OutOfMemoryError)


@dataclass(frozen=True, kw_only=True, slots=True)
class BadSamples:
    """How a loader treats bad samples.

    on_bad_sample: "error" ends the run with the sample's name; "quarantine" replaces the sample by padding without
    loss. sample_timeout_s: processing time after which a sample is an error; None: unlimited. folder: each worker
    appends quarantined samples to a list in the folder (default: no list). Raises ConfigError.
    """

    on_bad_sample: OnBadSample = "error"
    sample_timeout_s: float | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, paths=("folder",))
        if self.on_bad_sample not in get_args(OnBadSample):
            raise ConfigError(f"on_bad_sample must be {' or '.join(get_args(OnBadSample))}, got {self.on_bad_sample!r}")
        if self.sample_timeout_s is not None:
            check_seconds("sample_timeout_s", self.sample_timeout_s)


def is_of_sample(error: Exception) -> bool:
    """Whether an error concerns one sample: neither error nor causes concern a store, a shard, the machine or settings.

    Image libraries also raise OSError for damaged bytes; only the system's OSErrors have a number.
    """
    if isinstance(error, LmmsStreamError) and not isinstance(error, DataError | LengthsError):
        return False
    seen: BaseException | None = error
    while seen is not None:
        of_decoder = type(seen).__module__.partition(".")[0] == "av"  # its errors for damaged bytes also have numbers
        is_of_system = isinstance(seen, OSError) and seen.errno in errno.errorcode and not of_decoder
        if is_of_system or isinstance(seen, _NEVER):
            return False
        seen = seen.__cause__ or seen.__context__
    return True


def reason_of(error: Exception) -> str:
    """Return an error in one line, for a list."""
    said = str(error) if isinstance(error, LmmsStreamError) else f"{type(error).__name__}: {error}"
    return " ".join(said.split())[:MAX_REASON]


def padding_of(length: int) -> Processed:
    """Return padding without loss for a segment of `length` tokens."""
    return {"input_ids": np.zeros(length, np.int64), "labels": np.full(length, IGNORED_LABEL, np.int64)}


def check_padded(datasets: Mapping[str, PackedDataset], collator: object) -> None:
    """Raise ConfigError if padding cannot replace a sample: batches contain more than tokens and media."""
    objectives = {name: getattr(each.processor, "objective", None) for name, each in datasets.items()}
    found = [f"{name} is for {each}" for name, each in objectives.items() if each is not None]
    if collator is not collate and not isinstance(collator, PackCollator):
        found.append("the collator is your own")
    if found:
        raise ConfigError(
            f"only batches of language models can leave samples out, but {', '.join(found)}: set on_bad_sample to "
            "error (in a run, bad_samples.quarantine to 0) and remove drop, or convert without the bad samples"
        )


# Current sample of each worker, and start time: shared memory, watched by the loader.

LONGEST_POLL_S = 1.0
LEAST_GRACE_S = 5.0  # least extra time for a loader without workers to raise the error of an overdue sample
logger = logging.getLogger("lmms_stream")


class SampleClock(SharesTensors):
    """A row per process: start time of the sample (nanoseconds, 0: no sample), number of the source, sample id.

    timeout_s: time after which a sample is an error. sources: names of the sources.
    """

    def __init__(self, num_workers: int, *, sources: Sequence[str], timeout_s: float):
        self.sources = tuple(sources)
        self.timeout_s = timeout_s
        zeros = shared_zeros if num_workers else torch.zeros
        self._rows = zeros(max(1, num_workers), 3, dtype=torch.int64)

    @contextmanager
    def at(self, source: str, sample_id: int, *, worker: int) -> Iterator[None]:
        """Record the sample while a worker processes the sample; WorkerError if processing took too long."""
        row = self._rows[worker].numpy()
        row[1], row[2] = self.sources.index(source), sample_id
        row[0] = began = time.monotonic_ns()
        try:
            yield
        finally:
            row[0] = 0
        if time.monotonic_ns() - began > self.timeout_s * 1e9:
            raise self.error(source, sample_id)

    def begun(self, worker: int) -> int:
        """Start time of a worker's current sample, in nanoseconds; 0: no sample."""
        return int(self._rows[worker, 0])

    def overdue(self) -> tuple[int, WorkerError] | None:
        """The first worker with an overdue sample, and the error with the sample's name."""
        for worker, (began, source, sample_id) in enumerate(self._rows.tolist()):
            if began and time.monotonic_ns() - began > self.timeout_s * 1e9:
                return worker, self.error(self.sources[source], sample_id)
        return None

    def error(self, source: str, sample_id: int) -> WorkerError:
        return WorkerError(
            f"sample {source}:{sample_id} takes longer than sample_timeout_s, {self.timeout_s:g} s: raise it (of a "
            f"run: bad_samples.timeout_s), or leave the sample out with this line in a file that drop names: "
            f"{source}:{sample_id}"
        )


class SampleWatch:
    """A thread that reports an overdue sample and ends the worker.

    end: ends a worker, by number. None: this process processes the samples. The process then raises the error after
    the sample, or ends when the sample has taken another timeout_s, at least LEAST_GRACE_S.
    """

    def __init__(self, clock: SampleClock, end: Callable[[int], Any] | None):
        self.error: WorkerError | None = None
        self._clock, self._end = clock, end
        self._stop = threading.Event()
        start_thread(self._watch, name="lmms_stream-samples")

    def stop(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        clock = self._clock
        while not self._stop.wait(min(LONGEST_POLL_S, clock.timeout_s / 4)):
            if (overdue := clock.overdue()) is None:
                continue
            worker, self.error = overdue
            logger.error("%s", self.error)
            if self._end is not None:
                self._end(worker)
                return
            begun = clock.begun(worker)
            grace_s = max(clock.timeout_s, LEAST_GRACE_S)
            if begun and not self._stop.wait(grace_s) and clock.begun(worker) == begun:
                _end_this_process(self.error)


def _end_this_process(error: WorkerError) -> None:
    """End this process at once, with the reason and the stacks of all threads."""
    sys.stderr.write(f"this process ends itself, as it is still at this sample; error: {error}\n")
    sys.stderr.flush()
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)
