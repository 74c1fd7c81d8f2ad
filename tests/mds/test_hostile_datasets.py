"""Datasets that are made to do harm: refused by name, in bounded memory, with nothing written elsewhere."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from lmms_stream.errors import ShardError, StorageError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.storage.storage import open_storage

from ..proxy import FaultProxy
from ..rounds import rounds
from .reading import MARKS, SHARD, Delivered, Reading, read_by, temporary_files

pytestmark = MARKS


def changed_index(dataset_folder: Path, key: str, value: Any) -> bytes:
    """index.json with another value at a key, as "raw_data.bytes", of its first shard."""
    index = json.loads((dataset_folder / "index.json").read_bytes())
    *parents, last = key.split(".")
    target = index["shards"][0]
    for parent in parents:
        target = target[parent]
    target[last] = value
    return json.dumps(index).encode()


HOSTILE_NAMES = {
    "traversal": "../shard.00001.mds",
    "deep traversal": "../../../../tmp/x",
    "absolute": "/tmp/lmms-hostile-shard",
    "in a folder above": "a/../../shard.mds",
    "in a hidden folder": ".a/shard.mds",
    "in a folder of ours": "_lmms/shard.mds",
    "in a folder without a name": "a//shard.mds",
    "parent": "..",
    "itself": ".",
    "empty": "",
    "backslash": "..\\shard.mds",
    "NUL": "shard\x00.mds",
    "newline": "shard\n.mds",
    "hidden": ".x",
    "a lock's": ".shard.00001.mds.lock",
    "twice": "shard.00001.mds",
    "the index's": "index.json",
    "too long": "x" * 300,
    "a number": 7,
    "nothing": None,
    "a list": ["shard.mds"],
}
HOSTILE_NUMBERS = {
    "negative": -1,
    "huge": 10**30,
    "over 4 GiB": 1 << 32,
    "boolean": True,
    "float": 64.0,
    "string": "64",
    "infinite": float("inf"),
    "nothing": None,
    "a list": [64],
}
HOSTILE_INDEXES = [
    *[("raw_data.basename", name, repr(name)) for name in HOSTILE_NAMES.values()],
    *[("raw_data.bytes", number, repr(number)) for number in HOSTILE_NUMBERS.values()],
    *[("samples", number, repr(number)) for number in HOSTILE_NUMBERS.values()],
    *[("column_sizes", [number, None], repr(number)) for number in HOSTILE_NUMBERS.values() if number is not None],
    ("samples", (1 << 32) - 1, str((1 << 32) - 1)),
    ("column_names", ["messages"], "column"),
    ("column_encodings", ["str", "bytes", "str"], "column"),
    ("column_sizes", [None], "column"),
    ("column_encodings", ["str", "pkl"], "pkl|pickled"),
    ("column_encodings", ["str", "ndarray:object"], "object"),
    ("column_encodings", ["str", "shell"], "'shell'"),
    ("column_encodings", ["str", 7], "7"),
    ("compression", "lzma9", "'lzma9'"),
    ("compression", ["zstd"], "zstd"),
    ("zip_data", {"basename": "../x", "bytes": 100, "hashes": {}}, "'../x'"),
    ("zip_data", {"basename": "x", "bytes": -1, "hashes": {}}, "-1"),
    ("format", "parquet", "'parquet'"),
    ("raw_data", [], "not a valid MDS index"),
]
HOSTILE_IDS = [
    *[f"name: {name}" for name in HOSTILE_NAMES],
    *[f"bytes: {name}" for name in HOSTILE_NUMBERS],
    *[f"samples: {name}" for name in HOSTILE_NUMBERS],
    *[f"column size: {name}" for name, number in HOSTILE_NUMBERS.items() if number is not None],
]


@contextmanager
def nothing_is_written_outside(folder: Path) -> Iterator[None]:
    """Below the folder's parent, and at the absolute names that hostile indexes give."""
    before = set(folder.parent.rglob("*"))
    yield
    changed = set(folder.parent.rglob("*")) - before
    assert all(path.is_relative_to(folder) for path in changed)
    assert not Path("/tmp/lmms-hostile-shard").exists()


