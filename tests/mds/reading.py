"""One epoch of a dataset, read here or in a process of its own, for tests of what goes wrong meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, cast

import pytest
from lmms_stream.errors import LmmsStreamError
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.storage.storage import open_storage

from ..processes import PROCESSES
from ..rounds import LONG

MARKS = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on a machine with fewer cores
]

SHARDS = r"/shard\.\d{5}\.mds$"
SHARD = "shard.00002.mds"  # the one that has the fault
ONLY_SHARD = r"/shard\.00002\.mds$"
IN_PROCESS_AND_WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def read_by(cases: Mapping[str, Any], *, in_workers: Collection[str]) -> list[Any]:
    """Each case by name, read in this process; in short rounds only the named ones are read by two workers, too."""
    assert cases.keys() >= set(in_workers)
    return [
        pytest.param(case, num_workers, id=f"{name}-{num_workers}")
        for name, case in cases.items()
        for num_workers in (0, 2)
        if not num_workers or LONG or name in in_workers
    ]


Delivered = list[tuple[list[int], list[int]]]  # of each batch: its sample ids and its input_ids


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One epoch of a dataset by one process and its workers."""

    remote: str
    local: Path | None
    processor: ChatProcessor
    num_workers: int = 0
    fetch: FetchConfig = FetchConfig(timeout_s=30)  # noqa: RUF009 - it is frozen

    @property
    def cache(self) -> Path:
        assert self.local is not None
        return self.local

    def loader(self) -> PackedLoader:
        dataset = PackedStreamingDataset(
            self.remote,
            self.local,
            processor=self.processor,
            packing=PackingConfig(packing_length=1024, overlong="drop"),
            order=OrderConfig(num_canonical_nodes=2, shuffle_block_size=100),
            fetch=self.fetch,
        )
        return PackedLoader(dataset, global_batch=8, num_workers=self.num_workers, timeout_s=60)

    def deliver(self) -> Delivered:
        return list(deliver(self.loader()))


def deliver(loader: PackedLoader) -> Iterator[tuple[list[int], list[int]]]:
    for batch in loader:
        yield batch.sample_ids.tolist(), batch.input_ids[0].tolist()


def read_until_error(loader: PackedLoader, error: type[LmmsStreamError]) -> tuple[Delivered, str]:
    """What came before the error, and the error's text."""
    delivered: Delivered = []
    with pytest.raises(error) as caught:
        delivered.extend(deliver(loader))
    return delivered, str(caught.value)


@dataclass(frozen=True)
class Child:
    """A process that reads, and the session of processes that it began."""

    process: Any
    answer: Path

    def outcome(self, timeout_s: float = 40) -> Delivered | LmmsStreamError:
        """What it delivered, or its error, once it has ended."""
        self.process.join(timeout_s)
        assert self.process.exitcode == 0
        return cast("Delivered | LmmsStreamError", pickle.loads(self.answer.read_bytes()))

    def signal(self, number: int) -> None:
        """To the process and its workers."""
        os.killpg(self.process.pid, number)


def _read_in_child(
    reading: Reading, environment: dict[str, str], answer: Path, prepare: Callable[[], None] | None, begun: Event
) -> None:
    os.setsid()
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # of loader workers: torch's default on Linux
    if prepare is not None:
        prepare()
    begun.set()
    outcome: Delivered | LmmsStreamError
    try:
        outcome = reading.deliver()
    except LmmsStreamError as error:
        outcome = error
    answer.write_bytes(pickle.dumps(outcome))


@contextmanager
def child(reading: Reading, folder: Path, *, prepare: Callable[[], None] | None = None) -> Iterator[Child]:
    """A process that begins to read, with its own cache unless `reading` names one.

    It and its workers are killed at the end.
    """
    folder.mkdir(exist_ok=True)
    environment = {name: os.environ[name] for name in os.environ if name.startswith(("AWS_", "S3_"))}
    begun = PROCESSES.Event()
    arguments = (reading, environment, folder / "answer", prepare, begun)
    process = PROCESSES.Process(target=_read_in_child, args=arguments)
    process.start()
    try:
        assert begun.wait(40)
        yield Child(process, folder / "answer")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join(10)
        process.close()


def upload(folder: Path, url: str) -> str:
    storage = open_storage(url)
    for path in folder.rglob("*"):
        if path.is_file():
            storage.upload(path, str(path.relative_to(folder)))
    return url


def temporary_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "tmp" in path.name]


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s")
        time.sleep(0.02)
