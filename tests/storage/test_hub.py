"""Datasets of the Hugging Face hub, read from a server on this machine that answers as the hub does."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import copytree
from typing import Any
from urllib.parse import urlsplit

import pytest
from lmms_stream.storage.locks import folder_beside, remove_leftovers, temporary_name

from ..conftest import write_tokens
from ..processes import ENVIRONMENT

FILES, API = "/datasets/org/", "/api/datasets/org/"


class Hub(BaseHTTPRequestHandler):
    """Files of datasets of the hub; what is missing has the hub's error code. folder: of folders of datasets.

    A dataset has a folder for each revision.
    """

    def __init__(self, folder: Path, *arguments: Any):
        self.folder = folder
        super().__init__(*arguments)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_POST(self) -> None:
        """A commit, for which the hub is first asked which files go to the store of large files: none here."""
        said = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            url = f"https://huggingface.co/datasets/{json.loads(said)['organization']}/{json.loads(said)['name']}"
            return self._send(200, {}, json.dumps({"url": url}).encode())
        if self.path == "/api/validate-yaml":  # of a card
            return self._send(200, {}, json.dumps({"errors": [], "warnings": []}).encode())
        kind, folder, _ = self._asked()
        if kind == "preupload":
            files = [{**each, "uploadMode": "regular", "shouldIgnore": False} for each in json.loads(said)["files"]]
            return self._send(200, {}, json.dumps({"files": files}).encode())
        for line in map(json.loads, said.splitlines()):
            path = folder / line["value"].get("path", "")
            if line["key"] == "file":
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(base64.b64decode(line["value"]["content"]))
            elif line["key"] == "deletedFile":
                if not path.is_file():
                    return self._send(404, {"X-Error-Code": "EntryNotFound"}, b"")
                path.unlink()
        commit = {"commitUrl": f"https://huggingface.co{FILES}name/commit/{0:040}", "commitOid": "0" * 40}
        self._send(200, {}, json.dumps(commit).encode())

    def _asked(self) -> tuple[str, Path, str]:
        """What is asked for, the folder of its revision, and a path in it."""
        path = urlsplit(self.path).path
        name, kind, revision, *rest = path.removeprefix(API).removeprefix(FILES).split("/", 3)
        return kind, self.folder / name / revision, "".join(rest)

    def _tree(self, root: Path, path: str) -> bytes:
        """What the hub says of all files below a folder."""
        files = [
            {"type": "file", "oid": "0" * 40, "path": path.relative_to(root).as_posix(), "size": len(data),
             "lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 9}}
            for path in sorted((root / path).rglob("*")) if path.is_file() for data in [path.read_bytes()]
        ]  # fmt: skip
        return json.dumps(files).encode() if files else b""

    def _answer(self, *, with_body: bool) -> None:
        names = [path.name for path in self.folder.iterdir()]
        if not self.path.startswith(tuple(f"{start}{name}/" for start in (API, FILES) for name in names)):
            return self._send(404, {"X-Error-Code": "RepoNotFound"}, b"")
        kind, folder, name = self._asked()
        path = folder / name
        data = self._tree(folder, name) if kind == "tree" else path.read_bytes() if path.is_file() else b""
        if not folder.is_dir():
            return self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"")
        if not data:
            return self._send(404, {"X-Error-Code": "EntryNotFound"}, b"")
        facts = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": "0" * 40}
        self._send(200, facts, data, with_body=with_body)

    def _send(self, code: int, headers: dict[str, str], data: bytes, *, with_body: bool = True) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
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


AGAIN = """
import shutil
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream import MDSWriter