@pytest.mark.parametrize(
    ("key", "value", "named", "is_stored"),
    [(*case, rounds(number < len(HOSTILE_NAMES), True)) for number, case in enumerate(HOSTILE_INDEXES)],
    ids=[*HOSTILE_IDS, *[f"{case[0]}-{number}" for number, case in enumerate(HOSTILE_INDEXES)][len(HOSTILE_IDS) :]],
)
def test_a_hostile_index_is_refused_before_anything_is_fetched(
    key: str, value: Any, named: str, is_stored: bool, reading: Reading, dataset_folder: Path, s3: str,
    proxy: FaultProxy, tmp_path: Path,
) -> None:  # fmt: skip
    """In a store; in short rounds some are in a folder."""
    if (key, value) == ("samples", (1 << 32) - 1):  # in a shard of 8 bytes
        index = json.loads(changed_index(dataset_folder, key, value))
        index["shards"][0]["raw_data"]["bytes"] = 8
        data = json.dumps(index).encode()
    else:
        data = changed_index(dataset_folder, key, value)
    remote = f"{s3}/hostile-index" if is_stored else str(tmp_path / "index")
    open_storage(remote).write("index.json", data)
    pattern = named if "|" in named else re.escape(named)
    growth = PeakMemory()
    with nothing_is_written_outside(reading.cache), pytest.raises(ShardError, match=pattern) as caught:
        replace(reading, remote=remote).deliver()
    assert "index.json" in str(caught.value)
    assert growth.num_bytes() < 100 << 20
    assert proxy.traffic().num_requests("GET", "shard") == 0


LONG = b'{"x": "' + b"x" * (1 << 20) + b'", "shards": [' + b"[" * 9000 + b"]" * 9000 + b"]}"  # read by parts


