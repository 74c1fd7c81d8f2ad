"""Samples that cannot be processed: the errors of one sample, and the padding in its place."""

from __future__ import annotations

import errno
import faulthandler
import logging
import math
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

from ..checks import check_fields
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

    on_bad_sample: "error" ends the run with the sample's name; "quarantine" puts padding without loss in its place.
    sample_timeout_s: a sample that takes longer to process is an error; None: it may take as long as it likes. folder:
    where each worker appends what it quarantines (default: nowhere). Raises ConfigError.
    """

    on_bad_sample: OnBadSample = "error"
    sample_timeout_s: float | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, paths=("folder",))
        if self.on_bad_sample not in get_args(OnBadSample):
            raise ConfigError(f"on_bad_sample must be {' or '.join(get_args(OnBadSample))}, got {self.on_bad_sample!r}")
        timeout_s = self.sample_timeout_s
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise ConfigError(f"sample_timeout_s must be a number of seconds above 0, got {timeout_s}")


def is_of_sample(error: Exception) -> bool:
    """Whether an error is of one sample: not of a store, a shard, the machine or the settings, by itself or its causes.

    Image libraries raise OSError for damaged bytes, too; those of the system have a number.
    """
    if isinstance(error, LmmsStreamError) and not isinstance(error, DataError | LengthsError):
        return False
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, _NEVER) or _is_of_system(seen):
            return False
        seen = seen.__cause__ or seen.__context__
    return True


def _is_of_system(error: BaseException) -> bool:
    of_decoder = type(error).__module__.partition(".")[0] == "av"  # its errors of damaged bytes have numbers, too
    return isinstance(error, OSError) and error.errno in errno.errorcode and not of_decoder


def reason_of(error: Exception) -> str:
    """Return an error in one line, for a list."""
    said = str(error) if isinstance(error, LmmsStreamError) else f"{type(error).__name__}: {error}"
    return " ".join(said.split())[:MAX_REASON]


def padding_of(length: int) -> Processed:
    """Padding without loss, in the place of a segment of so many tokens."""
    return {"input_ids": np.zeros(length, np.int64), "labels": np.full(length, IGNORED_LABEL, np.int64)}


def check_padded(datasets: Mapping[str, PackedDataset], collator: object) -> None:
    """ConfigError where batches are made of more than tokens and media, so that padding is not all that they need."""
    objectives = {name: getattr(each.processor, "objective", None) for name, each in datasets.items()}
    found = [f"{name} is for {each}" for name, each in objectives.items() if each is not None]
    if collator is not collate and not isinstance(collator, PackCollator):
        found.append("the collator is another")
    if found:
        raise ConfigError(
            f"samples can be left out of batches of language models alone, and {', '.join(found)}: set "
            "on_bad_sample to error (of a run: bad_samples.quarantine to 0) and leave out drop, or convert the dataset "
            "without them"
        )


# Which sample each worker is at, and since when: memory that they share with their loader, which watches it.

LONGEST_POLL_S = 1.0
LEAST_GRACE_S = 5.0  # that a process which works on a sample itself has beyond its time, to raise the error
logger = logging.getLogger("lmms_stream")


class SampleClock(SharesTensors):
    """A row a process: when its sample began (nanoseconds, 0: it is at none), the number of its source, its id.

    timeout_s: a sample that takes longer is an error. sources: their names.
    """

    def __init__(self, num_workers: int, *, sources: Sequence[str], timeout_s: float):
        self.sources = tuple(sources)
        self.timeout_s = timeout_s
        zeros = shared_zeros if num_workers else torch.zeros
        self._rows = zeros(max(1, num_workers), 3, dtype=torch.int64)

    @contextmanager
    def at(self, source: str, sample_id: int, *, worker: int) -> Iterator[None]:
        """Say what is begun; WorkerError where it took too long."""
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
        """When the sample that a worker is at began; 0: it is at none."""
        return int(self._rows[worker, 0])

    def overdue(self) -> tuple[int, WorkerError] | None:
        """The first worker whose sample takes too long, and the error that names it."""
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
    """A thread that ends a worker whose sample takes too long, and reports it. end: ends a worker, by its number. None:
    this process processes the samples itself. It raises the error after the sample, or ends after twice the time, at
    least LEAST_GRACE_S more.
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
    """End with the reason, and with where each thread stands, whatever the main thread is at."""
    sys.stderr.write(f"this process ends itself, as it is still at this sample; error: {error}\n")
    sys.stderr.flush()
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)
