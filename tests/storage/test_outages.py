"""A store that has answered and then cannot be reached is waited for; one that never answered is not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from lmms_stream.errors import StorageError
from lmms_stream.storage.retry import Retry, persist
from lmms_stream.storage.s3 import S3Storage


class Answer(BaseHTTPRequestHandler):
    """Each object holds three bytes."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "3")
        self.send_header("ETag", '"a"')
        self.end_headers()
        self.wfile.write(b"all")

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing is said."""


@contextmanager
def server(port: int = 0) -> Iterator[int]:
    """The port of a server that answers until the end of the block."""
    with ThreadingHTTPServer(("127.0.0.1", port), Answer) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield made.server_address[1]
        finally:
            made.shutdown()
            thread.join()


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    return monkeypatch


def test_a_store_that_goes_away_and_comes_back_is_waited_for(keys: pytest.MonkeyPatch) -> None:
    with server() as port:
        keys.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        storage = S3Storage("s3://bucket/prefix", retry=Retry(attempts=1, timeout_s=60))
        assert storage.read("one") == b"all"
    found: list[bytes] = []
    reading = threading.Thread(target=lambda: found.append(storage.read("another")))
    reading.start()
    reading.join(1.5)
    assert reading.is_alive()
    with server(port):
        reading.join(30)
    assert found == [b"all"]


def test_a_store_that_does_not_come_back_is_an_error_once_the_outage_is_too_long(keys: pytest.MonkeyPatch) -> None:
    with server() as port:
        keys.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        storage = S3Storage("s3://bucket/prefix", retry=Retry(attempts=2, timeout_s=60, outage_s=1))
        assert storage.read("one") == b"all"
    with pytest.raises(
        StorageError, match=r"^s3://bucket/prefix/one: .*\(after [3-9] attempts\): check S3_ENDPOINT_URL"
    ):
        storage.read("one")


def test_a_store_that_never_answered_is_given_up_after_its_attempts(keys: pytest.MonkeyPatch) -> None:
    with server() as port:
        keys.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    storage = S3Storage("s3://bucket/prefix", retry=Retry(attempts=2, timeout_s=60))
    with pytest.raises(StorageError, match=r"^s3://bucket/prefix/one: .*\(after 2 attempts\): check S3_ENDPOINT_URL"):
        storage.read("one")


def test_errors_of_another_kind_count_as_attempts_also_during_an_outage() -> None:
    calls: list[int] = []

    def action(proceed: Callable[[], None]) -> int:
        calls.append(1)
        raise ConnectionError("reset") if len(calls) > 2 else TimeoutError("away")

    with pytest.raises(StorageError, match=r"reset \(after 3 attempts\)"):
        persist(
            action, where="s3://b/k", retry=Retry(attempts=2, timeout_s=60), refusal=lambda _: None, remedy="wait",
            is_outage=lambda error: isinstance(error, TimeoutError),
        )  # fmt: skip
    assert len(calls) == 3
