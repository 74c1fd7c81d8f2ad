from __future__ import annotations

import csv
import gzip
import io
import re
import tempfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.converters.rows.chat_kinds import EXCHANGES, MESSAGES
from lmms_stream.converters.rows.speakers import ROLES, USUAL_ROLES
from lmms_stream.converters.sources import json_array
from lmms_stream.converters.sources.json_array import FIRST_SPEAKERS
from lmms_stream.errors import DataError
from lmms_stream.processors.json_text import JsonScanner

from ...strategies import examples
from .source_rows import MESSY, read, read_numbered, write

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ['"', "\\", '\\"', "\\\\", '{"', "}]", ",", "],[", "\u2028", "\x00"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXTS, values, max_size=3),
    max_leaves=8,
)
OBJECTS = st.lists(st.dictionaries(TEXTS, VALUES, max_size=4), min_size=1, max_size=8)


class Trickle(io.RawIOBase):
    """Gives a few bytes at a time."""

    def __init__(self, data: bytes, step: int):
        self._file = io.BytesIO(data)
        self._step = step

    def read(self, size: int = -1) -> bytes:
        return self._file.read(min(self._step, max(1, size)))


def dumped(value: Any, *, pretty: bool, escaped: bool) -> bytes:
    if escaped:
        import json

        return json.dumps(value, indent=1 if pretty else None).encode()
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 if pretty else 0)


@given(rows=OBJECTS, pretty=st.booleans(), escaped=st.booleans(), step=st.integers(1, 50))
@examples(200)
def test_elements_are_what_orjson_reads(rows: list[dict[str, Any]], pretty: bool, escaped: bool, step: int) -> None:
    data = dumped(rows, pretty=pretty, escaped=escaped)
    scanner = JsonScanner(Trickle(data, step), name="x")
    assert [orjson.loads(text) for text in scanner.elements()] == orjson.loads(data)
    scanner.end()


@given(
    count=st.integers(0, 400),
    escape=st.sampled_from(["\\", '"', "\n", "x\\"]),
    step=st.integers(1, 300),
    seed=st.integers(0, 9),
)
@examples(60)
def test_strings_of_very_many_escapes_are_passed(count: int, escape: str, step: int, seed: int) -> None:
    rows = [{"a": "y" * seed + escape * count, escape * seed: 1}, {"b": escape * 3}]
    scanner = JsonScanner(Trickle(orjson.dumps(rows), step), name="x")
    assert [orjson.loads(text) for text in scanner.elements()] == rows


@given(before=VALUES, rows=OBJECTS, after=VALUES, pretty=st.booleans(), step=st.integers(1, 50))
@examples(100)
def test_members_are_what_orjson_reads(
    before: Any, rows: list[dict[str, Any]], after: Any, pretty: bool, step: int
) -> None:
    content = {"before": before, 'r"o{ws': rows, "after": after}
    scanner = JsonScanner(Trickle(dumped(content, pretty=pretty, escaped=False), step), name="x")
    found: dict[str, Any] = {}
    for key in scanner.members():
        if scanner.peek() == b"[":
            found[key] = [orjson.loads(text) for text in scanner.elements()]
        else:
            found[key] = orjson.loads(scanner.value(b"}"))
    assert found == content


