from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import ShardError
from lmms_stream.mds.decoding import decoder
from lmms_stream.mds.index import INDEX_NAME, ShardInfo, file_matches, parse_index
from lmms_stream.mds.shard import Shard, SplitShard
from streaming import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter
from streaming.base.format import reader_from_json
from streaming.base.format.mds.encodings import mds_decode

from ..strategies import examples

COLUMNS = {
    "text": "str",
    "raw": "bytes",
    "number": "int",
    "tokens": "ndarray:int32",
    "pair": "ndarray:int64:2",
    "score": "float64",
    "extra": "json",
}


def sample(number: int) -> dict[str, Any]:
    return {
        "text": "é" * number,
        "raw": bytes(range(number)),
        "number": -number,
        "tokens": np.arange(2 * number + 2, dtype=np.int32).reshape(2, -1),
        "pair": np.array([number, number + 1]),
        "score": number / 3,
        "extra": {"n": [number]},
    }


def write(folder: Path, *, num_samples: int = 20, size_limit: int = 1 << 20) -> list[ShardInfo]:
    with MDSWriter(columns=COLUMNS, out=str(folder), hashes=["xxh3_64"], size_limit=size_limit) as writer:
        for number in range(num_samples):
            writer.write(sample(number))
    return parse_index((folder / INDEX_NAME).read_bytes(), source="index.json")


def change_index(folder: Path, **changes: Any) -> bytes:
    index = json.loads((folder / INDEX_NAME).read_text())
    for path, value in changes.items():
        target = index["shards"][0]
        *parents, last = path.split("__")
        for parent in parents:
            target = target[parent]
        target[last] = value
    return json.dumps(index).encode()


def test_samples_of_a_plain_mds_writer_are_decoded_exactly(tmp_path: Path) -> None:
    infos = write(tmp_path, size_limit=1 << 10)
    assert len(infos) > 1
    samples = [shard[i] for shard in (Shard(tmp_path / i.name, i) for i in infos) for i in range(len(shard))]
    for number, found in enumerate(samples):
        expected = sample(number)
        assert list(found) == sorted(COLUMNS)
        for name, value in expected.items():
            if isinstance(value, np.ndarray):
                assert found[name].dtype == value.dtype
                assert np.array_equal(found[name], value)
            else:
                assert found[name] == value


def test_only_the_columns_that_are_asked_for_are_decoded(tmp_path: Path) -> None:
    (info,) = write(tmp_path)
    assert Shard(tmp_path / info.name, info, columns=["number", "text"])[3] == {"number": -3, "text": "ééé"}
    with pytest.raises(ShardError, match="has no column 'smell': it has extra, number") as refused:
        Shard(tmp_path / info.name, info, columns=["smell"])
    remedy = (
        "the processor of these columns: --tokenizer … for a command, processor: {type: text, tokenizer: …} in a YAML"
    )
    assert remedy in str(refused.value)  # of its column `text`


@pytest.mark.parametrize(
    "name",
    [
        "../x", "/etc/passwd", "a/../../b", "a/..", "a//b", "a/", "/", "./a", "a/./b", "a/.b", "..", ".", "", "a\\b",
        "a/b\\..\\c", "a\n", "a\0b", "\u202ea", "\ud800", "_lmms/dataset.json", "a/_lmms/x", "x" * 201, "é" * 101,
        "/".join("123456789"), None, 7,
    ],
)  # fmt: skip
def test_a_shard_name_that_leaves_the_folder_is_refused(name: object, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ShardError, match="is not a plain path below the dataset: refused"):
        parse_index(change_index(tmp_path, raw_data__basename=name), source="index.json")


@pytest.mark.parametrize("name", ["a/shard.00000.mds", "a/b/c/d/e/f/g/h", "x" * 200, "é" * 100 + "/a", "a b/c~"])
def test_a_shard_may_lie_in_a_folder_below(name: str, tmp_path: Path) -> None:
    write(tmp_path)
    (info,) = parse_index(change_index(tmp_path, raw_data__basename=name), source="index.json")
    assert info.name == name


def test_a_name_that_is_a_shard_and_a_folder_is_refused(tmp_path: Path) -> None:
    write(tmp_path, size_limit=1 << 10)
    index = json.loads(change_index(tmp_path, raw_data__basename="a"))
    for name in ("a/b", "a/b/c", "index.json/x"):
        index["shards"][1]["raw_data"]["basename"] = name
        with pytest.raises(ShardError, match=r"is a shard, and a folder of"):
            parse_index(json.dumps(index).encode(), source="index.json")