folder, cache = f"{root}/hub/again/main", f"{root}/cache-again"
for values, num_misses in (([1, 2, 3], 1), ([1, 2, 3], 0), ([4, 5, 6], 1)):
    shutil.rmtree(folder, ignore_errors=True)
    with MDSWriter(columns={"x": "int"}, out=folder) as writer:
        for value in values:
            writer.write({"x": value})
    dataset = PackedStreamingDataset("hf://datasets/org/again", cache, fetch=FetchConfig(attempts=2, timeout_s=30))
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
READ = """
sys.modules["streaming"] = None  # MosaicML's package is not needed
from lmms_stream.errors import StorageError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.storage.fetch_config import FetchConfig

def opened(url):
    return PackedStreamingDataset(url, f"{root}/cache-read", fetch=FetchConfig(attempts=2, timeout_s=30))

dataset = opened("hf://datasets/org/read")
assert [sample["input_ids"][0] for sample in dataset[:]] == list(range(30))
for url, text in (
    ("hf://datasets/org/read/absent", "holds no dataset (index.json is missing)"),
    ("hf://datasets/org/other", "the hub knows no such repository, or does not show it to you"),
):
    try:
        opened(url)
    except StorageError as error:
        assert text in str(error), error
    else:
        raise AssertionError(url)
del sys.modules["streaming"]
"""
WRITTEN = """
from lmms_stream import MDSWriter, StreamingDataset
from lmms_stream.errors import StorageError

local = f"{root}/local"
for url, values in (("hf://datasets/org/written", [1, 2]), ("hf://datasets/org/written@v2/part", [3, 4, 5])):
    with MDSWriter(columns={"x": "int"}, out=url) as writer:
        for value in values:
            writer.write({"x": value})
for url, values in (
    ("hf://datasets/org/written", [1, 2]), ("hf://datasets/org/written@main", [1, 2]),
    ("hf://datasets/org/written@v2/part", [3, 4, 5]),
):
    dataset = StreamingDataset(remote=url, local=local + url.replace("/", "-"), batch_size=1)
    assert [sample["x"] for sample in dataset] == values, url
with MDSWriter(columns={"x": "int"}, out="hf://datasets/org/written", exist_ok=True) as writer:
    writer.write({"x": 6})
dataset = StreamingDataset(remote="hf://datasets/org/written", local=local + "again", batch_size=1)
assert [sample["x"] for sample in dataset] == [6]
for url in ("hf://datasets/org/written@v3", "hf://datasets/org/written@v3/part"):
    for use in (lambda: StreamingDataset(remote=url, batch_size=1), lambda: MDSWriter(columns={"x": "int"}, out=url)):
        try:
            use()
        except StorageError as error:
            assert "the repository has no such revision: check what follows the @ in the URL" in str(error), error
        else:
            raise AssertionError(url)
"""
PUSHED = """
from lmms_stream import StreamingDataset
from lmms_stream.doors.huggingface.stored import push_to_hub

url = push_to_hub(f"{root}/made", "org/pushed", token="hf_token")
dataset = StreamingDataset(remote=url, local=f"{root}/cache-pushed", batch_size=1)
assert [sample["input_ids"][0] for sample in dataset] == list(range(30))
"""
SCRIPTS = {"again": AGAIN, "read": READ, "written": WRITTEN, "pushed": PUSHED}  # in this order: streaming comes later
ALL = """
import json
import sys
import traceback

root = sys.argv[1]
for name, script in json.loads(sys.stdin.read()).items():
    try:
        exec(compile(script, name, "exec"), {"root": root, "sys": sys})
        print(name)
    except BaseException:
        print(f"{name}:", file=sys.stderr)
        traceback.print_exc()
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose folder `hub` is served."""
    root = tmp_path_factory.mktemp("root")
    for dataset in ("again", "read", "pushed"):
        (root / "hub" / dataset / "main").mkdir(parents=True)
    write_tokens(root / "made", num_samples=30)
    write_tokens(root / "plain", num_samples=30, with_index=False)
    copytree(root / "plain", root / "hub" / "read" / "main", dirs_exist_ok=True)
    for revision in ("main", "v2"):
        (root / "hub" / "written" / revision).mkdir(parents=True)
        (root / "hub" / "written" / revision / ".gitattributes").write_text("*.mds filter=lfs")
    return root


@pytest.fixture(scope="module")
def done(root: Path) -> subprocess.CompletedProcess[str]:
    """All scripts, in an interpreter whose library of the hub knows only the server."""
    with hub(root / "hub") as endpoint:
        environment = {"HF_HOME": str(root / "home"), "HF_TOKEN": "hf_of_this_test", "HF_ENDPOINT": endpoint}
        return subprocess.run(
            [sys.executable, "-c", ALL, str(root)], input=json.dumps(SCRIPTS), capture_output=True, text=True,
            timeout=240, env=os.environ | ENVIRONMENT | environment, check=False,
        )  # fmt: skip


def test_a_dataset_of_the_hub_that_mdswriter_wrote_is_read(done: subprocess.CompletedProcess[str]) -> None:
    assert "read" in done.stdout.split(), done.stderr


def test_a_dataset_of_the_hub_that_was_written_again_at_the_same_size_gives_its_new_samples(
    done: subprocess.CompletedProcess[str],
) -> None:
    """Without checksums in its index, as MDSWriter writes it: the hub's entity tags tell."""
    assert "again" in done.stdout.split(), done.stderr


def test_revisions_of_a_dataset_of_the_hub_are_written_and_read(done: subprocess.CompletedProcess[str]) -> None:
    assert "written" in done.stdout.split(), done.stderr


def test_a_dataset_is_pushed_with_a_card_and_read_from_the_hub(
    root: Path, done: subprocess.CompletedProcess[str]
) -> None:
    assert "pushed" in done.stdout.split(), done.stderr
    card = (root / "hub" / "pushed" / "main" / "README.md").read_text()
    assert card.startswith("---\nsize_categories:\n- n<1K\n")
    assert "30 samples in 1 MDS shards." in card
    assert "| `input_ids` | ndarray:int32 |" in card


def test_what_a_killed_download_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "shard.00000.mds"
    for temporary in (temporary_name(path), temporary_name(path)):
        folder = folder_beside(temporary)
        folder.mkdir()
        (folder / "part").write_bytes(b"x")
    (tmp_path / "other").write_bytes(b"y")
    remove_leftovers(path)
    assert [each.name for each in tmp_path.iterdir()] == ["other"]
