"""Buckets that are read without credentials, and those whose requester pays: what a real server is asked."""

from __future__ import annotations

import pickle
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import boto3
import pytest
from lmms_stream.errors import ObjectHiddenError, ObjectMissingError, StorageError
from lmms_stream.mds.auto import ensure_lengths
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.retry import Retry
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.demo.endpoint import moto_server
from lmms_stream.types import World

from ..conftest import write_tokens

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")


@dataclass
class Recorded:
    """A server in front of an S3 server: what it was asked, as method, path and headers in lower case."""

    url: str
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    status_of_signed: int | None = None  # instead of the answer

    def headers(self, name: str) -> set[str | None]:
        """The values of a header in all requests so far, which are then forgotten."""
        found = {headers.get(name) for _, _, headers in self.requests}
        self.requests.clear()
        return found


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture
def server(upstream: str) -> Iterator[Recorded]:
    """Relays to an S3 server that has buckets `public`, of which all may read objects, and `private`."""
    recorded = Recorded("")

    class Relay(BaseHTTPRequestHandler):
        def _relay(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            recorded.requests.append((self.command, self.path, headers))
            body = self.rfile.read(int(headers.get("content-length", 0)))
            if recorded.status_of_signed is not None and "authorization" in headers:
                self.send_response(recorded.status_of_signed)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            relayed = {"content-type": "binary/octet-stream", **headers}  # urllib's own is that of a form
            asked = urllib.request.Request(upstream + self.path, body or None, relayed, method=self.command)
            try:
                with urllib.request.urlopen(asked, timeout=20) as answer:
                    self._answer(answer.status, dict(answer.headers), answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    self._answer(error.code, dict(error.headers), error.read())

        def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                    self.send_header(name, value)
            if "Content-Length" not in headers:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_DELETE = _relay  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Relay) as relay:
        recorded.url = f"http://127.0.0.1:{relay.server_port}"
        thread = threading.Thread(target=relay.serve_forever)
        thread.start()
        yield recorded
        relay.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def without_credentials(server: Recorded, upstream: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    owner = boto3.client(
        "s3", endpoint_url=upstream, aws_access_key_id="x", aws_secret_access_key="x", region_name="us-east-1"
    )
    accesses: dict[str, Literal["public-read", "private"]] = {"public": "public-read", "private": "private"}
    for bucket, access in accesses.items():
        owner.create_bucket(Bucket=bucket)
        owner.put_object(Bucket=bucket, Key="x/a/index.json", Body=b"{}", ACL=access)
        owner.put_object(Bucket=bucket, Key="x/a", Body=b"content", ACL=access)
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("S3_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.fixture
def with_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")


def test_a_public_bucket_is_read_without_credentials_by_requests_that_are_not_signed(
    server: Recorded, tmp_path: Path
) -> None:
    store = open_storage("s3://public/x")
    assert store.read("a") == b"content"
    store.download("a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"content"
    assert store.stat("a").num_bytes == 7
    assert [entry.key for entry in store.list_objects("")] == ["a", "a/index.json"]
    assert server.headers("authorization") == {None}


@pytest.mark.usefixtures("with_credentials")
def test_requests_are_signed_where_there_are_credentials(server: Recorded) -> None:
    assert open_storage("s3://private/x").read("a") == b"content"
    (authorization,) = server.headers("authorization")
    assert str(authorization).startswith("AWS4-HMAC-SHA256 ")


def test_a_dataset_of_a_public_bucket_is_streamed_without_credentials(upstream: str, tmp_path: Path) -> None:
    write_tokens(tmp_path / "made", num_samples=300)
    owner = boto3.client(
        "s3", endpoint_url=upstream, aws_access_key_id="x", aws_secret_access_key="x", region_name="us-east-1"
    )
    for path in (tmp_path / "made").iterdir():
        if path.is_file():
            owner.put_object(Bucket="public", Key=f"data/{path.name}", Body=path.read_bytes(), ACL="public-read")
    dataset = PackedStreamingDataset("s3://public/data", tmp_path / "cache")
    assert [int(sample["input_ids"][0]) for sample in dataset[:]] == list(range(300))


def test_a_public_dataset_without_an_index_is_measured_once_on_each_node(
    server: Recorded, upstream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lengths = write_tokens(tmp_path / "made", num_samples=300, with_index=False)
    owner = boto3.client(
        "s3", endpoint_url=upstream, aws_access_key_id="x", aws_secret_access_key="x", region_name="us-east-1"
    )
    for path in (tmp_path / "made").iterdir():
        owner.put_object(Bucket="public", Key=f"plain/{path.name}", Body=path.read_bytes(), ACL="public-read")
    for node in (0, 1):
        for _ in range(2):
            dataset = PackedStreamingDataset("s3://public/plain", tmp_path / f"node{node}", processor=TokensProcessor())
            ensure_lengths(dataset.core.one, TokensProcessor(), world=World(rank=node, world_size=2, num_nodes=2))
            assert dataset.length_index().lengths.tolist() == lengths.tolist()
        shards = [path for _, path, _ in server.requests if ".mds" in path]
        assert len(shards) == len(set(shards)) == len(dataset.core.shard_infos)  # nothing was measured twice
        server.requests.clear()


def test_what_is_not_public_is_named_with_the_remedy() -> None:
    store = open_storage("s3://private/x", retry=Retry(attempts=1))
    denied = (
        r"s3://private/x/a does not exist or is not public \(.*\), and no AWS credentials were found: check the URL"
    )
    with pytest.raises(ObjectHiddenError, match=denied):
        store.read("a")
    with pytest.raises(StorageError, match=r"private/x/a/index\.json does not exist or is not public"):
        PackedStreamingDataset("s3://private/x/a")
    with pytest.raises(ObjectMissingError, match=r"does not exist: check the URL$"):
        open_storage("s3://public/x").read("absent")


def test_nothing_is_written_without_credentials(server: Recorded, tmp_path: Path) -> None:
    store = open_storage("s3://public/x")
    store.read("a")
    (tmp_path / "file").write_bytes(b"x")
    server.requests.clear()
    writes: list[Callable[[], None]] = [
        lambda: store.write("b", b"x"),
        lambda: store.upload(tmp_path / "file", "b"),
        lambda: store.delete("a"),
    ]
    for write in writes:
        with pytest.raises(StorageError, match="no AWS credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET"):
            write()
    assert server.requests == []


@pytest.mark.usefixtures("with_credentials")
def test_a_public_bucket_that_answers_credentials_with_400_is_read_without_them(server: Recorded) -> None:
    server.status_of_signed = 400
    store = open_storage("s3://public/x")
    assert store.read("a") == b"content"
    assert [("authorization" in headers) for _, _, headers in server.requests] == [True, False]
    assert store.stat("a").num_bytes == 7
    assert len(server.requests) == 3


@pytest.mark.usefixtures("with_credentials")
def test_requests_to_buckets_that_are_listed_say_that_the_requester_pays(
    server: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOSAICML_STREAMING_AWS_REQUESTER_PAYS", "other, private")
    (tmp_path / "file").write_bytes(b"y")
    for bucket, expected in (("private", {"requester"}), ("public", {None})):
        store = open_storage(f"s3://{bucket}/x")
        store.read("a")
        store.download("a", tmp_path / "a")
        store.stat("a")
        store.list_objects("")
        store.write("b", b"x")
        store.upload(tmp_path / "file", "c")
        store.delete("b")
        assert len(server.requests) == 7
        assert server.headers("x-amz-request-payer") == expected


@pytest.mark.usefixtures("with_credentials")
def test_a_bucket_that_refuses_names_the_variable_for_those_whose_requester_pays(server: Recorded) -> None:
    server.status_of_signed = 403
    with pytest.raises(StorageError, match=r"requester pays belongs into MOSAICML_STREAMING_AWS_REQUESTER_PAYS"):
        open_storage("s3://private/x").read("a")


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_hmac_keys_reach_google_and_uploads_can_do_without_checksums_of_botos(
    scheme: str, server: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Google refuses those checksums, and so does Oracle, where a variable of boto3's turns them off."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST" if scheme == "gs" else "S3_ENDPOINT_URL", server.url)
    monkeypatch.setenv("GCS_KEY" if scheme == "gs" else "AWS_ACCESS_KEY_ID", "hmac-key")
    monkeypatch.setenv("GCS_SECRET" if scheme == "gs" else "AWS_SECRET_ACCESS_KEY", "secret")
    if scheme == "s3":
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    (tmp_path / "file").write_bytes(b"y")
    store = pickle.loads(pickle.dumps(open_storage(f"{scheme}://private/x", retry=Retry(attempts=1))))
    store.write("b", b"x")
    store.upload(tmp_path / "file", "c")
    store.download("c", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"y"
    assert store.read_range("b", start=0, stop=1, tag=store.stat("b").tag) == b"x"
    for name in ("b", "c"):
        store.delete(name)
    assert [entry.key for entry in store.list_objects("")] == ["a", "a/index.json"]
    for _, path, headers in server.requests:
        assert path.startswith("/private")  # and not a host of the bucket's own
        assert not [name for name in headers if "checksum" in name or name == "x-amz-trailer"]
        assert "Credential=hmac-key/" in headers["authorization"]
    region = "auto" if scheme == "gs" else "us-east-1"
    assert all(f"/{region}/s3/" in headers["authorization"] for _, _, headers in server.requests)
    with pytest.raises(ObjectMissingError, match=rf"{scheme}://private/x/absent does not exist"):
        store.read("absent")
    server.status_of_signed = 403
    with pytest.raises(StorageError, match="GCS_KEY, GCS_SECRET" if scheme == "gs" else "AWS_ACCESS_KEY_ID, AWS_SEC"):
        store.read("a")