@pytest.mark.parametrize("size", [-1, 0, 1 << 32, "9", None])
def test_an_impossible_shard_size_is_refused(size: object, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ShardError, match="a shard has from 8 bytes to 4 GiB"):
        parse_index(change_index(tmp_path, raw_data__bytes=size), source="index.json")


def test_pickled_columns_foreign_formats_and_versions_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    encodings = ["pkl", *list(COLUMNS.values())[1:]]
    with pytest.raises(ShardError, match="is pickled, and unpickling can run code: write it in another encoding"):
        parse_index(change_index(tmp_path, column_encodings=encodings), source="index.json")
    with pytest.raises(ShardError, match="shard format 'parquet' is not supported, expected one of mds, json, csv"):
        parse_index(change_index(tmp_path, format="parquet"), source="index.json")
    with pytest.raises(ShardError, match="MDS version 3 is not supported, expected 2"):
        parse_index(b'{"version": 3, "shards": []}', source="index.json")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"version": 2}', b'{"version": 2, "shards": [{}]}', b"\xff"])
def test_an_index_that_is_not_one_is_refused(data: bytes) -> None:
    with pytest.raises(ShardError, match=r"index\.json: not a valid MDS index"):
        parse_index(data, source="index.json")


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    (info,) = write(tmp_path)
    path = tmp_path / info.name
    path.write_bytes(path.read_bytes()[:-1])
    assert not file_matches(path, size=info.size, checksum=None)
    with pytest.raises(ShardError, match=f"has {info.size - 1} bytes, but {info.size} bytes in its index"):
        Shard(path, info)


def test_a_changed_byte_is_found_by_the_checksum(tmp_path: Path) -> None:
    (info,) = write(tmp_path)
    path = tmp_path / info.name
    assert file_matches(path, size=info.size, checksum=info.checksum)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert not file_matches(path, size=info.size, checksum=info.checksum)


def test_offsets_that_leave_the_file_or_descend_are_refused(tmp_path: Path) -> None:
    (info,) = write(tmp_path)
    path = tmp_path / info.name
    original = path.read_bytes()
    for word, value in ((1, 1 << 31), (5, 0), (info.num_samples + 1, info.size + 1)):
        data = bytearray(original)
        data[4 * word : 4 * word + 4] = value.to_bytes(4, "little")
        path.write_bytes(data)
        with pytest.raises(ShardError, match="offsets that descend or leave the file"):
            Shard(path, info)
    path.write_bytes((info.num_samples + 1).to_bytes(4, "little") + original[4:])
    with pytest.raises(ShardError, match="does not hold the 20 samples of its index"):
        Shard(path, info)


def test_a_sample_whose_columns_do_not_fill_it_is_refused(tmp_path: Path) -> None:
    (info,) = write(tmp_path)
    path = tmp_path / info.name
    data = bytearray(path.read_bytes())
    begin = int.from_bytes(data[4:8], "little")
    data[begin : begin + 4] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ShardError, match="sample 0 cannot be decoded"):
        Shard(path, info)[0]


NUMBERS = ["uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32", "uint64", "int64", "float64"]
JSON_TEXTS = [
    "null", "-0", "-0.0", "1e400", "NaN", "-Infinity", '"\\ud800"', "1" * 400, "123456789012345678901",
    "[" * 300 + "]" * 300,
    '{"a": 1, "a": 2}', '"\\u00e9 é"', " [1.10, true] ", "18446744073709551616", "-9223372036854775809",
    "0.1234567890123456789012345",
]  # fmt: skip


def test_json_and_numbers_are_decoded_as_mosaicmls_own_code_decodes_them() -> None:
    cases: list[tuple[str, bytes]] = [("json", text.encode()) for text in JSON_TEXTS]
    cases += [("str_int", b"-12"), ("str_float", b"1e-3"), ("str_decimal", b"1.10")]
    cases += [(name, np.arange(3, 4).astype(name).tobytes()) for name in NUMBERS]
    for encoding, data in cases:
        found, expected = decoder(encoding)(memoryview(data), 0, len(data)), mds_decode(encoding, data)
        assert (type(found), repr(found)) == (type(expected), repr(expected)), (encoding, data[:40])
    wrong = [
        ("json", b"{"),
        ("json", b"[" * 99999 + b"]" * 99999),
        ("str_int", b"x"),
        ("str_float", b""),
        ("str_decimal", b"x"),
    ]
    for encoding, data in wrong:
        with pytest.raises(ValueError):
            decoder(encoding)(memoryview(data), 0, len(data))


