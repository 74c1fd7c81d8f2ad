"""A disk or network that fails a conversion: an error that names it; then the same command ends in the same bytes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.errors import StorageError
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.demo.endpoint import moto_server

from ..conftest import run_cli
from ..mds.reading import MARKS
from ..mds.test_disk_faults import limit_files, small_disk
from ..mds.test_network_faults import S3_SETTINGS
from ..processes import start_module
from ..proxy import FaultProxy, Rule
from ..rounds import in_long_rounds, rounds

pytestmark = MARKS
LIMIT_S = 60.0
NUM_ROWS, NUM_SMALL = rounds((12_000, 1800), (40_000, 6000))  # 9 MB and 1.4 MB, or 30 MB and 4.5 MB
SHARD_MB = rounds(1, 4)
SIZE = f"{SHARD_MB}mb"
DISK_BYTES = rounds(16, 192) << 20
FREE_BYTES = {  # less than a conversion writes, and less than its units take meanwhile
    "target": rounds(5, 24) << 20,
    "work": rounds(1, 4) << 20,
}


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the commands: what they keep of a target is not that of another run of these tests."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three files of chats, a unit each or more."""
    folder = tmp_path_factory.mktemp("rows") / "rows"
    folder.mkdir()
    for name, start in zip("abc", range(0, NUM_ROWS, -(-NUM_ROWS // 3)), strict=True):
        with (folder / f"{name}.jsonl").open("w") as file:
            for number in range(start, min(start + -(-NUM_ROWS // 3), NUM_ROWS)):
                turns = [("user", f"{number}?"), ("assistant", f"word{number % 977} " * 100)]
                messages = [{"role": role, "content": content} for role, content in turns]
                file.write(json.dumps({"messages": messages}) + "\n")
    return folder


@pytest.fixture(scope="module")
def small_rows(rows: Path) -> Path:
    """The first of them: a shard and something over."""
    path = rows.with_name("small.jsonl")
    with (rows / "a.jsonl").open("rb") as file:
        path.write_bytes(b"".join(next(file) for _ in range(NUM_SMALL)))
    return path


@pytest.fixture(scope="module")
def expected_of_small(small_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    target = str(tmp_path_factory.mktemp("small") / "out")
    convert([small_rows], target, shard_bytes=SHARD_MB << 20, num_workers=1)
    return written(target)


@pytest.fixture(scope="module")
def expected(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What is written where nothing fails."""
    target = tmp_path_factory.mktemp("expected") / "out"
    assert convert([rows], str(target), shard_bytes=SHARD_MB << 20, num_workers=1).num_shards > 8
    return written(str(target))


def written(target: str) -> dict[str, bytes]:
    storage = open_storage(target)
    return {file.key: storage.read(file.key) for file in storage.list_objects("")}


def arguments(rows: Path, target: str, work: Path, *, shard_size: str = SIZE) -> tuple[str, ...]:
    return "convert", str(rows), target, "--work", str(work), "--workers", "2", "--shard-size", shard_size


def failed(*command: str, prepare: Callable[[], None] | None = None) -> str:
    """The one line that a command which fails says; prepare: called in its process before its interpreter starts."""
    if prepare is None:
        result = run_cli(*command, timeout_s=LIMIT_S)
    else:
        result = subprocess.run(
            (sys.executable, "-m", "lmms_stream", *command),
            capture_output=True, text=True, timeout=LIMIT_S, preexec_fn=prepare, check=False,
        )  # fmt: skip
    assert result.returncode == 1, result.stderr
    (line,) = result.stderr.splitlines()
    return line


def goes_on(*command: str) -> None:
    result = run_cli(*command, timeout_s=LIMIT_S)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("full", ["target", "work"])
def test_a_conversion_out_of_disk_goes_on_once_there_is_room(
    full: str, rows: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, num_bytes=DISK_BYTES) as limit:
        if limit is None:
            (disk / "other").write_bytes(bytes(DISK_BYTES - FREE_BYTES[full]))
        else:
            limit = partial(limit_files, SHARD_MB << 19)
        folders = {"target": tmp_path / "target", "work": tmp_path / "work"} | {full: disk / full}
        command = arguments(rows, str(folders["target"]), folders["work"])
        message = failed(*command, prepare=limit)
        where = disk / full if limit is None else tmp_path
        assert message.startswith(f"error: {where}")
        assert re.search(
            r"no room on the disk of this node \((No space left on device|File too large)\): free some", message
        )
        assert "--work" in message
        left = written(str(folders["target"]))
        assert "_lmms/unfinished.json" in left
        assert not {"index.json", "_lmms/dataset.json"} & set(left)
        (disk / "other").unlink(missing_ok=True)
        goes_on(*command)
        assert written(str(folders["target"])) == expected
        assert not list(folders["work"].rglob("*.samples"))


SHARD = r"/shard\.00003\.mds"
REFUSED: dict[str, Any] = {"method": "PUT", "status": 403}
FAULTS = [
    pytest.param(Rule(path=SHARD, **REFUSED), SIZE, id="in the middle", marks=in_long_rounds),
    pytest.param(Rule(path=r"/shard\.00001\.mds", **REFUSED), "12mb", id="a part", marks=in_long_rounds),
    pytest.param(Rule(path=r"/_lmms/unfinished\.json", **REFUSED), SIZE, id="at the start", marks=in_long_rounds),
    pytest.param(Rule(path=r"/_lmms/dataset\.json", **REFUSED), SIZE, id="at the end"),
]


@pytest.mark.parametrize(("rule", "shard_size"), FAULTS)
def test_an_upload_that_fails_for_good_is_named_and_gone_on_with(
    rule: Rule,
    shard_size: str,
    rows: Path,
    expected: dict[str, bytes],
    proxy: FaultProxy,
    s3_folder: str,
    tmp_path: Path,
) -> None:
    command = arguments(rows, s3_folder, tmp_path / "work", shard_size=shard_size)
    proxy.set_rules(rule)
    message = failed(*command)
    assert re.match(rf"error: {re.escape(s3_folder)}{rule.path}: the credentials are refused \(AccessDenied\)", message)
    uploaded = [name for name in written(s3_folder) if name.startswith("shard")]
    assert "_lmms/dataset.json" not in written(s3_folder)
    proxy.set_rules()
    goes_on(*command)
    for name in uploaded:  # and not once more
        assert proxy.traffic().num_requests("PUT", f"/{name}$") == 0
    if shard_size != SIZE:
        convert([rows], str(tmp_path / "once"), shard_bytes=int(shard_size[:-2]) << 20, num_workers=1)
        expected = written(str(tmp_path / "once"))
    assert written(s3_folder) == expected


@pytest.mark.parametrize(
    "rule", [Rule(method="PUT", times=2, status=503), Rule(method="PUT", times=1, reset=True)], ids=["503", "reset"]
)
def test_uploads_that_fail_for_a_while_are_tried_again(
    rule: Rule,
    small_rows: Path,
    expected_of_small: dict[str, bytes],
    proxy: FaultProxy,
    s3_folder: str,
    tmp_path: Path,
) -> None:
    proxy.set_rules(rule)
    goes_on(*arguments(small_rows, s3_folder, tmp_path / "work"))
    assert written(s3_folder) == expected_of_small


def test_a_network_that_goes_away_in_the_middle_is_waited_for(
    rows: Path, expected: dict[str, bytes], proxy: FaultProxy, s3_folder: str, tmp_path: Path
) -> None:
    command = arguments(rows, s3_folder, tmp_path / "work")
    proxy.set_rules(Rule(method="PUT", path=SHARD, delay_s=1))  # so that it goes away in the middle
    with start_module("lmms_stream", command, [{}]) as job:
        try:
            proxy.wait_for(SHARD, method="PUT", timeout_s=LIMIT_S)
            proxy.set_listening(False)
            time.sleep(rounds(3, 20))
        finally:
            proxy.set_listening(True)
        result = job.complete(LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert written(s3_folder) == expected


def test_a_bucket_that_is_missing_is_named(small_rows: Path, s3: str, tmp_path: Path) -> None:
    message = "s3://no-such-bucket/x/.*: bucket 'no-such-bucket' does not exist: create it or correct the URL"
    with pytest.raises(StorageError, match=message):
        convert([small_rows], "s3://no-such-bucket/x")
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/rows\.jsonl"):
        convert(["s3://no-such-bucket/rows.jsonl"], str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


Allow = Callable[[int], None]


@pytest.fixture
def strict_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allow]:
    """An S3 server of this test's own; called with a number, it refuses the credentials after so many requests."""
    with moto_server() as url:

        def allow(num_requests: int) -> None:
            headers = {"Content-Type": "text/plain"}
            data = str(num_requests).encode()
            request = urllib.request.Request(f"{url}/moto-api/reset-auth", data, headers, method="POST")
            urllib.request.urlopen(request, timeout=10).close()

        for name, value in S3_SETTINGS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("S3_ENDPOINT_URL", url)
        import boto3

        boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"]).create_bucket(Bucket="strict")
        yield allow


def test_credentials_that_are_refused_are_an_error_and_gone_on_with_when_they_are_right(
    strict_s3: Allow, rows: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    command = arguments(rows, "s3://strict/out", tmp_path / "work")
    for num_requests in (0, 12):  # from the start, and in the middle
        strict_s3(num_requests)
        message = failed(*command)
        assert re.match(
            r"error: s3://strict/out/\S+: the credentials are refused \(.*\): check AWS_ACCESS_KEY_ID, AWS_SECRET",
            message,
        )
    strict_s3(1 << 30)
    names = written("s3://strict/out")
    assert any(name.startswith("shard.") for name in names)  # whichever of two workers came first
    assert "_lmms/dataset.json" not in names
    goes_on(*command)
    assert written("s3://strict/out") == expected


def test_credentials_that_may_not_read_a_source_are_named(strict_s3: Allow, small_rows: Path, tmp_path: Path) -> None:
    open_storage("s3://strict").upload(small_rows, "rows/small.jsonl")
    strict_s3(0)
    for source in ("s3://strict/rows/small.jsonl", "s3://strict/rows", "s3://strict/rows/*.jsonl"):
        with pytest.raises(StorageError, match=r"s3://strict/rows\S*: the credentials are refused \(.*\): check AWS_"):
            convert([source], str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
