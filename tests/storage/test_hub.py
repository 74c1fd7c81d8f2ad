"""Datasets of the Hugging Face hub, read from a server on this machine that answers as the hub does."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from lmms_stream.storage.temporaries import folder_beside, remove_leftovers, temporary_name

from ..conftest import run_command, write_tokens

PREFIX = "/datasets/org/name/resolve/main/"
TREE = "/api/datasets/org/name/tree/main"


class Hub(BaseHTTPRequestHandler):
    """Files of one dataset of the hub; what is missing has the hub's error code."""

    def __init__(self, folder: Path, *arguments: Any):
        self.folder = folder
        super().__init__(*arguments)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _tree(self) -> bytes:
        """What the hub says of all files below a folder."""
        folder = urlsplit(self.path).path.removeprefix(TREE).strip("/")
        files = [
            {"type": "file", "oid": "0" * 40, "path": path.relative_to(self.folder).as_posix(), "size": len(data),
             "lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 9}}
            for path in sorted((self.folder / folder).rglob("*")) if path.is_file() for data in [path.read_bytes()]
        ]  # fmt: skip
        return json.dumps(files).encode() if files else b""

    def _answer(self, *, with_body: bool) -> None:
        path = self.folder / self.path.removeprefix(PREFIX)
        is_dataset = self.path.startswith((PREFIX, TREE))
        data = path.read_bytes() if is_dataset and path.is_file() else b""
        data = self._tree() if self.path.startswith(TREE) else data
        self.send_response(200 if data else 404)
        if data:
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", "0" * 40)
        else:
            self.send_header("X-Error-Code", "EntryNotFound" if is_dataset else "RepoNotFound")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


SCRIPT = """
import sys
sys.modules["streaming"] = None  # MosaicML's package is not needed
from lmms_stream.errors import StorageError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.storage.fetch_config import FetchConfig

def opened(url):
    return PackedStreamingDataset(url, sys.argv[1], fetch=FetchConfig(attempts=2, timeout_s=30))

dataset = opened("hf://datasets/org/name")
assert [sample["input_ids"][0] for sample in dataset[:]] == list(range(30))
for url, text in (
    ("hf://datasets/org/name/absent", "holds no dataset (index.json is missing)"),
    ("hf://datasets/org/other", "the hub knows no such repository, or does not show it to you"),
):
    try:
        opened(url)
    except StorageError as error:
        assert text in str(error), error
    else:
        raise AssertionError(url)
"""


def test_a_dataset_of_the_hub_that_mdswriter_wrote_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokens(tmp_path / "data", num_samples=30, with_index=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with hub(tmp_path / "data") as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        result = run_command(sys.executable, "-c", SCRIPT, str(tmp_path / "cache"), timeout_s=80)
    assert result.returncode == 0, result.stderr


AGAIN = """
import shutil, sys
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream import MDSWriter

folder, cache = sys.argv[1:]
for values, num_misses in (([1, 2, 3], 1), ([1, 2, 3], 0), ([4, 5, 6], 1)):
    shutil.rmtree(folder, ignore_errors=True)
    with MDSWriter(columns={"x": "int"}, out=folder) as writer:
        for value in values:
            writer.write({"x": value})
    dataset = PackedStreamingDataset("hf://datasets/org/name", cache, fetch=FetchConfig(attempts=2, timeout_s=30))
    assert [sample["x"] for sample in dataset[:]] == values
    assert dataset.core.one.cache.tally.total.misses == num_misses
facts = dataset.core.storage.stat("index.json")
assert facts.num_bytes > 100
assert len(facts.tag) == 64
assert dataset.core.storage.list_objects("ind") == [facts]
assert [each.key for each in dataset.core.storage.list_objects("")] == ["index.json", "shard.00000.mds"]
assert dataset.core.storage.list_objects("absent/") == []
assert "streaming" not in sys.modules
"""


def test_a_dataset_of_the_hub_that_was_written_again_at_the_same_size_gives_its_new_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checksums in its index, as MDSWriter writes it: the hub's entity tags tell."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with hub(tmp_path / "data") as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        result = run_command(sys.executable, "-c", AGAIN, str(tmp_path / "data"), str(tmp_path / "cache"), timeout_s=80)
    assert result.returncode == 0, result.stderr


def test_what_a_killed_download_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "shard.00000.mds"
    for temporary in (temporary_name(path), temporary_name(path)):
        folder = folder_beside(temporary)
        folder.mkdir()
        (folder / "part").write_bytes(b"x")
    (tmp_path / "other").write_bytes(b"y")
    remove_leftovers(path)
    assert [each.name for each in tmp_path.iterdir()] == ["other"]
