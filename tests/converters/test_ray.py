"""Conversions on Ray clusters of this machine: the same bytes as by processes, and errors that end in time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.errors import ConfigError, DataError, WorkerError
from lmms_stream.plugins.engines.ray_cluster import unseen
from lmms_stream.processes.engine import Engine, open_engine
from lmms_stream.processes.pool import Mark, do_all
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.storage.cache import default_cache_folder

from ..conftest import run_cli, run_command
from ..rounds import LONG, in_long_rounds
from .held import chat
from .ray_nodes import HEAD, JOINING, LIMIT_S, LOOPBACK, is_alive, ray_node, wait_until, workers_of
from .test_convert_runs import convert_command, written


@pytest.fixture(scope="module")
def cluster(s3: str) -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of a cluster of one node with two CPUs; the environment is set so that others may join."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in LOOPBACK.items():
            patch.setenv(name, value)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)))
        node = stack.enter_context(ray_node(HEAD, str(folder)))
        wait_until(lambda: (folder / "ray_current_cluster").exists() and bool(workers_of(node, "raylet")))
        yield (folder / "ray_current_cluster").read_text().strip(), node


@contextmanager
def ray_engine(address: str) -> Iterator[Engine]:
    with open_engine("ray", ray_address=address, ray_timeout_s=60, num_workers=None) as engine:
        yield engine


def open_pool(engine: Engine, job: Any, num_workers: int, **changes: Any) -> Any:
    return engine.open_pool(
        job, num_workers, **{"name": str, "on_progress": lambda count: None, "marks": [], **changes}
    )


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(json.dumps(chat(number)) + "\n" for number in range(2000)))
    return path


@pytest.fixture(scope="module")
def many_chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough to take two workers some seconds."""
    path = tmp_path_factory.mktemp("many") / "many.jsonl"
    path.write_text("".join(json.dumps(chat(number)) + "\n" for number in range(500)) * 300)
    return path


