from __future__ import annotations

import re
import shlex
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


NO_HEADER = {
    "a.tsv": ("Good day to you.\tBonjour.\nYes.\tOui.\n", "prompt", "Good day to you."),
    "b.tsv": ("im/0.png\tA red cat.\nim/1.png\tA dog.\n", "text", "A red cat."),
    "c.csv": ("3,Oil soars,Prices are up\n1,Rain falls,It is wet\n", "prompt", "Oil soars"),
    "d.csv": ('id1|One, two, three|"x\nid2|Four five|y\n', "prompt", "One, two, three"),
    "f.tsv": ("标题甲\t" + 40 * "文本" + "\n标题乙\t" + 40 * "文字" + "\n", "column2", 40 * "文本"),
    "g.tsv": ("One is so.\tOne is.\tIt is one.\nTwo is so.\tTwo.\tIt is.\n", "column3", "It is one."),
    "e.tsv": ("good film\tpos\nbad film\tneg\nfine film\tpos\nodd film\tpos\n", "prompt", "good film"),
}


@pytest.mark.parametrize("name", NO_HEADER)
def test_a_first_row_of_values_is_refused_with_options_that_read_it(name: str, tmp_path: Path) -> None:
    content, column, wanted = NO_HEADER[name]
    path = write(tmp_path / name, content.encode())
    with pytest.raises(DataError, match=r"its first row is to name the columns, and .* looks like a value: ") as raised:
        rows_of(path)
    words = re.search(r"pass (--header .*) to name", str(raised.value))
    assert words is not None
    pairs = shlex.split(words[1])
    options = {key.removeprefix("--"): value for key, value in zip(pairs[::2], pairs[1::2], strict=True)}
    rows = rows_of(path, **options)
    assert (len(rows), rows[0][column]) == (content.count("\n"), wanted)  # type: ignore[index]
    assert len(rows_of(path, header="first")) == len(rows) - 1


@pytest.mark.parametrize(
    "content",
    ["0,1\na,b\n", "text,label\ntext,pos\n", "Why is it so?,answer\na,b\n", "2019,2020\na,b\n", "x,y\n1,2\n",
     "id,text\nid,text\n1,a\n", "a,b\n1\n2,3\n"],
)  # fmt: skip
def test_names_of_columns_are_taken_for_a_header(content: str, tmp_path: Path) -> None:
    rows = [row for row in rows_of(write(tmp_path / "a.csv", content.encode())) if isinstance(row, dict)]
    assert [*rows[0]] == content.split("\n")[0].split(",")


def test_a_header_in_quotes_may_have_a_line_break(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b'"Question\n(text)",Answer\nq,a\n')
    assert rows_of(path) == [{"Question\n(text)": "q", "Answer": "a"}]


@pytest.mark.parametrize("header", ["a,a", "a,,b", ""])
def test_a_header_names_each_column_once(header: str) -> None:
    with pytest.raises(ConfigError, match=r"header '.*' does not name each column once: write NAME,NAME, or first"):
        delimited(header=header)
