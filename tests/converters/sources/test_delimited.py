from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.converters.sources import table
from lmms_stream.converters.sources.csv import delimited
from lmms_stream.converters.sources.sources import open_sources
from lmms_stream.errors import ConfigError, DataError

from ...strategies import examples
from .source_rows import numbered_rows, write

FIELDS = st.text(st.characters(codec="latin-1", exclude_characters="\0"), min_size=1, max_size=8)


def rows_of(path: Path, **said: str) -> list[object]:
    """Values of all rows, or what is wrong with them."""
    with tempfile.TemporaryDirectory() as scratch:
        (source,) = open_sources([str(path)], delimited=delimited(**said), scratch=Path(scratch), unit_bytes=64)
        return [row.values or row.error for _, row in numbered_rows(source)]


@given(
    rows=st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=8),
    delimiter=st.sampled_from(";|\t,:ü"),
    encoding=st.sampled_from(["latin-1", "utf-16", "utf-16-le", "utf-8-sig", "cp500", "gb18030"]),
)
@examples(25)
def test_text_of_any_delimiter_and_encoding_comes_back(
    rows: list[tuple[str, str]], delimiter: str, encoding: str
) -> None:
    try:
        lines = [["a", "b"], *map(list, rows)]
        text = "".join(delimiter.join('"' + each.replace('"', '""') + '"' for each in line) + "\n" for line in lines)
        data = text.encode(encoding)
    except UnicodeEncodeError:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "a.csv", data)
        assert rows_of(path, delimiter=delimiter, encoding=encoding) == [
            dict(zip("ab", row, strict=True)) for row in rows
        ]


def test_a_delimiter_divides_ranges_of_lines_without_quotes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"a;b\n" + b"".join(b'%d;"x, y\n' % number for number in range(100)))
    wanted = [{"a": str(number), "b": '"x, y'} for number in range(100)]
    assert rows_of(path, delimiter=";", quote="none") == wanted
    assert rows_of(path, delimiter=";", quote="none", encoding="latin-1") == wanted


def test_what_is_written_otherwise_is_named_with_the_remedy(tmp_path: Path) -> None:
    latin = write(tmp_path / "latin.csv", "text,id\ngut,1\nnäh,2\n".encode("latin-1"))
    assert rows_of(latin) == [
        {"text": "gut", "id": "1"},
        "not valid UTF-8 near 'n\\udce4h': write the file as UTF-8, or say its --encoding",
    ]
    assert rows_of(latin, encoding="latin-1")[1] == {"text": "näh", "id": "2"}
    assert rows_of(latin, encoding="ascii") == rows_of(latin)
    wide = write(tmp_path / "wide.csv", "text,id\nnäh,2\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"wide\.csv is text in UTF-16: write it as UTF-8, or, for CSV or TSV,"):
        rows_of(wide)
    assert rows_of(wide, encoding="utf-16") == [{"text": "näh", "id": "2"}]
    with pytest.raises(DataError, match=r"cut\.csv: not text in UTF-16 \(.*truncated data\): name its encoding"):
        rows_of(write(tmp_path / "cut.csv", wide.read_bytes()[:-1]), encoding="utf-16")
    semicolons = write(tmp_path / "a.csv", b"a;b\n1;2\n")
    with pytest.raises(DataError, match="its header names one column, 'a;b': pass --delimiter ';' if this"):
        rows_of(semicolons)
    with pytest.raises(DataError, match=r"its header names one column, 'a;b': pass --delimiter ';'"):
        rows_of(semicolons, delimiter="tab")
    with pytest.raises(
        DataError, match=r"bad\.csv: column 'n\\udce4h' of the header is not text in UTF-8: .* --encoding"
    ):
        rows_of(write(tmp_path / "bad.csv", "näh,b\n1,2\n".encode("latin-1")))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"delimiter": ";;"}, "delimiter ';;' cannot separate fields: pass one character, or tab"),
        ({"delimiter": ""}, "delimiter '' cannot separate fields"),
        ({"delimiter": "\n"}, "cannot separate fields"),
        ({"quote": "single"}, "quote 'single' is not a quote: pass none, double, or a single character"),
        ({"encoding": "latin1x"}, "encoding 'latin1x' is unknown to Python: did you mean 'latin-1'"),
        ({"encoding": "base64"}, "encoding 'base64' is unknown to Python"),
    ],
)
def test_what_cannot_be_meant_is_refused(said: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        delimited(**said)


def test_fields_end_at_what_the_user_names() -> None:
    assert delimited(delimiter="tab", quote="none", encoding="utf-16") == table.Delimited(
        delimiter="\t", quote="", encoding="utf-16"
    )
    assert delimited() == table.USUAL
