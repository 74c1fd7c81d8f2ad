"""A network that fails for a while or for good: exact data, or an error that names it, in bounded time."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from lmms_stream.errors import LmmsStreamError, StorageError
from lmms_stream.processors.base import processor_fingerprint
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.tools.demo.endpoint import moto_server

from ..proxy import FaultProxy, Rule
from ..rounds import rounds
from .reading import (
    IN_PROCESS_AND_WORKERS,
    MARKS,
    ONLY_SHARD,
    SHARD,
    SHARDS,
    Delivered,
    Reading,
    child,
    deliver,
    read_by,
    read_until_error,
    temporary_files,
    upload,
)

pytestmark = MARKS

S3_SETTINGS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


PASSES = {
    "slow down": Rule(times=2, status=503),
    "internal error": Rule(times=1, status=500),
    "reset instead of an answer": Rule(times=1, reset=True),
    "reset in the body": Rule(times=1, reset_after=1000),
    "cut short of Content-Length": Rule(times=1, cut_after=1000),
    "shorter than the index says": Rule(times=1, path=SHARDS, shorten_to=30_000),
    "flipped byte": Rule(times=1, path=SHARDS, flip_at=-5000),
    "latency": Rule(delay_s=0.1),
}


@pytest.mark.parametrize(("rule", "num_workers"), read_by(PASSES, in_workers=["flipped byte"]))
def test_a_fault_that_passes_leaves_the_data_exact(
    rule: Rule, num_workers: int, reading: Reading, proxy: FaultProxy, expected: Delivered
) -> None:
    proxy.set_rules(rule)
    assert replace(reading, num_workers=num_workers).deliver() == expected
    if rule.times is not None:
        assert proxy.traffic().num_requests("GET", ONLY_SHARD) == rule.times + 1


@pytest.mark.parametrize(
    ("rule", "num_workers"), read_by({"slow down": Rule(status=503), "reset": Rule(reset=True)}, in_workers=["reset"])
)
def test_an_outage_is_waited_out_whatever_the_number_of_attempts(
    rule: Rule, num_workers: int, reading: Reading, proxy: FaultProxy, expected: Delivered
) -> None:
    outage_s = rounds(3, 20)
    loader = replace(reading, num_workers=num_workers, fetch=FetchConfig(attempts=1, timeout_s=60)).loader()
    proxy.set_rules(replace(rule, for_s=outage_s))
    begun = time.monotonic()
    assert list(deliver(loader)) == expected
    assert time.monotonic() - begun >= outage_s


STAYS = {
    "slow down": (Rule(status=503), "unwell for 4 s|within 4 s"),
    "reset in the body": (Rule(reset_after=1000), "within 4 s"),
    "cut short of Content-Length": (Rule(cut_after=1000), "1000"),
    "shorter than the index says": (Rule(shorten_to=30_000), "does not match the size or checksum"),
    "flipped byte": (Rule(flip_at=-5000), "does not match the size or checksum"),
    "trickle": (Rule(trickle_s=0.2), "within 4 s"),
    "hang": (Rule(hang=True), "within 4 s"),
}


@pytest.mark.parametrize(("fault", "num_workers"), read_by(STAYS, in_workers=["hang"]))
def test_a_fault_that_stays_is_an_error_in_the_consumer_in_bounded_time(
    fault: tuple[Rule, str], num_workers: int, reading: Reading, proxy: FaultProxy, expected: Delivered
) -> None:
    rule, cause = fault
    proxy.set_rules(replace(rule, path=ONLY_SHARD))
    is_counted = rule.cut_after is not None or rule.changes_body
    takes_all_its_time = not is_counted
    timeout_s = 4 if takes_all_its_time else 20
    loader = replace(reading, num_workers=num_workers, fetch=FetchConfig(attempts=2, timeout_s=timeout_s)).loader()
    delivered, message = read_until_error(loader, StorageError)
    assert delivered == expected[: len(delivered)]
    assert f"{reading.remote}/{SHARD}" in message
    assert re.search(cause, message)
    # Workers share their downloads: who waits for the other's has its own limit, which may be over first.
    waits = num_workers > 1 and takes_all_its_time
    assert re.search(f"2 attempts|attempt [1-9]{'|another process holds its download' * waits}", message)
    proxy.set_rules()
    assert replace(reading, num_workers=num_workers).deliver() == expected
    assert temporary_files(reading.cache) == []


@IN_PROCESS_AND_WORKERS
def test_a_process_ends_soon_after_its_error(
    num_workers: int, reading: Reading, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.set_rules(Rule(path=ONLY_SHARD, hang=True))
    hurried = replace(reading, num_workers=num_workers, fetch=FetchConfig(attempts=2, timeout_s=4))
    with child(hurried, tmp_path / "child") as process:
        outcome = process.outcome()
    assert isinstance(outcome, StorageError)
    assert SHARD in str(outcome)


def test_no_worker_is_left_when_an_error_is_raised(reading: Reading, proxy: FaultProxy) -> None:
    proxy.set_rules(Rule(path=ONLY_SHARD, status=404))
    loader, children = replace(reading, num_workers=2).loader(), multiprocessing.active_children()
    with pytest.raises(StorageError):
        list(deliver(loader))
    assert multiprocessing.active_children() == children


@IN_PROCESS_AND_WORKERS
def test_an_endpoint_that_goes_away_is_an_error_and_one_that_comes_back_is_not(
    num_workers: int, reading: Reading, proxy: FaultProxy, expected: Delivered
) -> None:
    loader = replace(reading, num_workers=num_workers, fetch=FetchConfig(attempts=2, timeout_s=4)).loader()
    proxy.set_listening(False)
    try:
        delivered, message = read_until_error(loader, StorageError)
    finally:
        proxy.set_listening(True)
    assert delivered == []
    assert re.search(rf"{reading.remote}/shard\.\d+\.mds", message)
    assert list(deliver(loader)) == expected


@pytest.mark.parametrize("rule", [Rule(hang=True), Rule(status=503), Rule(cut_after=10)], ids=["hang", "503", "cut"])
def test_an_index_that_cannot_be_had_is_an_error_in_bounded_time(
    rule: Rule, reading: Reading, proxy: FaultProxy
) -> None:
    proxy.set_rules(replace(rule, path="index.json"))
    with pytest.raises(StorageError, match=rf"{reading.remote}/index\.json"):
        replace(reading, fetch=FetchConfig(attempts=2, timeout_s=1)).loader()


def test_a_store_that_does_not_answer_is_waited_for_once(reading: Reading, proxy: FaultProxy) -> None:
    proxy.set_rules(Rule(path="index.json", hang=True, method="HEAD"))
    with pytest.raises(StorageError, match=rf"{reading.remote}/index\.json: no complete answer within 1 s"):
        replace(reading, fetch=FetchConfig(attempts=2, timeout_s=1)).loader()
    assert proxy.traffic().num_requests("GET", "index.json") == 0


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
        delivered, message = read_until_error(loader, StorageError)
        assert delivered == []
        assert re.match(refused.format(r"shard\.\d+\.mds"), message)
    with pytest.raises(StorageError, match=refused.format(r"index\.json")):
        reading.loader()
