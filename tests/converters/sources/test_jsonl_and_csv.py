from __future__ import annotations

import bz2
import gzip
import json
import lzma
import math
import re
import sys
import tempfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.converters.sources import jsonl as lines
from lmms_stream.converters.sources import table
from lmms_stream.converters.sources.files import DecompressedFile, LocalFile
from lmms_stream.converters.sources.jsonl import lines_between
from lmms_stream.errors import DataError

from ...conftest import run_command
from ...rounds import in_long_rounds, rounds
from ...strategies import examples
from .source_rows import MESSY, json_lines, num_units, opened, read, read_numbered, write

LINES = st.lists(
    st.just(b"")
    | st.just(b" \t")
    | st.just(b"{broken")
    | st.dictionaries(st.text(max_size=3), st.text(max_size=12) | st.integers(-9, 9), max_size=3).map(orjson.dumps)
    | st.integers(0, 300).map(lambda size: orjson.dumps({"long": "y" * size})),
    min_size=1,
    max_size=20,
)


def zstd(data: bytes) -> bytes:
    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


def expected(texts: list[bytes]) -> list[tuple[int, object]]:
    """What a plain reader finds: (line number, values), None instead of a line that is broken."""
    found: list[tuple[int, object]] = []
    for number, text in enumerate(texts, start=1):
        if text.strip():
            found.append((number, None if text == b"{broken" else orjson.loads(text)))
    return found


@given(
    texts=LINES,
    end=st.sampled_from([b"\n", b"\r\n"]),
    last_end=st.booleans(),
    bom=st.booleans(),
    unit_bytes=st.integers(1, 80),
    compress=st.sampled_from([bytes, gzip.compress, zstd, bz2.compress, lzma.compress]),
    bounds=st.tuples(st.none() | st.integers(-25, 25), st.none() | st.integers(-25, 25)),
)
@examples(150)
def test_units_of_any_size_give_the_rows_of_a_plain_reader(
    texts: list[bytes],
    end: bytes,
    last_end: bool,
    bom: bool,
    unit_bytes: int,
    compress: object,
    bounds: tuple[int | None, int | None],
) -> None:
    data = (table.BOM if bom else b"") + end.join(texts) + (end if last_end or not texts[-1] else b"")
    in_slice = range(1, len(texts) + 1)[slice(*bounds)]
    wanted = [(number, values) for number, values in expected(texts) if number in in_slice]
    if not in_slice or not expected(texts):
        return
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "rows", compress(data))  # type: ignore[operator]
        start, stop = ("" if bound is None else str(bound) for bound in bounds)
        found = read_numbered(f"{path}@[{start}:{stop}]", format="jsonl", unit_bytes=unit_bytes)
    assert [
        (number, None if isinstance(values, str) and values else values or {}) for number, values in found
    ] == wanted


@pytest.mark.parametrize("number", [(1 << 64) - 1, 1 << 64, -(1 << 64), 10**40 + 7])
def test_integers_of_any_size_stay_integers(tmp_path: Path, number: int) -> None:
    rows = [{"id": number, "nested": [{"a": number, "text": f"{10**30}"}], "share": 0.5}, {"id": 1}]
    texts = [json.dumps(row).encode() for row in rows]
    assert read(write(tmp_path / "a.jsonl", b"\n".join(texts))) == rows
    assert read(write(tmp_path / "a.json", b"[" + b",".join(texts) + b"]")) == rows


def test_nan_and_infinity_as_python_writes_them_are_read(tmp_path: Path) -> None:
    data = json.dumps({"a": math.nan, "b": [math.inf, -math.inf], "text": "NaN ü"}).encode()
    for rows in read(write(tmp_path / "a.jsonl", data)), read(write(tmp_path / "a.json", b"[" + data + b"]")):
        assert math.isnan(rows[0].pop("a"))
        assert rows == [{"b": [math.inf, -math.inf], "text": "NaN ü"}]


def test_of_a_key_that_an_object_has_twice_the_last_value_is_read(tmp_path: Path) -> None:
    row = '{"a": 1, "a": {"b": 2, "b": 3}}'
    assert read(str(write(tmp_path / "a.jsonl", f"{row}\n".encode()))) == [json.loads(row)]
    assert read(str(write(tmp_path / "a.json", f"[{row}]".encode()))) == [{"a": {"b": 3}}]


def test_an_integer_of_thousands_of_digits_is_an_error_of_its_row(tmp_path: Path) -> None:
    found = read_numbered(write(tmp_path / "a.jsonl", b'{"id": ' + b"7" * 5000 + b'}\n{"id": 1}'))
    assert found[1] == (2, {"id": 1})
    assert re.search(r"not valid JSON \(number is infinity .*\): correct it", found[0][1])


