"""Stores that cannot be reached for a while are waited for; failures of another kind are counted or end the request."""

from __future__ import annotations

import logging
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from lmms_stream.errors import StorageError
from lmms_stream.storage import retry as retry_module
from lmms_stream.storage.retry import Retry, persist
from lmms_stream.storage.s3 import S3Storage

from ..proxy import FaultProxy, Rule


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
def server(port: int = 0, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """The port of a server that answers until the end of the block."""
    with ThreadingHTTPServer(("127.0.0.1", port), Answer) as made:
        if context is not None:
            made.socket = context.wrap_socket(made.socket, server_side=True)
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


@pytest.mark.parametrize("has_answered", [True, False])
def test_a_store_that_cannot_be_reached_is_waited_for(has_answered: bool, keys: pytest.MonkeyPatch) -> None:
    with server() as port:
        keys.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        storage = S3Storage("s3://bucket/prefix", retry=Retry(attempts=1, timeout_s=60))
        if has_answered:
            assert storage.read("one") == b"all"
    found: list[bytes] = []
    reading = threading.Thread(target=lambda: found.append(storage.read("another")))
    reading.start()
    reading.join(1.5)
    assert reading.is_alive()
    with server(port):
        reading.join(30)
    assert found == [b"all"]


def test_a_store_that_does_not_come_back_is_an_error_once_time_is_over(keys: pytest.MonkeyPatch) -> None:
    with server() as port:
        keys.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    storage = S3Storage("s3://bucket/prefix", retry=Retry(attempts=1, timeout_s=2))
    expected = (
        r"^s3://bucket/prefix/one: no complete answer within 2 s \(attempt [3-9], the last error was: Could not con"
    )
    with pytest.raises(StorageError, match=expected + r".*\): check S3_ENDPOINT_URL.*, or raise timeout_s$"):
        storage.read("one")


def test_a_long_wait_is_logged_once(keys: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    keys.setattr(retry_module, "REPORT_AFTER_S", 0.5)
    keys.setattr(retry_module, "_last_report_s", -retry_module.REPORT_EVERY_S)
    with server() as port:
        keys.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    storage = S3Storage("s3://bucket/prefix", retry=Retry(timeout_s=3))
    with caplog.at_level(logging.WARNING, "lmms_stream"), pytest.raises(StorageError):
        storage.read("one")
    (message,) = caplog.messages
    assert message.startswith('s3://bucket/prefix/one: Could not connect to the endpoint URL: "http://127.0.0.1')
    assert message.endswith("asked again for up to 3 s")


def test_failures_of_another_kind_are_counted_also_during_an_outage() -> None:
    calls: list[int] = []

    def action(proceed: Callable[[], None]) -> int:
        calls.append(1)
        raise EOFError("cut short") if len(calls) > 2 else TimeoutError("away")

    with pytest.raises(StorageError, match=r"cut short \(after 4 attempts\)"):
        persist(action, where="s3://b/k", retry=Retry(attempts=2, timeout_s=60), refusal=lambda _: None, remedy="wait")
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (400, "ExpiredToken", r"the temporary credentials have expired \(ExpiredToken\): renew AWS_ACCESS_KEY_ID"),
        (
            403,
            "RequestTimeTooSkewed",
            r"clock of this machine is wrong by many minutes \(Reques.*\): set it \(timedatec",
        ),
        (403, "AccessDenied", r"the credentials are refused \(AccessDenied\): check AWS_ACCESS_KEY_ID"),
        (404, "NoSuchBucket", r"bucket 'lmms-stream-demo' does not exist: create it or correct the URL"),
        (501, "NotImplemented", r"NotImplemented.*: check the URL, the credentials and the region"),
    ],
)
def test_refusals_that_last_name_their_remedy_after_one_attempt(
    status: int, code: str, remedy: str, s3_folder: str, proxy: FaultProxy
) -> None:
    storage = S3Storage(s3_folder)
    for method, action in (("GET", lambda: storage.read("k")), ("PUT", lambda: storage.write("k", b""))):
        proxy.set_rules(Rule(method=method, status=status, code=code))
        with pytest.raises(StorageError, match=rf"^{s3_folder}/k: .*{remedy}"):
            action()
        num_unsigned = 1 if status == 400 and method == "GET" else 0  # as of a public bucket
        assert proxy.traffic().num_requests(method, "/k$") == 1 + num_unsigned


@pytest.mark.parametrize("code", ["RequestTimeout", "Throttling"])
def test_throttling_is_told_by_its_code_whatever_the_status(code: str, s3_folder: str, proxy: FaultProxy) -> None:
    storage = S3Storage(s3_folder, retry=Retry(attempts=1))
    proxy.set_rules(Rule(method="PUT", status=400, code=code, times=2))
    storage.write("k", b"all")
    assert storage.read("k") == b"all"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("S3_ENDPOINT_URL", "nonsense", r"Invalid endpoint: nonsense: correct the URL, S3_ENDPOINT_URL"),
        ("AWS_PROFILE", "no-such-profile", r"no-such-profile.*: correct the URL, S3_ENDPOINT_URL, AWS_PROFILE"),
    ],
)
def test_settings_that_no_client_can_be_made_of_are_not_tried_again(
    name: str, value: str, message: str, keys: pytest.MonkeyPatch
) -> None:
    keys.setenv(name, value)
    with pytest.raises(StorageError, match=message) as caught:
        S3Storage("s3://bucket/prefix").read("one")
    assert "attempts" not in str(caught.value)


def test_a_certificate_that_is_refused_is_not_tried_again_and_the_remedy_mends_it(
    keys: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost")
    files = ("-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "certificate.pem"))
    subprocess.run(
        [*command, *files, "-addext", "subjectAltName=DNS:localhost"], check=True, timeout=60, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    with server(context=context) as port:
        keys.setenv("S3_ENDPOINT_URL", f"https://localhost:{port}")
        with pytest.raises(
            StorageError, match=r"certificate is refused \(.*\): .* in AWS_CA_BUNDLE and REQUESTS_CA_BU"
        ):
            S3Storage("s3://bucket/prefix").read("one")
        keys.setenv("AWS_CA_BUNDLE", str(tmp_path / "certificate.pem"))
        assert S3Storage("s3://bucket/prefix").read("one") == b"all"