@pytest.mark.parametrize(
    "data",
    [b"[" * 200_000, b'{"version": 2, "shards": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", b'{"a":' * 200_000, LONG],
    ids=["open", "inside", "objects", "long"],
)
def test_an_index_that_is_nested_too_deeply_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(data)
    with pytest.raises(ShardError, match=r"index\.json: not a valid MDS index"):
        PackedStreamingDataset(tmp_path)


class PeakMemory:
    """How far this process's memory has grown since, at its highest."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the highest is forgotten (man 5 proc)
        self._before = self._status("VmRSS")

    def num_bytes(self) -> int:
        return self._status("VmHWM") - self._before

    @staticmethod
    def _status(name: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) << 10


def write_hostile_shard(dataset_folder: Path, folder: Path, change: Callable[[bytearray], None]) -> str:
    """A local dataset whose index vouches for a changed shard."""
    shutil.copytree(dataset_folder, folder)
    data = bytearray((folder / SHARD).read_bytes())
    change(data)
    (folder / SHARD).write_bytes(data)
    digest = xxhash.xxh3_64_hexdigest(data)
    for name in ("index.json", "_lmms/dataset.json"):
        described = json.loads((folder / name).read_bytes())
        entry = described["shards"][2]
        if name == "index.json":
            entry["raw_data"] |= {"bytes": len(data), "hashes": {"xxh3_64": digest}}
        else:
            entry |= {"size": len(data), "xxh3_64": digest}
        (folder / name).write_text(json.dumps(described))
    return str(folder)


def put(data: bytearray, index: int, value: int) -> None:
    """Write a 32-bit word."""
    struct.pack_into("<I", data, 4 * index, value)


def word(data: bytearray, index: int) -> int:
    value: int = struct.unpack_from("<I", data, 4 * index)[0]
    return value


def other_count(data: bytearray) -> None:
    put(data, 0, word(data, 0) - 1)


def huge_count(data: bytearray) -> None:
    put(data, 0, (1 << 32) - 1)


def descending_offsets(data: bytearray) -> None:
    put(data, 5, word(data, 4) - 1)


def samples_in_the_header(data: bytearray) -> None:
    put(data, 1, 8)


def offset_behind_the_end(data: bytearray) -> None:
    put(data, 1 + word(data, 0), len(data) + 1)


def every_offset_behind_the_end(data: bytearray) -> None:
    for index in range(1, 2 + word(data, 0)):
        put(data, index, (1 << 32) - 1)


def huge_column(data: bytearray) -> None:
    struct.pack_into("<I", data, word(data, 3), (1 << 32) - 1)


def unfilled_sample(data: bytearray) -> None:
    at = word(data, 3) + 4  # the size of the second column
    struct.pack_into("<I", data, at, struct.unpack_from("<I", data, at)[0] - 1)


def bad_utf8(data: bytearray) -> None:
    at = word(data, 3)
    (size,) = struct.unpack_from("<I", data, at + 4)
    data[at + 8 + size // 2 :] = b"\xff" * len(data[at + 8 + size // 2 :])


def cut_in_the_offsets(data: bytearray) -> None:
    del data[12:]


HOSTILE_SHARDS = {
    change.__name__: change
    for change in (
        other_count,
        huge_count,
        descending_offsets,
        samples_in_the_header,
        offset_behind_the_end,
        every_offset_behind_the_end,
        huge_column,
        unfilled_sample,
        bad_utf8,
        cut_in_the_offsets,
    )
}


@pytest.mark.parametrize(
    ("change", "num_workers"), read_by(HOSTILE_SHARDS, in_workers=("huge_count", "huge_column", "bad_utf8"))
)
def test_a_hostile_shard_that_its_index_vouches_for_is_an_error_that_names_it(
    change: Callable[[bytearray], None],
    num_workers: int,
    dataset_folder: Path,
    chat_processor: ChatProcessor,
    tmp_path: Path,
    expected: Delivered,
) -> None:
    remote = write_hostile_shard(dataset_folder, tmp_path / "hostile", change)
    reading = Reading(remote=remote, local=tmp_path / "cache", processor=chat_processor, num_workers=num_workers)
    growth = PeakMemory()
    with pytest.raises(ShardError) as caught:
        reading.deliver()
    assert SHARD in str(caught.value) or "index.json" in str(caught.value)
    assert growth.num_bytes() < 100 << 20


def compress(algorithm: str, data: bytes) -> bytes:
    from streaming.base.compression import compress as compress_as_the_writer_does

    return bytes(compress_as_the_writer_does(algorithm, data))


@pytest.mark.parametrize("algorithm", ["zstd:1", "gz:6", "br:5", "bz2:9", "snappy"])
def test_a_compressed_shard_that_holds_far_more_than_its_index_says_is_refused(
    algorithm: str, dataset_folder: Path, chat_processor: ChatProcessor, tmp_path: Path
) -> None:
    remote = tmp_path / "bomb"
    shutil.copytree(dataset_folder, remote)
    (remote / SHARD).unlink()
    bomb = compress(algorithm, bytes(128 << 20))  # more than the limit of growth below
    (remote / f"{SHARD}.bomb").write_bytes(bomb)
    index = json.loads((remote / "index.json").read_bytes())
    hashes = {"xxh3_64": xxhash.xxh3_64_hexdigest(bomb)}
    index["shards"][2] |= {
        "compression": algorithm,
        "zip_data": {"basename": f"{SHARD}.bomb", "bytes": len(bomb), "hashes": hashes},
    }
    (remote / "index.json").write_text(json.dumps(index))
    reading = Reading(
        remote=str(remote), local=tmp_path / "cache", processor=chat_processor, fetch=FetchConfig(attempts=2)
    )
    growth = PeakMemory()
    with pytest.raises((ShardError, StorageError), match=re.escape(SHARD)):
        reading.deliver()
    assert growth.num_bytes() < 100 << 20
    assert not (tmp_path / "cache" / SHARD).exists()
    # Another thread may be at another shard.
    assert [path for path in temporary_files(tmp_path / "cache") if SHARD in path.name] == []
