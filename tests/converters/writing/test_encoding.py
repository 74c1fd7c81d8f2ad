from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.converters.options import ConvertOptions
from lmms_stream.converters.writing.encoding import COMPRESSIONS, ShardFormat, check_compression, compress, index_json
from lmms_stream.converters.writing.shards import Output, ShardTask
from lmms_stream.converters.writing.unit_files import PlacedSamples
from lmms_stream.errors import ConfigError, DataError
from streaming import MDSWriter
from streaming.base.compression import compress as streaming_compress
from streaming.base.compression import get_compressions
from streaming.base.format.mds.encodings import mds_encode

from ...strategies import examples

COLUMNS = {
    "text": "str", "media": "bytes", "count": "int", "ids": "ndarray:int32", "score": "float64", "about": "json",
}  # fmt: skip


@st.composite
def samples(draw: st.DrawFn) -> dict[str, Any]:
    shape = draw(st.sampled_from([(1,), (7,), (3, 2), (255,), (256,), (300, 1)]))
    return {
        "text": draw(st.text(max_size=40)),
        "media": draw(st.binary(max_size=400)),
        "count": draw(st.integers(-(1 << 63), (1 << 63) - 1)),
        "ids": np.arange(np.prod(shape), dtype=np.int32).reshape(shape),
        "score": draw(st.floats(allow_nan=False)),
        "about": draw(st.dictionaries(st.text(max_size=4), st.integers(), max_size=2)),
    }


def shards(format: ShardFormat, encoded: Sequence[bytes]) -> list[tuple[int, bytes]]:
    """The samples and the bytes of each shard, as an output cuts them."""
    everything = b"".join(encoded)
    sizes = np.array([len(each) for each in encoded], np.int64)
    rows = np.stack([np.zeros_like(sizes), np.cumsum(sizes) - sizes, sizes, np.arange(len(sizes))], axis=1)
    output = Output(number=0, format=format)
    half = len(rows) // 2
    tasks: list[ShardTask] = [
        *output.add(PlacedSamples(rows[:half], None)), *output.add(PlacedSamples(rows[half:], None)), *output.finish()
    ]  # fmt: skip
    made = []
    for task in tasks:
        body = b"".join(everything[first : first + size] for _, first, size in task.runs.tolist())
        made.append((len(task.sizes), format.shard_head(task.sizes) + body))
    return made


