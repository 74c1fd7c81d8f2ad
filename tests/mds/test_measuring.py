from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import current_process
from pathlib import Path

import numpy as np
import psutil
import pytest
from lmms_stream.__main__ import main
from lmms_stream.converters.convert import convert
from lmms_stream.errors import ConfigError, DataError, ShardError, StorageError
from lmms_stream.mds.index import DATASET_NAME, INDEX_NAME, ShardInfo, parse_index
from lmms_stream.mds.lengths import lengths_names
from lmms_stream.mds.measuring import index_dataset
from lmms_stream.processes.fork_server import address_obstacle
from lmms_stream.processors.base import Processor, processor_fingerprint
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.demo.corpus import Corpus
from streaming import MDSWriter

from ..conftest import run_cli, run_command, write_tokens
from ..processes import Job, start_module
from ..rounds import LONG
from .measures import Columns, Threads, Words

NUM_SAMPLES = 200
LIMIT_S = 120


@pytest.fixture(autouse=True)
def temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Default cache folders of this process, and of processes that it starts, are in a folder of the test."""
    tmp_path_factory.getbasetemp()  # for all tests of this process, before the folder changes
    with tempfile.TemporaryDirectory(prefix="index-") as folder:  # a short name, as a real one has
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def write_plain(folder: Path, *, texts: Sequence[str] | None = None, compression: str | None = None) -> Path:
    """A plain MDS dataset of several shards; sample i has i % 7 + 2 words."""
    texts = texts or [f"{number}" + " word" * (number % 7 + 1) for number in range(NUM_SAMPLES)]
    columns = {"number": "int", "text": "str", "blob": "bytes"}
    hashes = ["xxh3_64"]
    with MDSWriter(
        columns=columns, out=str(folder), size_limit=1 << 10, compression=compression, hashes=hashes
    ) as writer:
        for number, text in enumerate(texts):
            writer.write({"number": number, "text": text, "blob": b"blob"})
    return folder


def expected_lengths() -> list[int]:
    return [number % 7 + 2 for number in range(NUM_SAMPLES)]


def index_bytes(remote: str | Path, processor: Processor) -> list[bytes]:
    storage = open_storage(remote)
    return [storage.read(name) for name in lengths_names(processor_fingerprint(processor))]


@dataclass
class Started:
    """What index_dataset says: samples of all shards, of those that it measures, and as they are measured."""

    shards: Sequence[int] = ()
    missing: Sequence[int] = ()
    num_reported: int = 0

    def __call__(self, shards: Sequence[int], missing: Sequence[int]) -> None:
        self.shards, self.missing = shards, missing

    def report(self, count: int) -> None:
        self.num_reported += count

    @property
    def num_kept(self) -> int:
        return len(self.shards) - len(self.missing)


def read_shards(remote: str) -> list[ShardInfo]:
    return parse_index(open_storage(remote).read(INDEX_NAME), source=remote)


def interrupted_index(folder: Path, *, at: int = 100) -> list[ShardInfo]:
    """Index up to a sample that is refused; returns the shards that were measured."""
    with pytest.raises(DataError, match="too many words"):
        index_dataset(str(folder), Words(at=at, failure="data"), num_workers=1)
    started = Started()
    with pytest.raises(DataError, match="too many words"):
        index_dataset(str(folder), Words(at=at, failure="data"), num_workers=1, on_start=started)
    assert 2 < started.num_kept < len(started.shards) - 2
    return read_shards(str(folder))[: started.num_kept]


# One process, in which every step is decided


def test_the_index_of_a_plain_dataset_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    one, two = write_plain(tmp_path / "one"), write_plain(tmp_path / "two", compression="zstd")
    before = sorted(two.iterdir())
    first = index_dataset(str(one), Words(), num_workers=1)
    started = Started()
    second = index_dataset(str(two), Words(), num_workers=2, on_start=started, on_samples=started.report)
    assert first.lengths.tolist() == second.lengths.tolist() == expected_lengths()
    assert second.lengths.dtype == np.uint32
    assert index_bytes(one, Words()) == index_bytes(two, Words())
    assert started.num_reported == NUM_SAMPLES
    assert sorted(two.iterdir()) == [two / "_lmms", *before]
    assert not (two / DATASET_NAME).exists()


def test_the_command_says_how_many_samples_and_tokens_it_measured_in_how_many_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = write_tokens(tmp_path / "tokens", num_samples=300, with_index=False)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert main(["index", str(tmp_path / "tokens"), "--workers", "1"]) == 0
    rows = dict(re.findall(r"│ ([a-z ]+?) +│ ([^│]+?) +│", capsys.readouterr().out))
    assert (rows["samples"], rows["tokens"]) == ("300", f"{lengths.sum():,}")
    assert re.fullmatch(r"\d+\.\d s", rows["time"])


def test_only_the_columns_of_the_processor_are_decoded(tmp_path: Path) -> None:
    assert set(index_dataset(str(write_plain(tmp_path / "data")), Columns(), num_workers=1).lengths) == {1}


def test_a_worker_keeps_to_one_core(tmp_path: Path) -> None:
    lengths = index_dataset(str(write_plain(tmp_path / "data")), Threads(), num_workers=2).lengths
    assert set(lengths) == {len("false")}


def test_shards_that_were_measured_are_not_even_read_again(tmp_path: Path) -> None:
    folder = write_plain(tmp_path / "data")
    measured = interrupted_index(folder)
    for info in measured:
        (folder / info.name).unlink()
    started = Started()
    index = index_dataset(str(folder), Words(), num_workers=1, on_start=started, on_samples=started.report)
    assert index.lengths.tolist() == expected_lengths()
    assert started.num_kept == len(measured)
    assert started.num_reported == sum(started.missing)


def test_a_shard_that_changed_is_measured_again(tmp_path: Path) -> None:
    folder = write_plain(tmp_path / "data")
    measured = interrupted_index(folder)
    texts = [f"{number}" + " word" * (number % 7 + 1) for number in range(NUM_SAMPLES)]
    first = measured[0].num_samples  # of the second shard
    texts[first] = texts[first].replace(" word", " w rd", 1)  # of the same size
    shutil.rmtree(folder)
    write_plain(folder, texts=texts)
    started = Started()
    index = index_dataset(str(folder), Words(), num_workers=1, on_start=started)
    assert index.lengths.tolist() == [len(text.split()) for text in texts]
    assert started.num_kept == len(measured) - 1


@pytest.mark.parametrize("damage", ["truncated", "empty", "one bit", "of another shard"])
def test_damaged_lengths_of_a_shard_are_measured_again(damage: str, tmp_path: Path, temporary_folder: Path) -> None:
    folder = write_plain(tmp_path / "data")
    measured = interrupted_index(folder)
    kept, other = sorted(temporary_folder.rglob("*.lengths"))[:2]
    data = kept.read_bytes()
    damaged = {
        "truncated": data[:-4],
        "empty": b"",
        "one bit": data[:-1] + bytes([data[-1] ^ 1]),
        "of another shard": other.read_bytes(),
    }
    kept.write_bytes(damaged[damage])
    started = Started()
    index = index_dataset(str(folder), Words(), num_workers=1, on_start=started)
    assert index.lengths.tolist() == expected_lengths()
    assert started.num_kept == len(measured) - 1


def test_another_processor_begins_anew_and_leaves_what_the_first_one_measured(tmp_path: Path) -> None:
    folder = write_plain(tmp_path / "data")
    measured = interrupted_index(folder)
    started = Started()
    index_dataset(str(folder), Words(name="others"), num_workers=1, on_start=started)
    assert started.missing == started.shards
    index_dataset(str(folder), Words(), num_workers=1, on_start=started)
    assert started.num_kept == len(measured)


def test_a_relative_path_goes_on_with_what_the_absolute_one_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = interrupted_index(write_plain(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    started = Started()
    index_dataset("data", Words(), num_workers=1, on_start=started)
    assert started.num_kept == len(measured)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_work_folder_keeps_all_that_is_not_of_the_index(compression: str | None, tmp_path: Path) -> None:
    folder = write_plain(tmp_path / "data", compression=compression)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    index_dataset(str(folder), Words(), num_workers=1, work=folder)
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert after == before
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["_lmms"]


def test_what_killed_runs_downloaded_is_removed_by_the_next_run_of_any_processor(
    tmp_path: Path, temporary_folder: Path
) -> None:
    folder = write_plain(tmp_path / "data")
    interrupted_index(folder)
    (kept,) = {path.parent for path in temporary_folder.rglob("*.lengths")}
    (kept / "downloads-1").mkdir()
    (kept / "downloads-1" / "shard.00000.mds").write_bytes(b"half")
    index_dataset(str(folder), Words(name="others"), num_workers=1)
    assert not list(kept.glob("downloads*"))
    assert list(kept.glob("*.lengths"))
    index_dataset(str(folder), Words(), num_workers=1)
    assert not kept.exists()


@pytest.mark.parametrize(
    ("failure", "num_workers", "message"),
    [
        ("data", 1, ": too many words"),
        ("data", 2, ": too many words"),
        ("code", 1, r": KeyError\('a\\nb'\)"),
        ("0", 1, r" has 0 tokens, expected 1 to 2\^32 - 1: remove it"),
        (str(1 << 32), 1, " has 4294967296 tokens"),
    ],
)
def test_a_sample_that_cannot_be_measured_is_named(
    failure: str, num_workers: int, message: str, tmp_path: Path
) -> None:
    folder = write_plain(tmp_path / "data")
    with pytest.raises(DataError, match=rf"^sample 100 \(number 15 of shard\.00005\.mds\){message}"):
        index_dataset(str(folder), Words(at=100, failure=failure), num_workers=num_workers)
    assert not (folder / "_lmms").exists()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_shard_that_cannot_be_read_is_named(num_workers: int, tmp_path: Path) -> None:
    folder = write_plain(tmp_path / "data")
    (folder / "shard.00003.mds").unlink()
    with pytest.raises(StorageError, match=r"shard\.00003\.mds"):
        index_dataset(str(folder), Words(), num_workers=num_workers)


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    folder = write_plain(tmp_path / "data")
    with pytest.raises(ConfigError, match="the number of workers must be at least 1, got 0"):
        index_dataset(str(folder), Words(), num_workers=0)

    class Local(Words):
        pass

    with pytest.raises(ConfigError, match=r"the processor cannot be sent to other processes .*: pass num_workers=1"):
        index_dataset(str(folder), Local(), num_workers=2)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="name another folder with --work"):
        index_dataset(str(folder), Words(), work=tmp_path / "file")
    (folder / "index.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(DataError, match="lists no samples"):
        index_dataset(str(folder), Words())
    (folder / "index.json").write_text("{")
    with pytest.raises(ShardError, match="not a valid MDS index"):
        index_dataset(str(folder), Words())
    (folder / "index.json").unlink()
    with pytest.raises(StorageError, match=r"holds no dataset \(index\.json is missing\): check the path or URL"):
        index_dataset(str(folder), Words())


def test_a_script_that_does_not_guard_its_main_part_is_told_so(tmp_path: Path) -> None:
    folder = write_plain(tmp_path / "data")
    script = tmp_path / "script.py"
    script.write_text(
        "from lmms_stream.mds.measuring import index_dataset\n"
        "from tests.mds.measures import Words\n"
        f"index_dataset({str(folder)!r}, Words(), num_workers=2)\n"
    )
    root = Path(__file__).parents[2]
    result = run_command("env", f"PYTHONPATH={root}", sys.executable, str(script), cwd=root)
    assert result.returncode == 1
    assert f"ConfigError: {script}, line 3, starts worker processes; they import this script" in result.stderr
    assert result.stderr.count("Traceback") == 1


# The command, with real signals


@pytest.fixture(scope="session")
def chats(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats in some 18 shards, without an index."""
    folder = tmp_path_factory.mktemp("chats")
    convert([corpus.functions] * 3, str(folder), shard_bytes=1 << 15, allow_repeats=True)
    return folder