TEXT_COLUMNS = {"number": "int", "name": "str", "weight": "float"}
WRITERS: dict[str, Any] = {"json": JSONWriter, "csv": CSVWriter, "tsv": TSVWriter, "xsv": XSVWriter}


def write_texts(folder: Path, kind: str, samples: list[dict[str, Any]]) -> ShardInfo:
    separator = {"separator": "||", "newline": "\r\n"} if kind == "xsv" else {}
    with WRITERS[kind](columns=TEXT_COLUMNS, out=str(folder), **separator) as writer:
        for each in samples:
            writer.write(each)
    (info,) = parse_index((folder / INDEX_NAME).read_bytes(), source="index.json")
    return info


@examples(40)
@given(
    kind=st.sampled_from(list(WRITERS)),
    rows=st.lists(st.tuples(st.integers(), st.text(), st.floats()), min_size=1, max_size=5),
    changes=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_shards_of_texts_are_read_as_mosaicmls_package_reads_them_and_damage_is_a_shard_error(
    kind: str, rows: list[Any], changes: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    kept = str.maketrans("", "", "\r\n\t,|")
    samples = [{"number": number, "name": name.translate(kept), "weight": weight} for number, name, weight in rows]
    info = write_texts(folder, kind, samples)
    shard = SplitShard(folder / info.name, info)
    reader = reader_from_json(str(folder), None, dict(info.entry))
    assert [repr(shard[number]) for number in range(len(shard))] == [
        repr({name: sample[name] for name in info.column_names}) for sample in reader
    ]
    assert info.meta is not None
    for name in (info.name, info.meta.name):
        data = bytearray((folder / name).read_bytes())
        for at, value in changes:
            data[at % len(data)] = value
        (folder / name).write_bytes(data)
        with suppress(ShardError):
            shard = SplitShard(folder / info.name, info)
            for number in range(len(shard)):
                with suppress(ShardError):
                    shard[number]


def test_a_shard_of_texts_names_what_is_wrong_with_it(tmp_path: Path) -> None:
    sample = {"number": 1, "name": "x", "weight": 0.5}
    info = write_texts(tmp_path / "csv", "csv", [sample])
    path = tmp_path / "csv" / info.name
    with pytest.raises(ShardError, match="has no column 'smell': it has name, number, weight: convert the dataset"):
        SplitShard(path, info, columns=["smell"])
    assert SplitShard(path, info, columns=["weight"])[0] == {"weight": 0.5}
    path.write_bytes(path.read_bytes().replace(b"x,1", b",,1"))
    with pytest.raises(ShardError, match=r"sample 0 cannot be decoded .*4 texts for 3 columns"):
        SplitShard(path, info)[0]
    info = write_texts(tmp_path / "json", "json", [sample])
    path = tmp_path / "json" / info.name
    path.write_bytes(b"[1]".ljust(info.size))
    with pytest.raises(ShardError, match=r"sample 0 cannot be decoded .*a JSON list where an object is expected"):
        SplitShard(path, info)[0]
    index = json.loads((tmp_path / "csv" / INDEX_NAME).read_text())
    index["shards"][0]["newline"] = ""
    with pytest.raises(ShardError, match="shards of csv have the newline '', expected a text"):
        parse_index(json.dumps(index).encode(), source="index.json")


READ_ALL = """
import sys
from lmms_stream.rl import StreamingDataset
rows = list(StreamingDataset(sys.argv[1], prompt_key="text", label_key="number", metadata_key="extra"))
assert [(row.prompt, row.label, row.metadata) for row in rows] == [("é" * n, -n, {"n": [n]}) for n in range(1, 4)], rows
assert not {"streaming", "torch", "transformers"} & sys.modules.keys()
"""


def test_json_columns_are_read_without_mosaicmls_package(tmp_path: Path) -> None:
    columns = {name: COLUMNS[name] for name in ("text", "number", "extra")} | {"score": "float64"}
    with MDSWriter(columns=columns, out=str(tmp_path), hashes=["xxh3_64"]) as writer:
        for number in range(1, 4):
            writer.write({name: sample(number)[name] for name in columns})
    command = [sys.executable, "-c", READ_ALL, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
