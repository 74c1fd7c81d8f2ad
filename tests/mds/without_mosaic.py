"""What a machine without MosaicML's package does; see test_without_mosaic.py."""

from __future__ import annotations

import io
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from lmms_stream import (
    PackedLoader,
    PackedStreamingDataset,
    PackingConfig,
    Stream,
    StreamingDataLoader,
    StreamingDataset,
    TextProcessor,
)
from lmms_stream.__main__ import main as command
from lmms_stream.errors import ConfigError, StorageError
from lmms_stream.storage.storage import open_storage
from PIL import Image
from torch.utils.data import IterableDataset

NUM_ROWS = 40
COLUMNS = ["number", "scores:ndarray:float32", "picture:png", "picture_bytes:bytes", "about:json", "price:str_decimal"]


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 3), (number, 0, 255)).save(file, "PNG")
    return file.getvalue()


def write_rows(path: Path) -> None:
    numbers = range(NUM_ROWS)
    rows = {
        "text": [f"pack {number} " * 9 for number in numbers],
        "number": [*numbers],
        "scores": [[number / 4, 1.0] for number in numbers],
        "picture": [png(number) for number in numbers],
        "picture_bytes": [png(number) for number in numbers],
        "about": [[number, None] for number in numbers],
        "price": [f"{number}.10" for number in numbers],
    }
    pyarrow.parquet.write_table(pa.table(rows), path)


def use_commands(tokenizer: str, folder: Path, url: str) -> None:
    write_rows(folder / "rows.parquet")
    kept = [word for column in COLUMNS for word in ("--keep", column)]
    asked = ["--kind", "text", "--tokenizer", tokenizer, "--workers", "1", "--shard-size", "4kb"]
    assert command(["convert", str(folder / "rows.parquet"), url, *asked, *kept, "--compression", "zstd"]) == 0
    assert command(["verify", url, "--deep", "--tokenizer", tokenizer]) == 0
    assert command(["inspect", url]) == 0
    assert command(["plan", url, "--packing-length", "128"]) == 0
    assert command(["unload", url, str(folder / "again"), "--format", "jsonl"]) == 0


def numbers(samples: Any) -> list[int]:
    return [int(sample["number"]) for sample in samples]


def read_samples(dataset: PackedStreamingDataset) -> None:
    assert isinstance(dataset, IterableDataset)
    assert len(dataset) == dataset.size == len(dataset[:]) == NUM_ROWS
    sample = dataset[-1]
    assert sample["picture"].getpixel((0, 0)) == (NUM_ROWS - 1, 0, 255)
    assert sample["picture_bytes"] == png(NUM_ROWS - 1)
    assert sample["scores"].tolist() == [(NUM_ROWS - 1) / 4, 1.0]
    assert numbers(dataset[[3, np.int64(-1)]]) == numbers(dataset[np.array([3, 39])]) == [3, 39]
    assert numbers(dataset.shards[1][:1]) == numbers([dataset[int(dataset.sample_offset_per_shard[1])]])
    assert dataset.spanner[NUM_ROWS - 1] == (dataset.num_shards - 1, len(dataset.shards[-1]) - 1)


def as_tensor(samples: Any) -> torch.Tensor:
    return torch.tensor(numbers(samples))


def read_on(dataset: StreamingDataset) -> None:
    """All of an epoch, and its second half from a state, in workers."""
    settings: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "collate_fn": as_tensor, "timeout": 60}
    loader = StreamingDataLoader(dataset, **settings)
    whole: list[list[int]] = []
    state: dict[str, Any] = {}
    for batch in loader:
        whole.append(batch.tolist())
        state = (loader.state_dict() or {}) if len(whole) == 5 else state
    assert sorted(chain(*whole)) == list(range(NUM_ROWS))
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == whole[5:]


def read_packs(dataset: PackedStreamingDataset) -> None:
    loader = PackedLoader(dataset, global_batch=2, num_workers=2)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = loader.state_dict()
    rest = [batch.input_ids for batch in batches]
    loader = PackedLoader(dataset, global_batch=2, num_workers=2)
    loader.load_state_dict(state)
    again = [batch.input_ids for batch in loader]
    assert len(again) == len(rest) > 1
    assert all(map(torch.equal, again, rest))


class Own(Stream):
    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        raise AssertionError


def refusals(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"stream_name 'other' is registered with MosaicML's package, which is not imported"
    ):
        StreamingDataset(remote=url, stream_name="other")
    with pytest.raises(ConfigError, match=r"Own\._download_file is a way to fetch of MosaicML's streams: derive"):
        StreamingDataset(streams=[Own(remote=url)])
    with pytest.raises(
        StorageError,
        match=r"oci:// is read and written by MosaicML's .*: pip install 'lmms-stream\[mosaicml\]'.*; "
        "or write s3://BUCKET/PREFIX and set S3_ENDPOINT_URL=",
    ):
        open_storage("oci://bucket/name").stat("index.json")


def do_all(tokenizer: str, folder: Path, url: str) -> None:
    use_commands(tokenizer, folder, url)
    packing = PackingConfig(packing_length=128, overlong="drop")
    processor = TextProcessor.from_pretrained(tokenizer)
    packed = PackedStreamingDataset(url, folder / "copies", processor=processor, packing=packing, batch_size=4)
    read_samples(packed)
    read_on(packed)
    read_packs(packed)
    streams = [Stream(remote=url, local=folder / name, proportion=0.5) for name in ("a", "b")]
    shared = StreamingDataset(streams=streams, shuffle_algo="blocks", shuffle=True, batch_size=4, epoch_size="0.02k")
    assert [(stream.choose, stream.proportion, stream.repeat) for stream in shared.streams] == [(10, 0.5, 0.25)] * 2
    assert len(numbers(shared)) == 20
    read_on(StreamingDataset(remote=url, local=folder / "copies", shuffle=True, batch_size=4))
    refusals(url)
    assert not [name for name in sys.modules if name.startswith("streaming.")]
