from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmms_stream.errors import ConfigError, LengthsError, ObjectChangedError, ObjectMissingError, StorageError
from lmms_stream.plugins.stores.clouds import CloudStorage
from lmms_stream.storage.local import FolderStorage, LocalStorage
from lmms_stream.storage.retry import Retry
from lmms_stream.storage.s3 import S3Storage, _new_session
from lmms_stream.storage.storage import Storage, open_storage
from lmms_stream.tools.demo.endpoint import moto_server

from ..conftest import run_cli
from ..emulators import EMULATED


@pytest.fixture(params=["local", "s3", *EMULATED])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(tmp_path / "store")
    return open_storage(f"{request.getfixturevalue(request.param)}/{request.node.name}")


def test_what_is_written_is_read(storage: Storage, tmp_path: Path) -> None:
    storage.write("a/b.bin", b"\x00one")
    storage.write("a/b.bin", b"\x00two")
    assert storage.read("a/b.bin") == b"\x00two"
    storage.download("a/b.bin", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"\x00two"
    big = os.urandom(9 << 20)
    (tmp_path / "big").write_bytes(big)
    storage.upload(tmp_path / "big", "c/big")
    assert storage.read("c/big") == big
    storage.delete("c/big")
    with pytest.raises(ObjectMissingError, match=r"c/big does not exist"):
        storage.read("c/big")


def test_a_missing_object_is_an_error_of_its_own(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(ObjectMissingError, match=r"absent does not exist: check the (path|URL)"):
        storage.read("absent")
    with pytest.raises(ObjectMissingError, match="absent does not exist"):
        storage.download("absent", tmp_path / "copy")
    storage.delete("absent")


NAMES = ["a.bin", "a/b.bin", "a/c d.bin", "a/ü%41+&?#.bin", "ab"]


def test_what_is_listed_has_the_sizes_and_tags_that_are_told_one_by_one(storage: Storage) -> None:
    for number, name in enumerate(reversed(NAMES)):
        storage.write(name, b"x" * number)
    for prefix in ("", "a", "a/", "none"):
        found = storage.list_objects(prefix)
        assert [each.key for each in found] == [name for name in NAMES if name.startswith(prefix)]
        assert found == [storage.stat(each.key) for each in found]
    assert [each.num_bytes for each in storage.list_objects("")] == [4, 3, 2, 1, 0]
    before = storage.stat("a.bin")
    storage.write("a.bin", b"yyyy")
    assert storage.stat("a.bin").num_bytes == before.num_bytes
    assert storage.stat("a.bin").tag != before.tag
    assert storage.read("ab") == b""
    for name in NAMES:
        storage.delete(name)
    assert storage.list_objects("") == []


def test_ranges_are_read_of_the_object_that_was_asked_for_alone(storage: Storage) -> None:
    storage.write("data", bytes(range(100)))
    tag = storage.stat("data").tag
    assert storage.read_range("data", start=10, stop=20, tag=tag) == bytes(range(10, 20))
    assert storage.read_range("data", start=90, stop=200, tag=tag) == bytes(range(90, 100))
    storage.write("data", bytes(range(100, 200)))
    with pytest.raises(ObjectChangedError, match="data was changed during reading"):
        storage.read_range("data", start=10, stop=20, tag=tag)
    storage.delete("data")
    with pytest.raises(ObjectMissingError, match="data does not exist"):
        storage.read_range("data", start=10, stop=20, tag=tag)


def test_what_mosaicmls_code_uploads_has_the_name_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file.tmp").write_bytes(b"x")
    store = CloudStorage(str(tmp_path / "remote"))  # a folder: those of MosaicML's stores that need no server
    store.upload(tmp_path / "file.tmp", "a/b.bin")
    assert [path.name for path in (tmp_path / "remote" / "a").iterdir()] == ["b.bin"]
    assert store.read("a/b.bin") == b"x"
    assert (tmp_path / "file.tmp").read_bytes() == b"x"


def test_urls_choose_the_store() -> None:
    local, s3 = open_storage("file:///data/x"), open_storage("s3://bucket/some/prefix/")
    assert isinstance(local, LocalStorage)
    assert local.folder == Path("/data/x")
    assert isinstance(s3, S3Storage)
    assert (s3.bucket, s3.prefix) == ("bucket", "some/prefix")
    with pytest.raises(StorageError, match="names no bucket"):
        open_storage("s3:///prefix")


@pytest.mark.usefixtures("s3")
def test_a_missing_bucket_is_one_line_of_a_command() -> None:
    result = run_cli("plan", "s3://no-such-bucket/x", "--packing-length", "10")
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "error: s3://no-such-bucket/x/index.json: bucket 'no-such-bucket' does not exist: create it or correct the URL"
    ]


@pytest.fixture
def strict_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An S3 server that checks credentials, with none that are valid."""
    monkeypatch.setenv("INITIAL_NO_AUTH_ACTION_COUNT", "0")
    with moto_server() as url:
        monkeypatch.setenv("S3_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        yield


@pytest.mark.usefixtures("strict_s3")
def test_wrong_credentials_are_one_line_with_the_remedy() -> None:
    result = run_cli("plan", "s3://some-bucket/x", "--packing-length", "10")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: s3://some-bucket/x/index.json: the credentials are refused (InvalidAccessKeyId)")
    assert "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY" in line


def test_missing_credentials_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with pytest.raises(StorageError, match="no AWS credentials were found: set AWS_ACCESS_KEY_ID"):
        open_storage("s3://bucket", retry=Retry(timeout_s=2)).read("x")


def test_errors_share_one_base() -> None:
    from lmms_stream.errors import LmmsStreamError

    for error in (ConfigError, LengthsError, StorageError, ObjectMissingError):
        assert issubclass(error, LmmsStreamError)


def test_sessions_share_what_they_parse_and_find_credentials_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    sessions = []
    for key in ("one", "two", "three"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        sessions.append(_new_session())
        assert sessions[-1].get_credentials().access_key == key
    (loader,) = {session._session.get_component("data_loader") for session in sessions}
    assert len(loader.search_paths) == len(set(loader.search_paths))
    assert callable(sessions[1].client("s3", region_name="us-east-1").upload_file)  # boto3's own


def test_writes_of_one_key_at_once_do_not_mix(tmp_path: Path) -> None:
    """As of two nodes that share a folder, whose processes have the same number."""
    storage = FolderStorage(tmp_path)

    def write_long(temporary: Path) -> None:
        temporary.write_bytes(b"one")
        storage.write("data", b"other")
        assert temporary.read_bytes() == b"one"

    storage.write_with("data", write_long)
    assert storage.read("data") == b"one"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
