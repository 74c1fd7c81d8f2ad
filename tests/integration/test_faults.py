"""Every fault ends in exact data or in an error that names it, in bounded time: real servers, processes, disks."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import struct
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import xxhash
from lmms_stream.converters.convert import convert
from lmms_stream.dataset import PackedStreamingDataset
from lmms_stream.demo.corpus import Corpus
from lmms_stream.demo.endpoint import moto_server
from lmms_stream.errors import LmmsStreamError, ShardError, StorageError, WorkerError
from lmms_stream.loader import PackedLoader
from lmms_stream.order import OrderConfig
from lmms_stream.packing import PackingConfig
from lmms_stream.prefetch import FetchConfig
from lmms_stream.processors.base import processor_fingerprint
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.storage import open_storage

from ..proxy import FaultProxy, Rule, fault_proxy

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on a machine with fewer cores
]

SHARDS = r"/shard\.\d{5}\.mds$"
SHARD = "shard.00002.mds"  # the one that has the fault
ONLY_SHARD = r"/shard\.00002\.mds$"
SLACK_S = 10.0  # what busy cores may add to a time limit
IN_PROCESS_AND_WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
S3_SETTINGS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
NOBODY = 65534  # a user that is not this one
PROCESSES = multiprocessing.get_context("forkserver")  # no threads and no sockets of the tests in them
PROCESSES.set_forkserver_preload(["lmms_stream.loader", "lmms_stream.processors.chat", "boto3", __name__])

Delivered = list[tuple[list[int], list[int]]]  # of each batch: its sample ids and its input_ids


# What is read, here or in a process of its own


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


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < limit_s


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
    reading: Reading, environment: dict[str, str], answer: Path, prepare: Callable[[], None] | None
) -> None:
    os.setsid()
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # of loader workers: torch's default on Linux
    if prepare is not None:
        prepare()
    outcome: Delivered | LmmsStreamError
    try:
        outcome = reading.deliver()
    except LmmsStreamError as error:
        outcome = error
    answer.write_bytes(pickle.dumps(outcome))


@contextmanager
def child(reading: Reading, folder: Path, *, prepare: Callable[[], None] | None = None) -> Iterator[Child]:
    """A process that reads, with its own cache unless `reading` names one; it and its workers are killed at the end."""
    folder.mkdir(exist_ok=True)
    environment = {name: os.environ[name] for name in os.environ if name.startswith(("AWS_", "S3_"))}
    arguments = (reading, environment, folder / "answer", prepare)
    process = PROCESSES.Process(target=_read_in_child, args=arguments)
    process.start()
    try:
        yield Child(process, folder / "answer")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join(10)
        process.close()


def limit_files(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def jump_clock() -> None:
    """Let time.time and time.time_ns be days early and days late in turn."""
    patch, true_time, true_time_ns = pytest.MonkeyPatch(), time.time, time.time_ns
    days = [3 * 86400]

    def jump() -> int:
        days[0] = -days[0]
        return days[0]

    patch.setattr(time, "time", lambda: true_time() + jump())
    patch.setattr(time, "time_ns", lambda: true_time_ns() + jump() * 10**9)


# Fixtures


@pytest.fixture(scope="module")
def running_proxy(s3: str) -> Iterator[FaultProxy]:
    with fault_proxy(os.environ["S3_ENDPOINT_URL"]) as proxy:
        yield proxy


@pytest.fixture
def proxy(running_proxy: FaultProxy) -> Iterator[FaultProxy]:
    """In front of the S3 server, without rules."""
    running_proxy.set_rules()
    yield running_proxy
    running_proxy.set_rules()


@pytest.fixture(scope="module")
def remote(running_proxy: FaultProxy, s3: str, dataset_folder: Path) -> str:
    """The dataset in S3, for tests that leave it as it is."""
    return upload(dataset_folder, f"{s3}/faults")


@pytest.fixture(scope="module")
def expected(dataset_folder: Path, chat_processor: ChatProcessor) -> Delivered:
    """What an undisturbed epoch delivers."""
    delivered = Reading(remote=str(dataset_folder), local=None, processor=chat_processor).deliver()
    assert len(delivered) > 40
    return delivered


@pytest.fixture
def reading(remote: str, proxy: FaultProxy, chat_processor: ChatProcessor, tmp_path: Path) -> Reading:
    """The dataset in S3, read through the proxy with a cache of the test's own."""
    return Reading(remote=remote, local=tmp_path / "cache", processor=chat_processor)


def upload(folder: Path, url: str) -> str:
    storage = open_storage(url)
    for path in folder.rglob("*"):
        if path.is_file():
            storage.upload(path, str(path.relative_to(folder)))
    return url


def temporary_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "tmp" in path.name]