@pytest.fixture(scope="module")
def bytes_of_many(many_chats: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    target = str(tmp_path_factory.mktemp("once") / "out")
    convert([many_chats], target, shard_bytes=2 << 20, num_workers=2)
    return written(target)


# The same bytes


@pytest.mark.parametrize(("store", "tokenize"), [("s3", True), *([("folder", False)] if LONG else [])])
def test_workers_on_a_cluster_write_what_processes_write(
    chats: Path,
    chat_processor: ChatProcessor,
    cluster: tuple[str, psutil.Process],
    tmp_path: Path,
    s3: str,
    store: str,
    tokenize: bool,
) -> None:
    target = f"{s3}/ray-{tokenize}" if store == "s3" else str(tmp_path / "ray")
    options: dict[str, Any] = {"processor": chat_processor, "unit_bytes": 100_000, "shard_bytes": 1 << 17}
    convert([chats], str(tmp_path / "processes"), tokenize=tokenize, num_workers=1, **options)
    with ray_engine(cluster[0]):  # a connection that is there is used, and left
        report = convert([chats], target, tokenize=tokenize, engine="ray", **options)
    assert report.num_rows == 2000
    assert report.num_shards > 2
    assert written(target) == written(str(tmp_path / "processes"))
    assert any(name.startswith("_lmms/lengths/") for name in written(target))


@in_long_rounds
def test_relative_paths_mean_the_same_on_a_cluster(
    chats: Path, cluster: tuple[str, psutil.Process], tmp_path: Path
) -> None:
    shutil.copy(chats, tmp_path / "chats.jsonl")
    (tmp_path / "own.py").write_text("def same(row):\n    return row\n\ndef some(row):\n    return len(row) == 1\n")
    for engine, target in (("processes", "a"), ("ray", "b")):
        address = ("--ray-address", cluster[0]) if engine == "ray" else ()
        own = ("--map", "own:same", "--filter", "own.py:some")
        result = run_cli("convert", "chats.jsonl", target, "--engine", engine, *address, *own, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        assert "[33m" not in result.stdout
        assert "ray::" not in result.stdout
    assert written(str(tmp_path / "a")) == written(str(tmp_path / "b"))


@in_long_rounds
def test_a_node_that_joins_takes_part_and_one_that_is_lost_is_an_error(
    chats: Path, cluster: tuple[str, psutil.Process], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def where(task: int, on_progress: Callable[[int], None]) -> str:
        import ray

        time.sleep(0.05)
        return str(ray.get_runtime_context().get_node_id())

    with ExitStack() as stack:
        second = stack.enter_context(ray_node(JOINING, cluster[0]))
        engine = stack.enter_context(ray_engine(cluster[0]))
        wait_until(lambda: engine.num_cpus == 3)
        with open_pool(engine, where, 3) as pool:
            seen: set[str] = set()
            wait_until(lambda: len(seen.union(node for _, node in do_all(pool, range(20)))) == 2)
        convert([chats], str(tmp_path / "three"), engine="ray", unit_bytes=50_000, num_workers=3)
        with open_pool(engine, where, 3) as pool:
            assert len(list(do_all(pool, range(30)))) == 30
            workers_of(second, "raylet")[0].kill()
            with pytest.raises(WorkerError, match=r"a Ray worker was lost at \d+: run the same command again"):
                list(do_all(pool, count()))
    assert capfd.readouterr() == ("", "")  # Ray has much to say about it
    convert([chats], str(tmp_path / "one"), unit_bytes=50_000, num_workers=1)
    assert written(str(tmp_path / "three")) == written(str(tmp_path / "one"))


# Killed and interrupted


@in_long_rounds
def test_a_worker_that_is_killed_ends_the_command_and_the_next_goes_on(
    many_chats: Path, bytes_of_many: dict[str, bytes], cluster: tuple[str, psutil.Process], tmp_path: Path
) -> None:
    address, node = cluster
    target = str(tmp_path / "out")
    arguments = (str(many_chats), target, "--shard-size", "2mb", "--engine", "ray", "--ray-address", address)
    with convert_command(*arguments) as process:
        wait_until(lambda: (tmp_path / "out" / "shard.00002.mds").exists())
        workers_of(node)[0].kill()
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert errors.startswith("error: a Ray worker was lost at ")
    assert "run the same command again, with fewer --workers if memory ran out; the conversion resumes" in errors
    assert len(errors.splitlines()) == 1
    first = (tmp_path / "out" / "shard.00000.mds").stat()
    result = run_cli("convert", *arguments, timeout_s=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "shard.00000.mds").stat() == first
    assert written(target) == bytes_of_many


@in_long_rounds
def test_an_interrupted_command_ends_at_once_and_leaves_no_worker(
    many_chats: Path, bytes_of_many: dict[str, bytes], cluster: tuple[str, psutil.Process], tmp_path: Path
) -> None:
    address, node = cluster
    target = str(tmp_path / "out")
    arguments = (str(many_chats), target, "--shard-size", "2mb")
    with convert_command(*arguments, "--engine", "ray", "--ray-address", address) as process:
        wait_until(lambda: (tmp_path / "out" / "shard.00000.mds").exists())
        workers = workers_of(node)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert errors.startswith(f"interrupted: lmms-stream convert {many_chats} {target} ")
    assert errors.endswith(f" --ray-address {address} resumes\n")
    assert workers
    wait_until(lambda: not any(map(is_alive, workers)))
    result = run_cli("convert", *arguments, timeout_s=LIMIT_S)  # one engine goes on where the other was
    assert result.returncode == 0, result.stderr
    assert written(target) == bytes_of_many


def connections_of(process: psutil.Process) -> list[Any]:
    """Of a process of Ray's; none of one that has ended meanwhile."""
    try:
        return [*process.net_connections()]
    except psutil.NoSuchProcess:
        return []


@in_long_rounds
def test_a_cluster_of_the_commands_own_is_private_and_ends_with_it_however_it_ends(
    many_chats: Path, bytes_of_many: dict[str, bytes], tmp_path: Path
) -> None:
    target = str(tmp_path / "out")
    arguments = (str(many_chats), target, "--shard-size", "2mb", "--workers", "2", "--engine", "ray")
    sessions, had_token = default_cache_folder("").parent, (Path.home() / ".ray").exists()
    with convert_command(*arguments) as process:
        wait_until(lambda: (tmp_path / "out" / "shard.00002.mds").exists())
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(workers_of(psutil.Process(process.pid))) == 2
        listening = [
            connection.laddr.ip
            for each in (psutil.Process(process.pid), *started)
            for connection in connections_of(each)
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening
        assert set(listening) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
        ending = [each for each in started if "Agent" not in each.name()]  # Ray's agents take a minute
        process.kill()
        process.wait(LIMIT_S)
        wait_until(lambda: not any(map(is_alive, ending)))
        assert (sessions / f"ray-{process.pid}").exists()
    result = run_cli("convert", *arguments, timeout_s=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert written(target) == bytes_of_many
    assert not (sessions / f"ray-{process.pid}").exists()
    assert (Path.home() / ".ray").exists() == had_token


# Errors


def test_a_row_that_does_not_fit_is_named_by_its_line(
    chats: Path, cluster: tuple[str, psutil.Process], tmp_path: Path
) -> None:
    lines = chats.read_text().splitlines()
    lines[1500] = "{broken"
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    target = str(tmp_path / "out")
    with pytest.raises(DataError, match=r"rows\.jsonl:1501: not valid JSON"):
        convert([tmp_path / "rows.jsonl"], target, unit_bytes=50_000, engine="ray", ray_address=cluster[0])
    assert not {"index.json", "_lmms/dataset.json"} & written(target).keys()  # what was made is kept for the next run


def test_errors_and_progress_of_workers_arrive(cluster: tuple[str, psutil.Process], tmp_path: Path) -> None:
    def fail(task: Exception | int, on_progress: Callable[[int], None]) -> int:
        on_progress(3)
        on_progress(4)
        if isinstance(task, Exception):
            raise task
        return task + 1

    moved: list[int] = []
    with ray_engine(cluster[0]) as engine:
        for error, raised, message in (
            (DataError("no such row"), DataError, "^no such row$"),
            (FileNotFoundError(2, "gone"), FileNotFoundError, "gone"),
            (ValueError("odd"), WorkerError, r"odd: ValueError\('odd'\)"),
        ):
            with open_pool(engine, fail, 1) as pool, pytest.raises(raised, match=message):
                list(do_all(pool, [error]))
        with open_pool(engine, fail, 2, on_progress=moved.append) as pool:
            assert sorted(do_all(pool, range(5))) == [(n, n + 1) for n in range(5)]
        assert sum(moved) == 35
        with pytest.raises(ConfigError, match="number of workers must be at least 1"), open_pool(engine, fail, -1):
            pass


@in_long_rounds
def test_a_cluster_without_room_is_an_error_in_time_that_leaves_nothing(
    chats: Path, cluster: tuple[str, psutil.Process], tmp_path: Path
) -> None:
    with ray_engine(cluster[0]) as engine, open_pool(engine, len, 2) as pool:
        wait_until(lambda: pool.num_idle == 2)
        target = str(tmp_path / "out")
        with pytest.raises(WorkerError, match=r"within 3 s \(0 of its 2 CPUs are free\): run the same command when"):
            convert([chats], target, engine="ray", ray_timeout_s=3)
        assert written(target) == {}


@in_long_rounds
def test_a_node_that_does_not_see_the_work_folder_is_named(cluster: tuple[str, psutil.Process], tmp_path: Path) -> None:
    """It is a real one, in which something else lies over the folder."""
    hide = f'mount -t tmpfs none {tmp_path} && exec "$@"'
    blind = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", hide, "sh")
    if run_command(*blind, "true").returncode:
        pytest.skip("this machine does not let a process see other files")
    mark = Mark(path=tmp_path / "mark", holds=b"mine", remedy="name a folder that all nodes share with --work")
    mark.path.write_bytes(b"it is mine")
    with ExitStack() as stack:
        stack.enter_context(ray_node(JOINING, cluster[0], inside=blind))
        engine = stack.enter_context(ray_engine(cluster[0]))
        wait_until(lambda: engine.num_cpus == 3)
        message = r"the Ray node .* does not see .*/mark, which this command has written: name a folder that all"
        with pytest.raises(WorkerError, match=message), open_pool(engine, lambda n, _: n, 3, marks=[mark]) as pool:
            list(do_all(pool, count()))


def test_a_mark_is_seen_when_it_comes_and_not_when_it_is_another(tmp_path: Path) -> None:
    mark = Mark(path=tmp_path / "mark", holds=b"mine", remedy="")
    assert unseen([mark], timeout_s=0.2) == mark
    mark.path.write_bytes(b"yours")
    assert unseen([mark], timeout_s=0) == mark
    mark.path.write_bytes(b"mine")
    assert unseen([mark], timeout_s=0) is None


@in_long_rounds
def test_addresses_where_no_cluster_answers_are_errors_in_time(chats: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        silent = f"127.0.0.1:{mute.getsockname()[1]}"
        for address, message in (
            (silent, f"no Ray cluster answers at {silent} within 3 s: check --ray-address"),
            ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1 ([Errno 111] Connection refused): check"),
            ("ray://127.0.0.1:10001", "ray://127.0.0.1:10001 is of Ray's client: run this on a node of the cluster"),
            ("nowhere", "no Ray cluster answers at nowhere (ValueError: Invalid address format: nowhere): check"),
        ):
            arguments = ("--engine", "ray", "--ray-address", address, "--ray-timeout", "3")
            result = run_cli("convert", str(chats), str(tmp_path / "out"), *arguments, timeout_s=30)
            assert result.returncode == 1
            assert result.stderr.startswith(f"error: {message}"), result.stderr
            assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_missing_library_is_named_with_the_command_that_installs_it(chats: Path, tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['ray'] = None; from lmms_stream.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = ("convert", str(chats), str(tmp_path / "out"), "--engine", "ray")
    result = run_command(sys.executable, "-c", script, *command, timeout_s=60)
    assert result.returncode == 1
    assert result.stderr.startswith("error: Ray cannot be imported (")
    assert result.stderr.endswith("): pip install 'lmms-stream[ray]'\n")
    assert not (tmp_path / "out").exists()


def test_an_engine_must_be_known_and_an_address_is_for_ray(chats: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engine 'spark' is not one of processes, ray"):
        convert([chats], str(tmp_path / "out"), engine="spark")
    with pytest.raises(ConfigError, match=r"is for the engine ray: pass --engine ray"):
        convert([chats], str(tmp_path / "out"), ray_address="auto")