def test_a_cut_depends_on_the_file_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json_lines(MESSY))
    with opened(path, unit_bytes=500) as ((first,), _), opened(path, unit_bytes=500) as ((second,), _):
        units = list(first.units())
        assert list(map(repr, units)) == list(map(repr, second.units()))
        assert len(units) == -(-path.stat().st_size // 500)
        assert sum(unit.num_bytes for unit in units) == first.num_bytes == path.stat().st_size


def test_a_line_longer_than_many_ranges_is_read_once(tmp_path: Path) -> None:
    rows = [{"id": 0}, {"text": "z" * 5_000_000}, {"id": 2}]
    path = write(tmp_path / "a.jsonl", json_lines(rows))
    assert read(path, unit_bytes=100_000) == rows
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(json_lines(rows)))
    assert read(path, unit_bytes=100_000) == rows


def test_payloads_that_are_too_long_to_travel_wait_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MAX_CARRIED_BYTES", 1000)
    rows = [{"text": "z" * 1500}, {"id": 1}, {"text": "z" * 2500}]
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(json_lines(rows)))
    with opened(path, unit_bytes=1) as ((source,), scratch):
        units = list(source.units())
        assert len(list(scratch.glob("*/unit-*"))) == 2
        assert [row.values for unit in units for row in unit.rows()] == rows


def test_a_line_beyond_the_limit_is_an_error_of_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(table, "MAX_ROW_BYTES", 1000)
    data = json_lines([{"id": 0}, {"text": "z" * 3_000_000}, {"id": 2}])
    for path in write(tmp_path / "a.jsonl", data), write(tmp_path / "a.jsonl.gz", gzip.compress(data)):
        first, second, third = read_numbered(path)
        assert (first, third) == ((1, {"id": 0}), (3, {"id": 2}))
        assert second[0] == 2
        assert "longer than 0 MiB: break it into rows, or name media by path" in second[1]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (
            b'{"a": }',
            r"not valid JSON \(unexpected character, expected a JSON value at byte 7\): correct it, near '\{\"a\": \}'",
        ),
        ('{"é": }'.encode(), r"at byte 8\)"),
        (b'{"a": "' + b"x" * 200 + b'" 1}', r"at byte 210\): correct it, near 'x+\" 1\}'$"),
        (b'{"a": "\xff\xfe"}', r"not valid UTF-8 \(byte 0xff at byte 8\): write it as UTF-8, near .*\ufffd"),
        (b"[1, 2]", r"expected a JSON object, found list: '\[1, 2\]'"),
        (b"null", r"expected a JSON object, found NoneType: 'null'"),
        (b'{"a": NaN', r"not valid JSON"),
        (b'{"a": nan}', r"not valid JSON"),
        (b"[" * 5000, r"not valid JSON"),
    ],
)
def test_a_broken_line_is_an_error_of_its_row_and_the_next_is_read(tmp_path: Path, line: bytes, error: str) -> None:
    path = write(tmp_path / "a.jsonl", b'{"id": 1}\n\n' + line + b'\n{"id": 4}')
    found = read_numbered(path)
    assert [found[0], found[2]] == [(1, {"id": 1}), (4, {"id": 4})]
    assert found[1][0] == 3
    assert re.search(error, found[1][1])


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress, "zst": zstd, "bz2": bz2.compress, "xz": partial(lzma.compress, preset=1)
}  # fmt: skip