def lengths_file(folder: Path) -> Path:
    (path,) = (folder / "_lmms" / "lengths").glob("[!.]*.npy")
    return path


# The network


@IN_PROCESS_AND_WORKERS
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(Rule(times=2, status=503), id="slow down"),
        pytest.param(Rule(times=1, status=500), id="internal error"),
        pytest.param(Rule(times=1, reset=True), id="reset in place of an answer"),
        pytest.param(Rule(times=1, reset_after=1000), id="reset in the body"),
        pytest.param(Rule(times=1, cut_after=1000), id="cut short of Content-Length"),
        pytest.param(Rule(times=1, path=SHARDS, shorten_to=30_000), id="shorter than the index says"),
        pytest.param(Rule(times=1, path=SHARDS, flip_at=-5000), id="flipped byte"),
        pytest.param(Rule(delay_s=0.1), id="latency"),
    ],
)
def test_a_fault_that_passes_leaves_the_data_exact(
    rule: Rule, num_workers: int, reading: Reading, proxy: FaultProxy, expected: Delivered
) -> None:
    proxy.set_rules(rule)
    assert replace(reading, num_workers=num_workers).deliver() == expected
    if rule.times is not None:
        assert proxy.traffic().num_requests("GET", ONLY_SHARD) == rule.times + 1


@IN_PROCESS_AND_WORKERS
@pytest.mark.parametrize(
    ("rule", "cause"),
    [
        pytest.param(Rule(status=503), "SlowDown", id="slow down"),
        pytest.param(Rule(reset_after=1000), "reset|broken|closed", id="reset in the body"),
        pytest.param(Rule(cut_after=1000), "1000", id="cut short of Content-Length"),
        pytest.param(Rule(shorten_to=30_000), "does not match the size or checksum", id="shorter than the index says"),
        pytest.param(Rule(flip_at=-5000), "does not match the size or checksum", id="flipped byte"),
        pytest.param(Rule(trickle_s=0.2), "within 4 s", id="trickle"),
        pytest.param(Rule(hang=True), "within 4 s", id="hang"),
    ],
)
def test_a_fault_that_stays_is_an_error_in_the_consumer_in_bounded_time(
    rule: Rule, cause: str, num_workers: int, reading: Reading, proxy: FaultProxy, expected: Delivered
) -> None:
    proxy.set_rules(replace(rule, path=ONLY_SHARD))
    timeout_s = 4 if rule.hang or rule.trickle_s else 20
    loader = replace(reading, num_workers=num_workers, fetch=FetchConfig(attempts=2, timeout_s=timeout_s)).loader()
    with within(4 + SLACK_S):
        delivered, message = read_until_error(loader, StorageError)
    assert delivered == expected[: len(delivered)]
    assert f"{reading.remote}/{SHARD}" in message
    assert re.search(cause, message)
    assert re.search("2 attempts|attempt [12] of 2", message)
    proxy.set_rules()
    assert replace(reading, num_workers=num_workers).deliver() == expected
    assert temporary_files(reading.cache) == []