@pytest.fixture(scope="session")
def chats_index(chats: Path, chat_processor: ChatProcessor, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The bytes of their index, measured in one go."""
    folder = tmp_path_factory.mktemp("indexed") / "chats"
    shutil.copytree(chats, folder)
    index_dataset(str(folder), chat_processor, num_workers=1, work=folder.parent / "work")
    return [*index_bytes(folder, chat_processor), (folder / DATASET_NAME).read_bytes()]


@pytest.fixture(params=["s3", *(["folder"] if LONG else [])])
def remote(request: pytest.FixtureRequest, chats: Path, tmp_path: Path) -> str:
    """A copy of the chats of the test's own."""
    if request.param == "folder":
        shutil.copytree(chats, tmp_path / "chats")
        return str(tmp_path / "chats")
    url = f"{request.getfixturevalue('s3')}/{request.node.name}"
    storage = open_storage(url)
    for path in chats.rglob("*"):
        if path.is_file():
            storage.upload(path, path.relative_to(chats).as_posix())
    return url


def all_index_bytes(remote: str, processor: Processor) -> list[bytes]:
    return [*index_bytes(remote, processor), open_storage(remote).read(DATASET_NAME)]


@contextmanager
def index_command(remote: str, tokenizer: Path) -> Iterator[Job]:
    """The command with two workers, in a process group of its own; nothing of it is left at the end."""
    arguments = ["index", remote, "--tokenizer", str(tokenizer), "--workers", "2"]
    with start_module("lmms_stream", arguments, [{}], cwd=Path.cwd()) as job:
        yield job


def pid_of(job: Job) -> int:
    (process,) = job.processes
    assert process.pid is not None
    return process.pid


def wait_until(condition: Callable[[], object], job: Job) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert job.poll() is None, f"the command ended early: {job.complete(LIMIT_S)}"
        assert time.monotonic() < deadline, "the command did nothing in time"
        time.sleep(0.002)


def server_of(job: Job) -> list[psutil.Process]:
    """The process that the command's workers are forked from, where there is one yet."""
    servers = []
    for child in psutil.Process(pid_of(job)).children():
        with suppress(psutil.Error):  # one that has just ended
            servers += [child] if any("forkserver" in word for word in child.cmdline()) else []
    return servers


def workers_of(job: Job) -> list[psutil.Process]:
    return [worker for server in server_of(job) for worker in server.children()]


def stop_a_worker(job: Job) -> psutil.Process:
    """A worker that stands still, so that the command does not end however fast the other one measures."""
    wait_until(lambda: len(workers_of(job)) == 2, job)
    worker = workers_of(job)[0]
    worker.suspend()
    return worker


def num_kept(temporary_folder: Path) -> int:
    while True:
        with suppress(FileNotFoundError):  # a folder that the command removes meanwhile
            return len(list(temporary_folder.rglob("*.lengths")))


def finish(remote: str, tokenizer: Path, *, num_workers: int = 1) -> str:
    arguments = ["index", remote, "--tokenizer", str(tokenizer), "--workers", str(num_workers)]
    result = run_cli(*arguments, timeout_s=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr.lower()
    return result.stdout


def test_a_command_that_is_killed_goes_on_and_writes_the_same_bytes(
    remote: str, tokenizer: Path, chat_processor: ChatProcessor, chats_index: list[bytes], temporary_folder: Path
) -> None:
    with index_command(remote, tokenizer) as job:
        stopped = stop_a_worker(job)
        wait_until(lambda: num_kept(temporary_folder) > 4, job)
        workers = workers_of(job)
        job.send_signal(signal.SIGKILL)
        assert job.wait(LIMIT_S) == -signal.SIGKILL
        stopped.resume()
        _, alive = psutil.wait_procs(workers, timeout=LIMIT_S)
        assert len(workers) == 2
        assert not alive
    kept = num_kept(temporary_folder)
    num_shards = len(read_shards(remote))
    assert 4 < kept < num_shards
    assert f"{kept} of {num_shards} shards were measured before" in finish(remote, tokenizer, num_workers=2)
    assert all_index_bytes(remote, chat_processor) == chats_index
    assert not num_kept(temporary_folder)
    assert not list(temporary_folder.rglob("*.mds"))
    assert not list(temporary_folder.rglob("downloads*"))


@pytest.fixture
def local_chats(chats: Path, tmp_path: Path) -> str:
    shutil.copytree(chats, tmp_path / "chats")
    return str(tmp_path / "chats")


def test_workers_need_no_server_where_the_name_of_the_temporary_folder_is_too_long_for_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setitem(current_process()._config, "tempdir", str(folder))  # type: ignore[attr-defined]
    assert address_obstacle() is not None
    index = index_dataset(str(write_plain(tmp_path / "data")), Words(), num_workers=2)
    assert index.lengths.tolist() == expected_lengths()


def test_a_second_command_for_the_same_index_is_refused_at_once(
    local_chats: str,
    tokenizer: Path,
    chat_processor: ChatProcessor,
    chats_index: list[bytes],
    temporary_folder: Path,
    tmp_path: Path,
) -> None:
    with index_command(local_chats, tokenizer) as first:
        stopped = stop_a_worker(first)
        wait_until(lambda: num_kept(temporary_folder) > 4, first)
        for more in ([], ["--work", str(tmp_path / "work")]):
            second = run_cli("index", local_chats, "--tokenizer", str(tokenizer), *more, timeout_s=LIMIT_S)
            assert second.returncode == 1
            assert second.stderr.startswith(f"error: another process indexes {local_chats} for this processor: wait")
            assert len(second.stderr.splitlines()) == 1
        stopped.resume()
        result = first.complete(LIMIT_S)
        assert result.returncode == 0, result.stderr
    assert all_index_bytes(local_chats, chat_processor) == chats_index


def test_a_worker_killed_from_outside_ends_the_command_with_one_line(
    local_chats: str, tokenizer: Path, chat_processor: ChatProcessor, chats_index: list[bytes], temporary_folder: Path
) -> None:
    with index_command(local_chats, tokenizer) as job:
        worker = stop_a_worker(job)
        wait_until(lambda: num_kept(temporary_folder) > 4, job)
        worker.kill()
        result = job.complete(LIMIT_S)
        assert result.returncode == 1
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"error: worker process {worker.pid} was killed by signal 9 (Killed) at shard.")
        assert "run the same command again" in line
    assert "shards were measured before" in finish(local_chats, tokenizer)
    assert all_index_bytes(local_chats, chat_processor) == chats_index


@pytest.mark.parametrize("moment", ["while their server starts", "while workers start", "while they measure"])
def test_an_interrupt_ends_the_command_without_a_traceback(
    moment: str, local_chats: str, tokenizer: Path, temporary_folder: Path
) -> None:
    with index_command(local_chats, tokenizer) as job:
        stopped = None
        if moment == "while their server starts":
            wait_until(lambda: server_of(job), job)
        else:
            stopped = stop_a_worker(job)
        if moment == "while they measure":
            wait_until(lambda: num_kept(temporary_folder) > 4, job)
        workers = server_of(job) + workers_of(job)
        os.killpg(pid_of(job), signal.SIGINT)  # as a terminal does
        if stopped is not None:
            with suppress(psutil.NoSuchProcess):  # a parent that gave up waiting has killed it
                stopped.resume()
        result = job.complete(LIMIT_S)
        assert result.returncode == 130
        words = f"index {local_chats} --tokenizer {tokenizer} --workers 2"
        assert result.stderr == f"interrupted: lmms-stream {words} resumes\n"
        _, alive = psutil.wait_procs(workers, timeout=LIMIT_S)
        assert not alive
    if moment == "while they measure":
        measured = f"{num_kept(temporary_folder)} of {len(read_shards(local_chats))} shards were measured before"
        assert measured in finish(local_chats, tokenizer)