@pytest.mark.parametrize("kind", rounds(["gz", "zst"], [*COMPRESS]))
def test_compressed_data_that_breaks_off_is_named(tmp_path: Path, kind: str) -> None:
    packed = COMPRESS[kind](json_lines([{"text": str(number**9)} for number in range(20_000)]))
    path = write(tmp_path / f"a.jsonl.{kind}", packed[: len(packed) // 2])
    error = r"a\.jsonl\.\w+: its (gzip|zstd|bzip2|xz) data is damaged or breaks off .*: copy it again"
    with pytest.raises(DataError, match=error):
        read(path)
    middle = len(packed) // 2
    write(path, packed[:middle] + bytes(each ^ 255 for each in packed[middle : middle + 40]) + packed[middle + 40 :])
    if kind != "zst":  # pyarrow writes no checksum into it
        with pytest.raises(DataError, match=error):
            read(path)
    joined = write(tmp_path / f"b.jsonl.{kind}", packed + packed)
    assert len(read(joined, unit_bytes=1 << 17)) == 40_000
    assert num_units(joined, unit_bytes=1 << 17) > 2


@pytest.mark.parametrize("compress", [bz2.compress, lzma.compress])
def test_no_more_is_decompressed_than_is_asked_for(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    path = write(tmp_path / "a", compress(b"") + compress(bytes(1 << 24)) + compress(b"end"))
    with DecompressedFile(LocalFile(path), name="a") as stream:
        assert len(stream.read(1000)) == 1000
        num_bytes = 1000
        while chunk := stream.read(1 << 16):
            assert len(chunk) <= 1 << 16
            num_bytes += len(chunk)
    assert (num_bytes, chunk) == ((1 << 24) + 3, b"")


def test_zeros_that_xz_pads_a_stream_with_are_passed_over(tmp_path: Path) -> None:
    packed = lzma.compress(json_lines([{"a": 1}]))
    assert read(write(tmp_path / "a.jsonl.xz", packed + bytes(4) + packed + bytes(8))) == [{"a": 1}] * 2


def test_xz_that_asks_for_gigabytes_of_memory_is_refused(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 20}]
    packed = bytearray(lzma.compress(b'{"a": 1}\n', check=lzma.CHECK_NONE, filters=filters))
    header = packed[12 : 12 + 4 * (packed[12] + 1)]
    at = header.index(b"\x21\x01") + 2  # LZMA2, whose one byte of properties is the size of its dictionary
    header[at] = 40  # 4 GiB
    header[-4:] = zlib.crc32(header[:-4]).to_bytes(4, "little")
    packed[12 : 12 + len(header)] = header
    with pytest.raises(DataError, match=r"a\.jsonl\.xz: its xz data asks for more than 256 MiB of memory: compress it"):
        read(write(tmp_path / "a.jsonl.xz", bytes(packed)))


def test_lines_that_start_in_a_range_are_given_by_it_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"aaa\n\nbb\nc")
    with path.open("rb") as file:
        found = [list(lines_between(file, start=at, stop=at + 1)) for at in range(9) if file.seek(0) == 0]
    assert found == [[b"aaa\n"], [], [], [], [b"\n"], [b"bb\n"], [], [], [b"c"]]


OPENERS: dict[str, Callable[[Path, str], Any]] = {
    "gz": partial(gzip.open, compresslevel=1), "bz2": bz2.open, "xz": partial(lzma.open, preset=0)
}  # fmt: skip
MEASURE = """
import resource, sys
from pathlib import Path
from lmms_stream.converters.sources.sources import open_sources
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for source in open_sources([sys.argv[2]], scratch=Path(sys.argv[3])):
    for unit in source.units():
        list(unit.rows())
before, num_rows = peak(), 0
for source in open_sources([sys.argv[1]], scratch=Path(sys.argv[3]), unit_bytes=1 << 20):
    for unit in source.units():
        num_rows += sum(1 for _ in unit.rows())
print(num_rows, peak() - before)
"""


KINDS_OF_LARGE_FILES = ["json", "jsonl", "jsonl.gz", "json.gz", "csv"]
IN_LONG_ROUNDS = [pytest.param(kind, marks=in_long_rounds) for kind in ("jsonl.bz2", "jsonl.xz")]


@pytest.mark.parametrize("kind", [*KINDS_OF_LARGE_FILES, *IN_LONG_ROUNDS])
def test_memory_is_bounded_whatever_the_size(tmp_path: Path, kind: str) -> None:
    row = orjson.dumps({"text": "word " * 200})
    num_rows, num_copies = 64, rounds(512, 1024)
    separator, head, tail = (
        (b",\n", b"[", b"]") if kind.startswith("json") and "jsonl" not in kind else (b"\n", b"", b"")
    )
    if kind == "csv":
        row, head = b'"' + b"word " * 200 + b'","x"', b"text,x\n"

    def fill(path: Path, copies: int) -> Path:
        block = separator.join([row] * num_rows)
        with OPENERS.get(kind.rpartition(".")[2], Path.open)(path, "wb") as file:
            file.write(head)
            for number in range(copies):
                file.write((separator if number else b"") + block)
            file.write(tail)
        return path

    large, small = fill(tmp_path / f"large.{kind}", num_copies), fill(tmp_path / f"small.{kind}", 1)
    result = run_command(sys.executable, "-c", MEASURE, str(large), str(small), str(tmp_path / "scratch"))
    assert result.returncode == 0, result.stderr
    found, grown = map(int, result.stdout.split())
    assert found == num_rows * num_copies  # 32 MiB of text, or 64
    assert grown < 24 << 20