@IN_PROCESS_AND_WORKERS
def test_a_process_ends_soon_after_its_error(
    num_workers: int, reading: Reading, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.set_rules(Rule(path=ONLY_SHARD, hang=True))
    hurried = replace(reading, num_workers=num_workers, fetch=FetchConfig(attempts=2, timeout_s=1))
    with within(1 + SLACK_S), child(hurried, tmp_path / "child") as process:
        outcome = process.outcome()
    assert isinstance(outcome, StorageError)
    assert SHARD in str(outcome)


def test_no_worker_is_left_when_an_error_is_raised(reading: Reading, proxy: FaultProxy) -> None:
    proxy.set_rules(Rule(path=ONLY_SHARD, status=404))
    loader, children = replace(reading, num_workers=2).loader(), multiprocessing.active_children()
    with within(4), pytest.raises(StorageError):  # a worker that does not end by itself is given 5 s
        list(deliver(loader))
    assert multiprocessing.active_children() == children


@IN_PROCESS_AND_WORKERS
def test_an_endpoint_that_goes_away_is_an_error_and_one_that_comes_back_is_not(
    num_workers: int, reading: Reading, proxy: FaultProxy, expected: Delivered
) -> None:
    loader = replace(reading, num_workers=num_workers, fetch=FetchConfig(attempts=2, timeout_s=10)).loader()
    proxy.set_listening(False)
    try:
        with within(SLACK_S):
            delivered, message = read_until_error(loader, StorageError)
    finally:
        proxy.set_listening(True)
    assert delivered == []
    assert re.search(rf"{reading.remote}/shard\.\d+\.mds.*2 attempts", message)
    assert list(deliver(loader)) == expected


@pytest.mark.parametrize("rule", [Rule(hang=True), Rule(status=503), Rule(cut_after=10)], ids=["hang", "503", "cut"])
def test_an_index_that_cannot_be_had_is_an_error_in_bounded_time(
    rule: Rule, reading: Reading, proxy: FaultProxy
) -> None:
    proxy.set_rules(replace(rule, path="index.json"))
    with within(1 + SLACK_S), pytest.raises(StorageError, match=rf"{reading.remote}/index\.json"):
        replace(reading, fetch=FetchConfig(attempts=2, timeout_s=1)).loader()


@pytest.mark.parametrize(
    ("name", "flip_at"),
    [("index.json", 20), ("_lmms/dataset.json", 20), ("lengths/{}.json", 20), ("lengths/{}.npy", -3)],
    ids=["index", "description", "description of lengths", "lengths"],
)
def test_flipped_bytes_in_what_describes_the_shards_never_change_the_data(
    name: str, flip_at: int, reading: Reading, proxy: FaultProxy, expected: Delivered
) -> None:
    name = name.format(processor_fingerprint(reading.processor))
    proxy.set_rules(Rule(path=re.escape(name) + "$", flip_at=flip_at))
    outcome: Delivered | LmmsStreamError
    try:
        outcome = replace(reading, fetch=FetchConfig(attempts=2, timeout_s=5)).deliver()
    except LmmsStreamError as error:
        outcome = error
    assert outcome == expected or Path(name).stem in str(outcome)


# The source


def shortened(data: bytes) -> bytes:
    return data[:-1]


def lengthened(data: bytes) -> bytes:
    return data + bytes(1 << 20)


def flipped(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


def emptied(data: bytes) -> bytes:
    return b""


def reversed_samples(data: bytes) -> bytes:
    """A valid shard of the same size, whose samples are in reverse."""
    (count,) = struct.unpack_from("<I", data)
    offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
    samples = [data[start:stop] for start, stop in pairwise(offsets)][::-1]
    ends = [offsets[0]]
    for sample in samples:
        ends.append(ends[-1] + len(sample))
    changed = struct.pack(f"<{count + 2}I", count, *ends) + data[4 * (count + 2) : offsets[0]] + b"".join(samples)
    assert len(changed) == len(data)
    assert changed != data
    return changed


@IN_PROCESS_AND_WORKERS
@pytest.mark.parametrize("change", [shortened, lengthened, flipped, emptied, reversed_samples])
def test_a_shard_that_changes_after_the_index_was_read_is_named(
    change: Callable[[bytes], bytes],
    num_workers: int,
    reading: Reading,
    dataset_folder: Path,
    s3_folder: str,
    expected: Delivered,
) -> None:
    upload(dataset_folder, s3_folder)
    loader = replace(
        reading, remote=s3_folder, num_workers=num_workers, fetch=FetchConfig(attempts=2, timeout_s=10)
    ).loader()
    open_storage(s3_folder).write(SHARD, change((dataset_folder / SHARD).read_bytes()))
    with within(SLACK_S):
        delivered, message = read_until_error(loader, StorageError)
    assert delivered == expected[: len(delivered)]
    assert f"{s3_folder}/{SHARD}: what was downloaded does not match the size or checksum in its index" in message
    assert not (reading.cache / SHARD).exists()
    assert [path for path in temporary_files(reading.cache) if SHARD in path.name] == []


@IN_PROCESS_AND_WORKERS
def test_a_shard_that_is_missing_is_named(
    num_workers: int, reading: Reading, dataset_folder: Path, s3_folder: str, expected: Delivered
) -> None:
    upload(dataset_folder, s3_folder)
    open_storage(s3_folder).delete(SHARD)
    with within(SLACK_S):
        delivered, message = read_until_error(
            replace(reading, remote=s3_folder, num_workers=num_workers).loader(), StorageError
        )
    assert delivered == expected[: len(delivered)]
    assert message.startswith(f"{s3_folder}/{SHARD} does not exist")


def test_a_dataset_that_is_replaced_ends_the_old_run_and_is_read_by_a_new_one(
    reading: Reading, dataset_folder: Path, corpus: Corpus, s3_folder: str, tmp_path: Path
) -> None:
    """Both runs use one cache folder, as a run that is started again does."""
    upload(dataset_folder, s3_folder)
    reading = replace(reading, remote=s3_folder, fetch=FetchConfig(attempts=2, timeout_s=10))
    old = reading.loader()
    assert old.steps_left > 5
    for target, overwrite in ((s3_folder, True), (str(tmp_path / "new"), False)):
        convert(
            [corpus.classes, corpus.functions],
            target,
            processor=reading.processor,
            shard_bytes=1 << 16,
            overwrite=overwrite,
        )
    new_data = replace(reading, remote=str(tmp_path / "new"), local=None).deliver()
    for _ in range(2):  # with an empty cache, and with the new run's
        delivered, message = read_until_error(old, StorageError)
        assert delivered == []
        assert re.search(rf"{s3_folder}/shard\.\d+\.mds", message)
        assert reading.deliver() == new_data


@pytest.fixture
def strict_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """An S3 server of this test's own; calling the value makes it refuse the credentials in use."""
    with moto_server() as url:

        def refuse_credentials() -> None:
            headers = {"Content-Type": "text/plain"}
            request = urllib.request.Request(f"{url}/moto-api/reset-auth", b"0", headers, method="POST")
            urllib.request.urlopen(request, timeout=10).close()

        for name, value in S3_SETTINGS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("S3_ENDPOINT_URL", url)
        yield refuse_credentials


def test_credentials_that_are_withdrawn_are_an_error_with_the_remedy(
    strict_s3: Callable[[], None], dataset_folder: Path, chat_processor: ChatProcessor, tmp_path: Path
) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
    client.create_bucket(Bucket="strict")
    upload(dataset_folder, "s3://strict/x")
    reading = Reading(remote="s3://strict/x", local=tmp_path / "cache", processor=chat_processor)
    loaders = [replace(reading, num_workers=num_workers).loader() for num_workers in (0, 2)]
    strict_s3()
    refused = r"s3://strict/x/{}: the credentials are refused \(InvalidAccessKeyId\): check AWS_ACCESS_KEY_ID"
    for loader in loaders:
        with within(SLACK_S):
            delivered, message = read_until_error(loader, StorageError)
        assert delivered == []
        assert re.match(refused.format(r"shard\.\d+\.mds"), message)
    with within(SLACK_S), pytest.raises(StorageError, match=refused.format(r"index\.json")):
        reading.loader()


# The disk


@contextmanager
def small_disk(folder: Path, *, num_bytes: int) -> Iterator[Callable[[], None] | None]:
    """Make `folder` a file system of this size; where that is not allowed, what limits a process's files instead."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    is_mounted = (
        shutil.which("mount") is not None and subprocess.run(mount, capture_output=True, timeout=10).returncode == 0
    )
    try:
        yield None if is_mounted else partial(limit_files, 40_000)
    finally:
        if is_mounted:
            subprocess.run(["umount", str(folder)], check=True, timeout=10)


@IN_PROCESS_AND_WORKERS
def test_a_full_disk_is_an_error_that_names_the_file(num_workers: int, reading: Reading, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, num_bytes=160_000) as limit:
        full = replace(reading, local=disk / "cache", num_workers=num_workers)
        with child(full, tmp_path / "child", prepare=limit) as process:
            outcome = process.outcome()
        assert isinstance(outcome, StorageError)
        reason = "No space left on device" if limit is None else "File too large"
        found = re.search(rf"(shard\.\d+\.mds).*{reason}", str(outcome))
        assert found
        assert [path for path in temporary_files(disk) if found[1] in path.name] == []


def test_a_file_that_may_not_grow_is_an_error_that_names_it(
    reading: Reading, tmp_path: Path, expected: Delivered
) -> None:
    with child(reading, tmp_path / "child", prepare=partial(limit_files, 40_000)) as process:
        outcome = process.outcome()
    assert isinstance(outcome, StorageError)
    assert re.search(r"shard\.\d+\.mds.*File too large", str(outcome))
    assert reading.deliver() == expected
    assert temporary_files(reading.cache) == []


@IN_PROCESS_AND_WORKERS
def test_a_cache_folder_that_cannot_be_made_is_an_error_that_names_it(
    num_workers: int, reading: Reading, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with within(SLACK_S), pytest.raises(StorageError, match=re.escape(str(tmp_path / "file"))):
        replace(reading, local=tmp_path / "file" / "cache", num_workers=num_workers).deliver()


@pytest.mark.parametrize("change", [shortened, flipped, emptied, reversed_samples])
def test_a_corrupt_copy_is_fetched_again(
    change: Callable[[bytes], bytes], reading: Reading, dataset_folder: Path, expected: Delivered
) -> None:
    assert reading.deliver() == expected
    copy = reading.cache / SHARD
    original = copy.read_bytes()
    copy.write_bytes(change(original))
    assert reading.deliver() == expected
    assert copy.read_bytes() == original


@pytest.mark.parametrize("change", [shortened, flipped, emptied])
def test_a_corrupt_copy_of_the_lengths_is_fetched_again(
    change: Callable[[bytes], bytes], reading: Reading, expected: Delivered
) -> None:
    assert reading.deliver() == expected
    copy = lengths_file(reading.cache)
    original = copy.read_bytes()
    copy.write_bytes(change(original))
    assert reading.deliver() == expected
    assert copy.read_bytes() == original


@IN_PROCESS_AND_WORKERS
def test_a_folder_in_the_place_of_a_shard_is_an_error_that_names_it(
    num_workers: int, reading: Reading, expected: Delivered
) -> None:
    place = reading.cache / SHARD
    (place / "something").mkdir(parents=True)
    with within(SLACK_S):
        delivered, message = read_until_error(replace(reading, num_workers=num_workers).loader(), StorageError)
    assert delivered == expected[: len(delivered)]
    assert str(place) in message
    assert (place / "something").is_dir()


def test_a_cache_that_is_deleted_under_a_run_is_filled_again(
    reading: Reading, proxy: FaultProxy, expected: Delivered
) -> None:
    loader = reading.loader()
    batches = deliver(loader)
    delivered = [next(batches)]
    wait_until(lambda: len(list(reading.cache.glob("*.mds"))) == proxy.traffic().num_requests("GET", SHARDS))
    shutil.rmtree(reading.cache)
    delivered.extend(batches)
    assert delivered == expected
    assert list(deliver(replace(reading).loader())) == expected


# Processes


def test_a_run_whose_worker_is_killed_goes_on_exactly_in_a_new_loader(reading: Reading, expected: Delivered) -> None:
    loader = replace(reading, num_workers=2).loader()
    delivered = []
    batches = deliver(loader)
    for _ in range(11):
        delivered.append(next(batches))
    os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
    with within(SLACK_S), pytest.raises(WorkerError, match="a loader worker died or gave nothing"):
        delivered.extend(batches)
    assert delivered == expected[: len(delivered)]
    state = json.loads(json.dumps(loader.state_dict()))
    done = state["sources"]["data"]["packs"]
    assert 8 <= done <= len(delivered)
    resumed = replace(reading, num_workers=2).loader()
    resumed.load_state_dict(state)
    assert list(deliver(resumed)) == expected[done:]


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s")
        time.sleep(0.02)


def is_under_way(folder: Path) -> bool:
    """Whether SHARD is being downloaded."""
    return any(SHARD in path.name for path in temporary_files(folder))


def test_a_rank_that_is_killed_in_mid_download_holds_up_nobody_and_leaves_nothing(
    reading: Reading, proxy: FaultProxy, tmp_path: Path, expected: Delivered
) -> None:
    folder = reading.cache
    proxy.set_rules(Rule(path=ONLY_SHARD, times=1, trickle_s=0.1))
    with child(replace(reading, num_workers=2), tmp_path / "killed") as killed:
        wait_until(lambda: is_under_way(folder))
        with child(reading, tmp_path / "other") as other:
            time.sleep(0.5)  # it reads what there is, and comes to wait for the shard
            assert proxy.traffic().num_requests("GET", ONLY_SHARD) == 1
            killed.signal(signal.SIGKILL)
            assert other.outcome() == expected
    assert proxy.traffic().num_requests("GET", ONLY_SHARD) == 2
    assert replace(reading, num_workers=2).deliver() == expected
    assert proxy.traffic().num_requests("GET", ONLY_SHARD) == 2
    assert temporary_files(folder) == []


def test_what_a_killed_rank_left_is_gone_after_the_next_run(
    reading: Reading, proxy: FaultProxy, tmp_path: Path, expected: Delivered
) -> None:
    folder = reading.cache
    proxy.set_rules(Rule(path=SHARDS, times=1, trickle_s=0.1))
    with child(replace(reading, num_workers=2), tmp_path / "killed") as killed:
        wait_until(lambda: temporary_files(folder) != [])
        killed.signal(signal.SIGKILL)
    assert temporary_files(folder) != []
    proxy.set_rules()
    assert reading.deliver() == expected
    assert temporary_files(folder) == []


def test_a_rank_that_stands_still_in_mid_download_is_an_error_of_others_in_bounded_time(
    reading: Reading, proxy: FaultProxy, tmp_path: Path, expected: Delivered
) -> None:
    proxy.set_rules(Rule(path=ONLY_SHARD, times=1, trickle_s=0.1))
    with child(reading, tmp_path / "stopped") as stopped:
        wait_until(lambda: is_under_way(reading.cache))
        stopped.signal(signal.SIGSTOP)
        loader = replace(reading, fetch=FetchConfig(timeout_s=2)).loader()
        with within(2 + SLACK_S):
            delivered, message = read_until_error(loader, StorageError)
        assert delivered == expected[: len(delivered)]
        assert re.search(rf"{reading.remote}/shard\.\d+\.mds .* 2 s: another process holds its download", message)
    assert reading.deliver() == expected


def test_two_runs_with_one_cache_folder_fetch_each_shard_once(
    reading: Reading, proxy: FaultProxy, tmp_path: Path, expected: Delivered
) -> None:
    proxy.set_rules(Rule(path=SHARDS, delay_s=0.3))
    both = replace(reading, num_workers=2)
    with child(both, tmp_path / "one") as one, child(both, tmp_path / "two") as two:
        assert one.outcome() == expected
        assert two.outcome() == expected
    requests = {where: n for (_, where), n in proxy.traffic().requests.items() if re.search(SHARDS, where)}
    assert set(requests.values()) == {1}
    assert temporary_files(reading.cache) == []


def test_a_clock_that_jumps_changes_nothing(
    reading: Reading, proxy: FaultProxy, tmp_path: Path, expected: Delivered
) -> None:
    """Days back and forth while it runs, over a cache from the future and the past."""
    assert reading.deliver() == expected
    folder = reading.cache
    (folder / "shard.00000.mds").unlink()
    (folder / "shard.00003.mds").unlink()
    for number, path in enumerate(sorted(folder.rglob("*"))):
        at = time.time() + (10 if number % 2 else -10) * 86400
        os.utime(path, (at, at))
    proxy.set_rules(Rule(path=SHARDS, times=1, status=503))
    with child(replace(reading, num_workers=2), tmp_path / "child", prepare=jump_clock) as process:
        assert process.outcome() == expected


@contextmanager
def leftovers_in_shared_memory() -> Iterator[dict[Path, bytes]]:
    """What another user's run of MosaicML Streaming leaves, as far as the names are free."""
    made = {}
    names = ("locals", "barrier", "next_epoch", "cache_usage", "shard_states", "shard_access_times", "resume")
    for name in names:
        path = Path("/dev/shm") / f"000000_{name}"
        with suppress(FileExistsError), path.open("xb") as file:
            made[path] = os.urandom(100)
            file.write(made[path])
            path.chmod(0o600)
            with suppress(PermissionError):
                os.chown(path, NOBODY, NOBODY)
    try:
        yield made
    finally:
        for path in made:
            path.unlink()


@IN_PROCESS_AND_WORKERS
def test_what_other_users_left_does_not_collide(
    num_workers: int, reading: Reading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Delivered
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    theirs = tmp_path / f"lmms_stream-{NOBODY}"
    theirs.mkdir(mode=0o700)
    with suppress(PermissionError):
        os.chown(theirs, NOBODY, NOBODY)
    with leftovers_in_shared_memory() as leftovers:
        assert replace(reading, local=None, num_workers=num_workers).deliver() == expected
        assert {path: path.read_bytes() for path in leftovers} == leftovers
    assert list(theirs.iterdir()) == []


def test_a_default_cache_folder_of_another_user_is_refused(
    reading: Reading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = tmp_path / f"lmms_stream-{os.getuid()}"
    if os.getuid() == 0:
        mine.mkdir(mode=0o777)
        os.chown(mine, NOBODY, NOBODY)
    else:
        mine.symlink_to(tmp_path)
    with pytest.raises(StorageError, match=f"{mine} belongs to somebody else"):
        replace(reading, local=None).deliver()
    assert mine.is_symlink() or list(mine.iterdir()) == []


@IN_PROCESS_AND_WORKERS
def test_nothing_temporary_is_left_after_a_run(num_workers: int, reading: Reading, expected: Delivered) -> None:
    shared = Path("/dev/shm")
    before, children = set(shared.iterdir()), multiprocessing.active_children()
    assert replace(reading, num_workers=num_workers).deliver() == expected
    wait_until(lambda: set(shared.iterdir()) <= before)  # what other processes of the machine make there passes
    assert multiprocessing.active_children() == children
    assert temporary_files(reading.cache) == []


# Hostile datasets


def changed_index(dataset_folder: Path, place: str, value: Any) -> bytes:
    """index.json with another value at a place, as "raw_data.bytes", of its first shard."""
    index = json.loads((dataset_folder / "index.json").read_bytes())
    *parents, last = place.split(".")
    target = index["shards"][0]
    for parent in parents:
        target = target[parent]
    target[last] = value
    return json.dumps(index).encode()


HOSTILE_NAMES = {
    "traversal": "../shard.00001.mds",
    "deep traversal": "../../../../tmp/x",
    "absolute": "/tmp/lmms-hostile-shard",
    "in a folder": "a/shard.mds",
    "parent": "..",
    "itself": ".",
    "empty": "",
    "backslash": "..\\shard.mds",
    "NUL": "shard\x00.mds",
    "newline": "shard\n.mds",
    "hidden": ".x",
    "a lock's": ".shard.00001.mds.lock",
    "twice": "shard.00001.mds",
    "the index's": "index.json",
    "too long": "x" * 300,
    "a number": 7,
    "nothing": None,
    "a list": ["shard.mds"],
}
HOSTILE_NUMBERS = {
    "negative": -1,
    "huge": 10**30,
    "over 4 GiB": 1 << 32,
    "boolean": True,
    "float": 64.0,
    "string": "64",
    "infinite": float("inf"),
    "nothing": None,
    "a list": [64],
}
HOSTILE_INDEXES = [
    *[("raw_data.basename", name, repr(name)) for name in HOSTILE_NAMES.values()],
    *[("raw_data.bytes", number, repr(number)) for number in HOSTILE_NUMBERS.values()],
    *[("samples", number, repr(number)) for number in HOSTILE_NUMBERS.values()],
    *[("column_sizes", [number, None], repr(number)) for number in HOSTILE_NUMBERS.values() if number is not None],
    ("samples", (1 << 32) - 1, str((1 << 32) - 1)),
    ("column_names", ["messages"], "column"),
    ("column_encodings", ["str", "bytes", "str"], "column"),
    ("column_sizes", [None], "column"),
    ("column_encodings", ["str", "pkl"], "pkl|pickled"),
    ("column_encodings", ["str", "ndarray:object"], "object"),
    ("column_encodings", ["str", "shell"], "'shell'"),
    ("column_encodings", ["str", 7], "7"),
    ("compression", "lzma9", "'lzma9'"),
    ("compression", ["zstd"], "zstd"),
    ("zip_data", {"basename": "../x", "bytes": 100, "hashes": {}}, "'../x'"),
    ("zip_data", {"basename": "x", "bytes": -1, "hashes": {}}, "-1"),
    ("format", "csv", "'csv'"),
    ("raw_data", [], "not a valid MDS index"),
]
HOSTILE_IDS = [
    *[f"name: {name}" for name in HOSTILE_NAMES],
    *[f"bytes: {name}" for name in HOSTILE_NUMBERS],
    *[f"samples: {name}" for name in HOSTILE_NUMBERS],
    *[f"column size: {name}" for name, number in HOSTILE_NUMBERS.items() if number is not None],
]


@contextmanager
def nothing_is_written_outside(folder: Path) -> Iterator[None]:
    """Below the folder's parent, and at the absolute names that hostile indexes give."""
    before = set(folder.parent.rglob("*"))
    yield
    changed = set(folder.parent.rglob("*")) - before
    assert all(path.is_relative_to(folder) for path in changed)
    assert not Path("/tmp/lmms-hostile-shard").exists()


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        pytest.param(*case, id=HOSTILE_IDS[number] if number < len(HOSTILE_IDS) else f"{case[0]}-{number}")
        for number, case in enumerate(HOSTILE_INDEXES)
    ],
)
def test_a_hostile_index_is_refused_before_anything_is_fetched(
    place: str, value: Any, named: str, reading: Reading, dataset_folder: Path, s3: str, proxy: FaultProxy
) -> None:
    if (place, value) == ("samples", (1 << 32) - 1):  # in a shard of 8 bytes
        index = json.loads(changed_index(dataset_folder, place, value))
        index["shards"][0]["raw_data"]["bytes"] = 8
        data = json.dumps(index).encode()
    else:
        data = changed_index(dataset_folder, place, value)
    remote = f"{s3}/hostile-index"
    open_storage(remote).write("index.json", data)
    pattern = named if "|" in named else re.escape(named)
    growth = PeakMemory()
    with nothing_is_written_outside(reading.cache), within(SLACK_S), pytest.raises(ShardError, match=pattern) as caught:
        replace(reading, remote=remote).deliver()
    assert "index.json" in str(caught.value)
    assert growth.num_bytes() < 100 << 20
    assert proxy.traffic().num_requests("GET", "shard") == 0


@pytest.mark.parametrize(
    "data",
    [b"[" * 200_000, b'{"version": 2, "shards": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", b'{"a":' * 200_000],
    ids=["open", "inside", "objects"],
)
def test_an_index_that_is_nested_too_deeply_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(data)
    with within(SLACK_S), pytest.raises(ShardError, match=r"index\.json: not a valid MDS index"):
        PackedStreamingDataset(tmp_path)


class PeakMemory:
    """How far this process's memory has grown since, at its highest."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the highest is forgotten (man 5 proc)
        self._before = self._status("VmRSS")

    def num_bytes(self) -> int:
        return self._status("VmHWM") - self._before

    @staticmethod
    def _status(name: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) << 10


def write_hostile_shard(dataset_folder: Path, folder: Path, change: Callable[[bytearray], None]) -> str:
    """A local dataset whose index vouches for a changed shard."""
    shutil.copytree(dataset_folder, folder)
    data = bytearray((folder / SHARD).read_bytes())
    change(data)
    (folder / SHARD).write_bytes(data)
    digest = xxhash.xxh3_64_hexdigest(data)
    for name in ("index.json", "_lmms/dataset.json"):
        described = json.loads((folder / name).read_bytes())
        entry = described["shards"][2]
        if name == "index.json":
            entry["raw_data"] |= {"bytes": len(data), "hashes": {"xxh3_64": digest}}
        else:
            entry |= {"size": len(data), "xxh3_64": digest}
        (folder / name).write_text(json.dumps(described))
    return str(folder)


def put(data: bytearray, place: int, value: int) -> None:
    """Write a 32-bit word."""
    struct.pack_into("<I", data, 4 * place, value)


def word(data: bytearray, place: int) -> int:
    value: int = struct.unpack_from("<I", data, 4 * place)[0]
    return value


def other_count(data: bytearray) -> None:
    put(data, 0, word(data, 0) - 1)


def huge_count(data: bytearray) -> None:
    put(data, 0, (1 << 32) - 1)


def descending_offsets(data: bytearray) -> None:
    put(data, 5, word(data, 4) - 1)


def samples_in_the_header(data: bytearray) -> None:
    put(data, 1, 8)


def offset_behind_the_end(data: bytearray) -> None:
    put(data, 1 + word(data, 0), len(data) + 1)


def every_offset_behind_the_end(data: bytearray) -> None:
    for place in range(1, 2 + word(data, 0)):
        put(data, place, (1 << 32) - 1)


def huge_column(data: bytearray) -> None:
    struct.pack_into("<I", data, word(data, 3), (1 << 32) - 1)


def unfilled_sample(data: bytearray) -> None:
    at = word(data, 3) + 4  # the size of the second column
    struct.pack_into("<I", data, at, struct.unpack_from("<I", data, at)[0] - 1)


def bad_utf8(data: bytearray) -> None:
    at = word(data, 3)
    (size,) = struct.unpack_from("<I", data, at + 4)
    data[at + 8 + size // 2 :] = b"\xff" * len(data[at + 8 + size // 2 :])


def cut_in_the_offsets(data: bytearray) -> None:
    del data[12:]


@IN_PROCESS_AND_WORKERS
@pytest.mark.parametrize(
    "change",
    [
        other_count,
        huge_count,
        descending_offsets,
        samples_in_the_header,
        offset_behind_the_end,
        every_offset_behind_the_end,
        huge_column,
        unfilled_sample,
        bad_utf8,
        cut_in_the_offsets,
    ],
)
def test_a_hostile_shard_that_its_index_vouches_for_is_an_error_that_names_it(
    change: Callable[[bytearray], None],
    num_workers: int,
    dataset_folder: Path,
    chat_processor: ChatProcessor,
    tmp_path: Path,
    expected: Delivered,
) -> None:
    remote = write_hostile_shard(dataset_folder, tmp_path / "hostile", change)
    reading = Reading(remote=remote, local=tmp_path / "cache", processor=chat_processor, num_workers=num_workers)
    growth = PeakMemory()
    with within(SLACK_S), pytest.raises(ShardError) as caught:
        reading.deliver()
    assert SHARD in str(caught.value) or "index.json" in str(caught.value)
    assert growth.num_bytes() < 100 << 20


def compress(algorithm: str, data: bytes) -> bytes:
    from streaming.base.compression import compress as compress_as_the_writer_does

    return bytes(compress_as_the_writer_does(algorithm, data))


@pytest.mark.parametrize("algorithm", ["zstd:1", "gz:6", "br:5", "bz2:9", "snappy"])
def test_a_compressed_shard_that_holds_far_more_than_its_index_says_is_refused(
    algorithm: str, dataset_folder: Path, chat_processor: ChatProcessor, tmp_path: Path
) -> None:
    remote = tmp_path / "bomb"
    shutil.copytree(dataset_folder, remote)
    (remote / SHARD).unlink()
    bomb = compress(algorithm, bytes(256 << 20))
    (remote / f"{SHARD}.bomb").write_bytes(bomb)
    index = json.loads((remote / "index.json").read_bytes())
    hashes = {"xxh3_64": xxhash.xxh3_64_hexdigest(bomb)}
    index["shards"][2] |= {
        "compression": algorithm,
        "zip_data": {"basename": f"{SHARD}.bomb", "bytes": len(bomb), "hashes": hashes},
    }
    (remote / "index.json").write_text(json.dumps(index))
    reading = Reading(
        remote=str(remote), local=tmp_path / "cache", processor=chat_processor, fetch=FetchConfig(attempts=2)
    )
    growth = PeakMemory()
    with within(SLACK_S), pytest.raises((ShardError, StorageError), match=re.escape(SHARD)):
        reading.deliver()
    assert growth.num_bytes() < 100 << 20
    assert not (tmp_path / "cache" / SHARD).exists()
    assert temporary_files(tmp_path / "cache") == []
