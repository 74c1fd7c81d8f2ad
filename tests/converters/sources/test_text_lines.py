"""Files of text whose lines are rows, which only the user can tell from files that are one text each."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.converters.convert import convert
from lmms_stream.converters.sources import jsonl
from lmms_stream.converters.sources.table import BOM, by_index
from lmms_stream.errors import DataError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.storage.storage import open_storage

from ...strategies import examples
from .source_rows import numbered_rows, opened, read, read_numbered, write

TEXTS = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20), min_size=1, max_size=20
).filter(lambda texts: any(text.encode().strip() for text in texts))


@given(
    texts=TEXTS,
    end=st.sampled_from([b"\n", b"\r\n"]),
    last_end=st.booleans(),
    bom=st.booleans(),
    unit_bytes=st.integers(1, 80),
    compress=st.sampled_from([bytes, gzip.compress]),
)
@examples(100)
def test_each_line_that_is_not_blank_is_a_row(
    texts: list[str], end: bytes, last_end: bool, bom: bool, unit_bytes: int, compress: Callable[[bytes], bytes]
) -> None:
    data = (BOM if bom else b"") + end.join(text.encode() for text in texts) + (end if last_end else b"")
    wanted = [(number, {"text": text}) for number, text in enumerate(texts, start=1) if text.encode().strip()]
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "corpus", compress(data))
        assert read_numbered(path, format="lines", unit_bytes=unit_bytes) == wanted
        with opened(path, format="lines", unit_bytes=unit_bytes) as ((source,), _):
            for unit in source.units():
                rows = list(unit.rows())
                assert list(by_index(unit).rows(range(len(rows))[::-1])) == rows[::-1]


def test_text_files_of_a_folder_are_lines_where_it_is_said_and_whole_texts_otherwise(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.txt", b"one\ntwo\n")
    write(tmp_path / "in" / "b" / "c.txt.gz", gzip.compress(b"three\n\nfour"))
    write(tmp_path / "in" / "README.md", b"# what it is")
    assert [row["text"] for row in read(tmp_path / "in", format="lines")] == ["one", "two", "three", "four"]
    assert [row["text"] for row in read(tmp_path / "in" / "a.txt")] == ["one\ntwo\n"]
    assert read_numbered(f"{tmp_path}/in/a.txt@[1:]", format="lines") == [(2, {"text": "two"})]
    report = convert([str(tmp_path / "in")], str(tmp_path / "out"), format="lines", num_workers=1)
    assert report.num_rows == 4
    assert [sample["text"] for sample in PackedStreamingDataset(tmp_path / "out")[:]] == ["one", "two", "three", "four"]
    with pytest.raises(DataError, match="no file in it has a name like lines: 1 jsonl: name each of its files"):
        read(write(tmp_path / "other" / "a.jsonl", b'{"a": 1}').parent, format="lines")


def test_lines_of_a_store_are_read_in_ranges(s3_folder: str) -> None:
    open_storage(s3_folder).write("corpus.txt", b"".join(f"line {number}\n".encode() for number in range(100)))
    with opened(f"{s3_folder}/corpus.txt", format="lines", unit_bytes=100) as ((source,), scratch):
        assert source.fetch is None
        assert [row.values for _, row in numbered_rows(source)] == [{"text": f"line {n}"} for n in range(100)]
        assert not list(scratch.iterdir())


def test_a_line_that_is_no_text_is_an_error_of_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_ROW_BYTES", 40)
    path = write(tmp_path / "corpus.txt", b"one\ntw\xff\n" + b"x" * 41 + b"\nfour")
    first, second, third, fourth = read_numbered(path, format="lines")
    assert (first, fourth) == ((1, {"text": "one"}), (4, {"text": "four"}))
    assert second == (2, "not valid UTF-8 (byte 0xff at byte 3): write it as UTF-8, near 'tw\ufffd'")
    assert third == (3, "longer than 0 MiB: break it into several lines")


def test_text_in_utf_16_without_a_mark_is_an_error_of_its_row(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.txt", "one\ntwo".encode("utf-16-le"))
    wrong = "text in UTF-16 or UTF-32, or no text: write it as UTF-8, near"
    assert all(str(values).startswith(wrong) for _, values in read_numbered(path, format="lines"))
    ((_, whole),) = read_numbered(path)
    assert str(whole).startswith(f"corpus.txt is {wrong}")
    assert read(write(tmp_path / "zero.txt", b"a text\0"), format="lines") == [{"text": "a text\0"}]


@pytest.mark.parametrize(("format", "row"), [("lines", "one"), ("jsonl", '{"text": "one"}')])
def test_lines_that_end_in_carriage_returns_alone_are_not_one_line(format: str, row: str, tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_bytes("\r".join([row] * 3).encode())
    with pytest.raises(DataError, match=r"end only in carriage returns.*tr '.r' '.n'"):
        convert(tmp_path / "old.txt", tmp_path / "out", format=format, num_workers=1)
    (tmp_path / "one.txt").write_bytes(f"{row}\r".encode())
    assert convert(tmp_path / "one.txt", tmp_path / "whole", format=format, num_workers=1).num_rows == 1