@given(rows=OBJECTS, pretty=st.booleans(), unit_bytes=st.integers(1, 100), wrapped=st.booleans(), packed=st.booleans())
@examples(60)
def test_an_array_is_read_whole_whatever_the_size_of_units(
    rows: list[dict[str, Any]], pretty: bool, unit_bytes: int, wrapped: bool, packed: bool
) -> None:
    data = dumped({"version": 1, "rows": rows, "tags": ["a"]} if wrapped else rows, pretty=pretty, escaped=False)
    with tempfile.TemporaryDirectory() as folder:
        name, data = ("a.json.gz", gzip.compress(data)) if packed else ("a.json", data)
        path = write(Path(folder) / name, data)
        if not wrapped or any(rows):
            assert read(path, unit_bytes=unit_bytes) == rows


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_slices_and_numbers_of_an_array(tmp_path: Path, name: str) -> None:
    data = orjson.dumps(MESSY)
    path = write(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
    assert read_numbered(f"{path}@[10:-5]", unit_bytes=300) == [(n + 1, MESSY[n]) for n in range(10, 95)]
    assert read_numbered(f"{path}@[98:]") == [(99, MESSY[98]), (100, MESSY[99])]
    with pytest.raises(DataError, match="holds no rows from 100 to its end: leave it out, or correct the slice"):
        read(f"{path}@[100:]")


@pytest.mark.parametrize("end", ["\n", "\n\n", "\n \r\n"])
def test_empty_lines_after_an_array_make_it_no_json_lines(tmp_path: Path, end: str) -> None:
    rows = [{"a": 1}, {"a": 2}]
    assert read(write(tmp_path / "a.json", orjson.dumps(rows) + end.encode())) == rows


def test_a_member_is_chosen_by_its_name(tmp_path: Path) -> None:
    path = write(
        tmp_path / "coco.json", orjson.dumps({"info": {"images": [1]}, "images": [{"a": 1}], "boxes": [{"b": 2}]})
    )
    with pytest.raises(DataError, match=r"2 members of its object.*choose one by its name, \S+#images or \S+#boxes"):
        read(path)
    assert read(f"{path}#boxes") == [{"b": 2}]
    assert read(f"{path}#images@[0:1]") == [{"a": 1}]
    with pytest.raises(DataError, match=r"coco.json#other: no member 'other' of its object is an array: choose"):
        read(f"{path}#other")
    with pytest.raises(DataError, match="its value is an array, without named members: leave out #x"):
        read(f"{write(tmp_path / 'b.json', b'[{}]')}#x")


MESSAGE, EXCHANGE = {"role": "user", "content": "a"}, {"prompt": "a", "response": "b"}


@pytest.mark.parametrize(
    "row",
    [
        {"id": 1, "messages": [MESSAGE, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": 'a"]'}, {"from": "gpt", "value": "b"}], "tools": [{"x": {}}]},
        {"chosen": [MESSAGE], "rejected": [{"role": "user", "content": "b"}], "n": []},
        {"messages": [{"role": "user", "text": "a"}, {"role": "assistant", "text": "b"}]},
        {"messages": [{"id": "1", "who": "client", "says": "a"}]},
        {"texts": [{"human": "a", "assistant": "b"}, {"human": "c", "assistant": "d"}]},
        {"conversation": [{"system": "s", "input": "a", "output": "b"}, {"input": "c", "output": "d"}]},
        *({name: [EXCHANGE, EXCHANGE]} for name in EXCHANGES.columns["messages"]),
        *({name: [{"speaker": "A", "text": "a"}]} for name in MESSAGES.columns["messages"]),
        {"id": 1, "turns": [{"speaker": "client", "text": "a"}, {"speaker": "agent", "text": "b"}]},
        *({"turns": [{"from": speaker, "value": "a"}]} for speaker in FIRST_SPEAKERS),
    ],
)
def test_an_object_with_a_list_of_messages_or_exchanges_is_one_row(row: dict[str, Any], tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + orjson.dumps(row, option=orjson.OPT_INDENT_2)
    for name in ("a.json", "a.json.gz"):
        path = write(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
        assert read(path) == read(f"{path}@[-1:]") == [row]
        key = next(key for key, value in row.items() if isinstance(value, list))
        assert read(f"{path}#{key}") == row[key]


@pytest.mark.parametrize(
    "rows",
    [
        {"data": [EXCHANGE, EXCHANGE]},
        {"data": [{"speaker": "p225", "text": "a", "path": "a.wav"}]},
        {"pairs": [{"from": "a page", "value": 3, "text": "a"}, {"from": "a book", "value": 4, "text": "b"}]},
        {"texts": [{"id": 1, "text": "a"}, {"id": 2, "text": "b"}]},
        {"texts": [{"title": "t", "text": "a"}, {"title": "u", "text": "b"}]},
        {"conversations": [{"id": 1, "messages": [MESSAGE]}, {"id": 2, "messages": [MESSAGE]}]},
        {"conversations": [{"prompt": "a", "chosen": "b", "rejected": "c"}]},
    ],
)
def test_an_object_with_a_list_of_other_objects_has_as_many_rows(rows: dict[str, Any], tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.json", orjson.dumps(rows))) == next(iter(rows.values()))


def test_the_speakers_that_begin_a_conversation_are_roles() -> None:
    assert {*FIRST_SPEAKERS} <= {*ROLES, *USUAL_ROLES}


def test_a_broken_element_is_an_error_of_its_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", b'\xef\xbb\xbf[{"a":1} {"b":2}, {"c":3}, 4,, {"d":"\xff"}, {"e": "x\\"}"}]')
    found = read_numbered(path)
    assert [number for number, _ in found] == [1, 2, 3, 4, 5, 6]
    assert (found[1][1], found[5][1]) == ({"c": 3}, {"e": 'x"}'})
    for number, error in (0, "not valid JSON .* at byte 9"), (2, "found int: '4'"), (3, "nothing stands"), (4, "0xff"):
        assert re.search(error, found[number][1])


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'[{"a": 1}, {"b": "x', r"not valid JSON at byte 12, near '\{\"b\": \"x': a bracket or quote is not closed"),
        (b'[{"a": 1}', "a bracket or quote is not closed|expected ',' or ']', found its end"),
        (b'[{"a": 1}] {}', "something follows the end of its value"),
        (b'{"rows": [{"a": 1}] "b"}', "expected ',' or '}', found '\"'"),
        (b'{"rows": [{"a": 1}], 5}', "expected '\"', found '5'"),
        (b'{"rows" [{"a": 1}]}', "expected ':', found '\\['"),
        (b'{\n"rows": [{"a": 1}]}\n{\n"rows": [{"a": 2}]}', "something follows the end of its value"),
        (b'{"rows": [{"a": 1}], "rows": [{"a": 2}]}', "its object has 'rows' more than once: rename one of them"),
        (b"[ ]", "holds no rows: leave it out, or write it again"),
        (b"{}", "no member of its object with an array of objects: give an array of objects"),
    ],
)
def test_json_that_breaks_off_or_is_no_array_is_named(tmp_path: Path, data: bytes, error: str) -> None:
    with pytest.raises(DataError, match=error):
        read(write(tmp_path / "a.json", data))


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        (b'{"a": 1, "b": [2]}', [{"a": 1, "b": [2]}]),
        (b'{"k": {"a": 1},\n "l": { }, "m": {"id": 5}}', [{"id": "k", "a": 1}, {"id": "l"}, {"id": 5}]),
        (b'{"k": {"a": 1}}', [{"k": {"a": 1}}]),
        (b'[[{"role": "user", "content": "q"}]]', [{"messages": [{"role": "user", "content": "q"}]}]),
    ],
)
def test_a_lone_row_rows_by_ids_and_bare_conversations_are_read(tmp_path: Path, data: bytes, rows: list[Any]) -> None:
    assert [*read(write(tmp_path / "a.json", data))] == rows