@examples(60)
@given(written=st.lists(samples(), min_size=1, max_size=30), shard_bytes=st.integers(3000, 6000))
def test_shards_are_those_of_mdswriter_byte_for_byte(
    written: list[dict[str, Any]], shard_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("mds")
    with MDSWriter(out=str(folder), columns=COLUMNS, size_limit=shard_bytes, hashes=["xxh3_64"]) as writer:
        for sample in written:
            writer.write(sample)
    format = ShardFormat(COLUMNS, shard_bytes=shard_bytes)
    made = shards(format, [format.encode(sample) for sample in written])
    index = json.loads((folder / "index.json").read_text())
    assert [data for _, data in made] == [
        (folder / shard["raw_data"]["basename"]).read_bytes() for shard in index["shards"]
    ]
    entries = [
        format.index_entry(count, shard["raw_data"], None)
        for (count, _), shard in zip(made, index["shards"], strict=True)
    ]
    assert index_json(entries) == (folder / "index.json").read_bytes()


def test_the_compressions_are_those_of_mosaicml() -> None:
    assert get_compressions() == COMPRESSIONS
    for name in COMPRESSIONS:
        check_compression(name)
    with pytest.raises(ConfigError, match="the compression 'zstd:23' is not one of br, bz2, gz, snappy, zstd"):
        check_compression("zstd:23")


def test_the_format_says_of_compression_what_mdswriter_says(tmp_path: Path) -> None:
    with MDSWriter(
        out=str(tmp_path), columns={"text": "str"}, size_limit=1 << 20, hashes=["xxh3_64"], compression="zstd:5"
    ) as writer:
        writer.write({"text": "word " * 300})
    format = ShardFormat({"text": "str"}, shard_bytes=1 << 20, compression="zstd:5")
    ((count, data),) = shards(format, [format.encode({"text": "word " * 300})])
    entry = json.loads((tmp_path / "index.json").read_text())["shards"][0]
    assert (tmp_path / "shard.00000.mds.zstd").read_bytes() == compress("zstd:5", data)
    assert format.index_entry(count, entry["raw_data"], entry["zip_data"]) == entry


@pytest.mark.parametrize("compression", ["zstd", "gz:3", "gz", "br:2", "snappy", "bz2", "bz2:1"])
def test_files_are_compressed_as_mdswriter_does_it(compression: str) -> None:
    data = b"word " * 1000
    assert compress(compression, data) == streaming_compress(compression, data)


def test_a_sample_larger_than_a_shard_has_one_of_its_own() -> None:
    format = ShardFormat({"text": "str"}, shard_bytes=2000)
    made = shards(format, [format.encode({"text": "x" * size}) for size in (10, 5000, 10, 10)])
    assert [count for count, _ in made] == [1, 1, 2]


@pytest.mark.parametrize(
    ("columns", "sample", "message"),
    [
        ({"text": "str"}, {"text": 5}, "column 'text' holds '5', which is not 'str'"),
        ({"media": "bytes"}, {"media": "text"}, "column 'media' holds 'text', which is not 'bytes'"),
        ({"n": "int"}, {"n": 1 << 64}, "column 'n' holds '18446744073709551616', which is not 'int'"),
        ({"ids": "ndarray:int32"}, {"ids": np.array([], np.int32)}, "expected some int32 values"),
        ({"ids": "ndarray:int32"}, {"ids": np.array([1.5])}, "expected some int32 values, found float64"),
        ({"text": "str"}, {"text": b"\xff"}, "column 'text' holds .*, which is not 'str' .*invalid start byte"),
        ({"n": "int"}, {"n": b"12"}, "column 'n' holds .*, which is not 'int' .a number of 8 bytes in 2"),
        ({"n": "float32"}, {"n": b"1.5"}, "column 'n' holds .*, which is not 'float32' .a number of 4 bytes in 3"),
        ({"ids": "ndarray:int32"}, {"ids": b"\x04\x02123"}, "which is not 'ndarray:int32' .an array of int32"),
    ],
)
def test_values_of_another_type_are_named(columns: Mapping[str, str], sample: Mapping[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ShardFormat(columns, shard_bytes=1 << 20).encode(dict(sample))


@pytest.mark.parametrize(
    ("encoding", "value"),
    [
        ("str", "né"), ("int", 7), ("uint8", 250), ("float32", 1.5), ("float64", b"12345678"), ("json", {"a": [1]}),
        ("str_int", 12), ("ndarray", np.arange(3)), ("ndarray:int32:2,1", np.ones((2, 1), np.int32)),
    ],
)  # fmt: skip
def test_bytes_are_a_value_that_is_encoded_already_as_mdswriter_takes_them(encoding: str, value: Any) -> None:
    encoded = mds_encode(encoding, value)
    assert mds_encode(encoding, encoded) == encoded
    format = ShardFormat({"value": encoding}, shard_bytes=1 << 20)
    assert format.encode({"value": encoded}) == format.encode({"value": value})
    assert format.encode({"value": value}).endswith(encoded)


@pytest.mark.parametrize("shard_bytes", [0, 1000, 1 << 32])
def test_shards_that_mds_cannot_have_are_refused(shard_bytes: int) -> None:
    with pytest.raises(ConfigError, match="choose from 1 KiB to 4 GiB"):
        ConvertOptions(shard_bytes=shard_bytes)


@pytest.mark.parametrize("encoding", ["pkl", "text"])
def test_encodings_that_are_not_safe_or_not_known_are_refused(encoding: str) -> None:
    with pytest.raises(ConfigError, match="is not an encoding of MDS columns"):
        ShardFormat({"value": encoding}, shard_bytes=1 << 20)


def test_a_format_can_be_sent_to_a_process() -> None:
    format = pickle.loads(pickle.dumps(ShardFormat(COLUMNS, shard_bytes=1 << 20, compression="zstd")))
    assert format.header == ShardFormat(COLUMNS, shard_bytes=1 << 20, compression="zstd").header
