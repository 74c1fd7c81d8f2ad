"""Datasets of a plain MDSWriter, with a lengths index beside them; and datasets that cannot be written to."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from lmms_stream.errors import LengthsError, StorageError
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.core import PackCountsFolder
from lmms_stream.mds.lengths import LengthIndex, how_to_index
from lmms_stream.mds.measuring import index_dataset
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.storage import open_storage
from streaming import MDSWriter

from ..conftest import run_cli, write_tokens

CHAT = '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]'


def test_a_plain_dataset_is_planned_once_it_is_indexed(tmp_path: Path) -> None:
    lengths = write_tokens(tmp_path / "data", num_samples=50, with_index=False)
    with pytest.raises(LengthsError, match="lists no lengths index: write one with lmms-stream index"):
        PackedStreamingDataset(tmp_path / "data").length_index()
    index_dataset(str(tmp_path / "data"), TokensProcessor(), num_workers=1)
    assert np.array_equal(PackedStreamingDataset(tmp_path / "data").length_index().lengths, lengths)
    result = run_cli("plan", str(tmp_path / "data"), "--packing-length", "256", "--json")
    assert result.returncode == 0, result.stderr


ROWS: dict[str, tuple[dict[str, str], dict[str, object], str]] = {
    "chats": ({"messages": "str", "media": "bytes"}, {"messages": CHAT, "media": b"[]"}, "index {} --tokenizer …"),
    "texts": ({"text": "str"}, {"text": "some words"}, "index {} --tokenizer …"),
    "ids": ({"input_ids": "ndarray:int64", "loss_spans": "ndarray:int64"},
            {"input_ids": np.arange(9), "loss_spans": np.array([[0, 9]])}, "index {}"),
    "questions": ({"question": "str", "answer": "str"}, {"question": "What is it?", "answer": "A pack."},
                  "convert {} TARGET --kind question-answer --tokenizer …"),
    "tokens": ({"tokens": "ndarray:int64"}, {"tokens": np.arange(9)},
               "convert {} TARGET --kind tokens --columns input_ids=tokens --processor tokens"),
    "bytes of tokens": ({"tokens": "bytes"}, {"tokens": np.arange(9).tobytes()},
                        "convert {} TARGET --kind tokens --columns input_ids=tokens --processor tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_the_command_that_plan_names_for_a_dataset_without_an_index_writes_one(
    name: str, tmp_path: Path, tokenizer: Path
) -> None:
    columns, row, command = ROWS[name]
    with MDSWriter(columns=columns, out=str(tmp_path / "data")) as writer:
        writer.write(row)
    plan = ("--packing-length", "256", "--json")
    refused = run_cli("plan", "data", *plan, cwd=tmp_path)
    named = f"lmms-stream {command.format('data')}"
    assert refused.stderr.endswith(f"{named}\n")
    words = [str(tokenizer) if word == "…" else word for word in named.split()[1:]]
    done = run_cli(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    planned = run_cli("plan", "TARGET" if "TARGET" in words else "data", *plan, cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr


def test_a_dataset_with_unknown_columns_is_to_be_converted() -> None:
    assert how_to_index("data", ["number"]).endswith("lmms-stream convert data TARGET --kind KIND --tokenizer …")


def test_of_several_indexes_of_a_plain_local_dataset_the_one_written_last_counts(tmp_path: Path) -> None:
    lengths = write_tokens(tmp_path / "data", num_samples=50)
    for fingerprint, added in (("b" * 32, 1), ("a" * 32, 2)):
        names = LengthIndex.from_array(lengths + added, fingerprint=fingerprint).write(tmp_path / "data")
        os.utime(tmp_path / "data" / names[1], ns=(0, 2**62 + added))
    assert PackedStreamingDataset(tmp_path / "data").length_index().fingerprint == "a" * 32


def test_the_index_of_a_plain_dataset_in_a_store_is_found_and_of_several_none_is_guessed(
    s3_folder: str, tmp_path: Path
) -> None:
    lengths = write_tokens(tmp_path / "data", num_samples=50)
    storage = open_storage(s3_folder)
    for path in tmp_path.rglob("*.*"):
        if path.is_file():
            storage.upload(path, path.relative_to(tmp_path / "data").as_posix())
    dataset = PackedStreamingDataset(s3_folder, tmp_path / "cache")
    assert np.array_equal(dataset.length_index().lengths, lengths)
    for name in LengthIndex.from_array(lengths, fingerprint="a" * 32).write(tmp_path):
        storage.upload(tmp_path / name, name)
    with pytest.raises(LengthsError, match=rf"several lengths indexes \(.*{'a' * 32}.*\): pass the processor"):
        dataset.length_index()


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nothing be written to a folder: by a mount, or by its rights where this user may not mount."""
    mount = ["mount", "--bind", "-o", "ro", str(folder), str(folder)]
    is_mounted = (
        shutil.which("mount") is not None and subprocess.run(mount, capture_output=True, timeout=10).returncode == 0
    )
    folders = [] if is_mounted else [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for each in folders:
        each.chmod(0o555)
    try:
        yield
    finally:
        for each in folders:
            each.chmod(0o755)
        if is_mounted:
            subprocess.run(["umount", str(folder)], check=True, timeout=10)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_read_only_dataset_is_packed_where_it_lies(
    compression: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    write_tokens(tmp_path / "data", num_samples=50, compression=compression)

    def batches() -> list[list[int]]:
        dataset = PackedStreamingDataset(
            local=tmp_path / "data", processor=TokensProcessor(), packing=PackingConfig(packing_length=256)
        )
        return [batch.sample_ids.tolist() for batch in PackedLoader(dataset, global_batch=2)]

    before = sorted((tmp_path / "data").rglob("*"))
    with read_only(tmp_path / "data"):
        found = batches()
        assert sorted((tmp_path / "data").rglob("*")) == before
    assert batches() == found
    assert sorted(sample_id for batch in found for sample_id in batch) == list(range(50))


def test_counts_that_cannot_be_written_are_an_error_that_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with (
        read_only(tmp_path / "data"),
        pytest.raises(StorageError, match=rf"{re.escape(str(tmp_path / 'data' / 'counts'))}.*: check the path"),
    ):
        PackCountsFolder(tmp_path / "data" / "counts")["plan-0"] = np.array([[3, 10, 0]])


@pytest.mark.parametrize("algorithm", ["packs", "samples"])
def test_a_whole_cache_that_cannot_be_written_is_read_also_after_a_restart_of_the_machine(
    algorithm: str, s3_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    write_tokens(tmp_path / "data", num_samples=50)
    storage, cache = open_storage(s3_folder), tmp_path / "cache"
    for path in [path for path in (tmp_path / "data").rglob("*") if path.is_file()]:
        storage.upload(path, path.relative_to(tmp_path / "data").as_posix())

    def read() -> tuple[list[list[int]], int]:
        packing = PackingConfig(packing_length=256) if algorithm == "packs" else None
        processor = TokensProcessor() if packing else None
        dataset = PackedStreamingDataset(s3_folder, cache, processor=processor, packing=packing)
        samples = [sample["input_ids"].tolist() for sample in dataset[:]]
        if packing:
            samples += [batch.input_ids.tolist() for batch in PackedLoader(dataset, global_batch=1)]
        return samples, dataset.core.one.cache.tally.total.misses

    expected, num_misses = read()
    assert num_misses > 0
    for path in cache.rglob(".*.lock"):
        with suppress(ValueError):
            record = json.loads(path.read_bytes())
            path.write_bytes(json.dumps(record | {"boot": "of another start"}).encode().ljust(1024))
    with read_only(cache):
        assert read() == (expected, 0)
    shard = next(cache.glob("shard.*.mds"))
    shard.write_bytes(shard.read_bytes()[::-1])
    with (
        read_only(cache),
        pytest.raises(StorageError, match="its folder is not writable: name another folder as local, or make"),
    ):
        read()