def test_an_element_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_array, "MAX_ROW_BYTES", 1 << 20)
    path = write(tmp_path / "a.json", b'[{"a": 1}, {"b": [1, 2}, ' + b'{"c": 3}, ' * 500_000 + b"{}]")
    with pytest.raises(DataError, match=r"a value is longer than 1 MiB, or its bracket or quote is not closed"):
        read(path)


FIELDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8) | st.sampled_from(
    ["007", "", " x ", '"', 'a,"b"\n\nc', "\r\n", "\t", "é"]
)


@given(
    rows=st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=12),
    delimiter=st.sampled_from([",", "\t"]),
    end=st.sampled_from(["\n", "\r\n"]),
    unit_bytes=st.integers(1, 60),
)
@examples(120)
def test_fields_of_delimited_files_are_text_as_it_stands(
    rows: list[tuple[str, str]], delimiter: str, end: str, unit_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("a.csv" if delimiter == "," else "a.tsv")
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_ALL).writerows(
                [("id", "te xt"), *rows]
            )
        assert read(path, quote='"', unit_bytes=unit_bytes) == [
            {"id": first, "te xt": second} for first, second in rows
        ]


def test_quotes_of_tsv_are_text_unless_it_is_said_that_they_are_quotes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", b'id\ttext\r\n1\t"so it began\n2\tnot a quote\n3\t""\n')
    rows = [{"id": "1", "text": '"so it began'}, {"id": "2", "text": "not a quote"}, {"id": "3", "text": '""'}]
    assert read(path) == read(tmp_path, format="tsv") == rows
    doubled = write(tmp_path / "doubled.tsv", b'id\ttext\n1\t"so ""it"" began"\n2\t"so"\n')
    for spec in (doubled, f"{doubled}@[:2]"):
        found = read_numbered(spec)
        assert "seems to stand in quotes: pass --quote double, or none if it is text" in found[0][1]
        assert found[1] == (2, {"id": "2", "text": '"so"'})
    assert [row["text"] for row in read(doubled, quote='"')] == ['so "it" began', "so"]
    assert [row["text"] for row in read(doubled, quote="")] == ['"so ""it"" began"', '"so"']
    quoted = write(tmp_path / "q" / "a.tsv", b'"id"\t"text"\n"1"\t"a\tb ""c"""\n')
    assert read(quoted, quote='"') == read(quoted.parent, quote='"') == [{"id": "1", "text": 'a\tb "c"'}]
    with pytest.raises(DataError, match='columns of its header are in quotes, "id": pass --quote double'):
        read(quoted)
    plain = write(tmp_path / "a.csv", b'id,text\n1,"x\n')
    assert read(plain, quote="") == [{"id": "1", "text": '"x'}]
    single = write(tmp_path / "single.csv", b"id,text\n1,'a, \"b\"'\n")
    assert read(single, quote="'") == [{"id": "1", "text": 'a, "b"'}]


@given(
    lines=st.lists(
        st.sampled_from([b"1\ta", b"", b"2", b"\xff\t3", b'"\t"', b"4\t\xc3\xa9", b"x\ry\tz", b"5\t6\t7"]), max_size=9
    ),
    end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    before=st.sampled_from([b"", b"\n", b"\xef\xbb\xbf"]),
    is_ended=st.booleans(),
    unit_bytes=st.integers(1, 30),
)
@examples(150)
def test_rows_without_quotes_are_the_same_by_ranges_as_in_a_stream(
    lines: list[bytes], end: bytes, before: bytes, is_ended: bool, unit_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = before + end.join([b"a\tb", b"0\t0", *lines]) + (end if is_ended else b"")
        path = write(Path(folder) / "a.tsv", data)
        ranges = read_numbered(path, unit_bytes=unit_bytes)
        assert ranges == read_numbered(f"{path}@[:1000]", unit_bytes=unit_bytes)  # of a slice rows are counted


def test_rows_of_csv_that_do_not_fit_are_errors_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b'\xef\xbb\xbfa,b\r\n1,2\r\n\r\n1,2,3\r\n1\r\n"x"y,2\r\n\xff,2\r\n7,8\r\n"open,')
    found = read_numbered(path)
    assert [number for number, _ in found] == [1, 2, 3, 4, 5, 6, 7]
    assert (found[0][1], found[5][1]) == ({"a": "1", "b": "2"}, {"a": "7", "b": "8"})
    errors = [
        "3 fields, where the header names 2",
        "1 fields, where",
        "not valid CSV .* line 6",
        "not valid UTF-8 near",
    ]
    for error, (_, text) in zip([*errors, "not valid CSV"], [*found[1:5], found[6]], strict=True):
        assert re.search(error, text)
    assert read(f"{path}@[0:1]") == [{"a": "1", "b": "2"}]
    assert read_numbered(f"{path}@[-2:-1]") == [(6, {"a": "7", "b": "8"})]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_the_header_of_a_file_that_was_joined_is_no_row(tmp_path: Path, name: str) -> None:
    data = b"text,label\nx,y\ntext,label\nz,label\n"
    found = read_numbered(write(tmp_path / name, data if name == "a.csv" else data.replace(b",", b"\t")))
    assert [values for _, values in found[::2]] == [{"text": "x", "label": "y"}, {"text": "z", "label": "label"}]
    assert found[1] == (2, "it is the header again, as where files were joined: remove the row")
    words = write(tmp_path / f"words-{name}", b"text\nsome\ntext\n")
    assert read(words) == [{"text": "some"}, {"text": "text"}]


def test_headers_among_rows_are_known_with_a_byte_order_mark_and_in_another_order(tmp_path: Path) -> None:
    found = read_numbered(write(tmp_path / "a.csv", b"text,label\nx,y\n\xef\xbb\xbftext,label\nz,w\nlabel,text\n"))
    assert [number for number, values in found if isinstance(values, dict)] == [1, 3]
    assert str(found[1][1]).startswith("it is the header again")
    assert str(found[3][1]).startswith("it names the columns in another order")


def test_rows_of_tsv_that_a_line_break_in_quotes_cuts_are_told_of_quotes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", b'text\tlabel\n"x\ny"\tz\n')
    assert str(read_numbered(path)[0][1]) == (
        "1 fields, where the header names 2: pass --quote double if fields stand in quotes, or correct the row"
    )


def test_the_index_that_pandas_writes_is_no_column(tmp_path: Path) -> None:
    data = b",a,b\r\n0,x,y\r\n1,,z\r\n"  # DataFrame.to_csv()
    rows = [{"a": "x", "b": "y"}, {"a": "", "b": "z"}]
    assert read(write(tmp_path / "a.csv", data)) == rows
    assert read(write(tmp_path / "a.tsv", data.replace(b",", b"\t"))) == rows


def test_fields_longer_than_the_csv_modules_limit_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv.gz", gzip.compress(b"a,b\n1," + b"x" * 300_000 + b"\n"))
    assert len(read(path)[0]["b"]) == 300_000


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"a,b\n", "holds no rows"),
        (b"a,a\n1,2\n", "each once: 'a' does not: correct the header"),
        (b"a,\n1,2\n", "each once: '' does not"),
        (b",,a\n1,2,3\n", "each once: '' does not"),
        (b'"a\n', "its first row, the header with the column names, is broken: not valid CSV"),
        (b"\xff,b\n1,2\n", "of the header is not text in UTF-8|is broken: not valid UTF-8"),
    ],
)
def test_a_header_that_names_no_columns_is_refused(tmp_path: Path, data: bytes, error: str) -> None:
    with pytest.raises(DataError, match=error):
        read(write(tmp_path / "a.csv", data))
