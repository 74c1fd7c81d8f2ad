"""Files without rows among the files of a folder or glob are counted and passed over, of every format."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from lmms_stream.converters.convert import Progress, convert
from lmms_stream.converters.dry_run import dry_run
from lmms_stream.converters.part import convert_part
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.writing.reading import Part
from lmms_stream.errors import DataError, ObjectMissingError
from lmms_stream.rl import Dataset
from lmms_stream.storage.storage import open_storage

from ..datasets.chats import text_config
from ..datasets.streamed import Readers, counts_of, write_rows
from .sources.source_rows import write
from .sources.test_folders import write_tar

ROW = {"question": "q", "answer": "a"}
TABLE = pyarrow.table({"question": ["q"], "answer": ["a"]})
EMPTY = {  # ending -> a file without rows
    ".jsonl": b"", ".jsonl.gz": gzip.compress(b"\n\n"), ".json": b"[]", ".csv": b"question,answer\n",
    ".tsv": b"question\tanswer\n", ".tar": bytes(10240), ".parquet": b"", ".arrow": b"",
}  # fmt: skip


def lines(count: int = 1, *, question: str = "q") -> bytes:
    return (json.dumps(ROW | {"question": question}).encode() + b"\n") * count


def arrow(table: Any) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def parquet(table: Any) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    return bytes(sink.getvalue())


def full(ending: str, tmp_path: Path) -> bytes:
    """A file of that ending with one row."""
    if ending == ".tar":
        return write_tar(tmp_path / "one.tar", [("x.question.txt", b"q"), ("x.answer.txt", b"a")]).read_bytes()
    return {
        ".jsonl": lines(), ".jsonl.gz": gzip.compress(lines()), ".json": json.dumps([ROW]).encode(),
        ".csv": b"question,answer\nq,a\n", ".tsv": b"question\tanswer\nq\ta\n", ".parquet": parquet(TABLE),
        ".arrow": arrow(TABLE),
    }[ending]  # fmt: skip


def said_of(sources: Sequence[str | Path], target: Path, **options: Any) -> tuple[int, list[str]]:
    said: list[str] = []
    report = convert(list(sources), str(target), num_workers=1, progress=Progress(say=said.append), **options)
    return report.num_rows, [text for text in said if "passed over" in text]


@pytest.mark.parametrize("ending", EMPTY)
def test_a_part_without_rows_is_counted_and_passed_over(tmp_path: Path, ending: str) -> None:
    folder = tmp_path / "in"
    for name, data in {"0": EMPTY[ending], "1": full(ending, tmp_path), "2": EMPTY[ending]}.items():
        write(folder / f"part-{name}{ending}", data)
    (folder / "_SUCCESS").touch()
    empty = ", ".join(f"{folder}/part-{number}{ending}" for number in (0, 2))
    columns = {"question": "question.txt", "answer": "answer.txt"} if ending == ".tar" else {}
    schema = SchemaOptions(columns=columns)
    assert said_of([folder], tmp_path / "a", schema=schema) == (
        1,
        [f"2 files hold no rows and are passed over: {empty}"],
    )
    assert said_of([f"{folder}/part-*"], tmp_path / "b", schema=schema)[0] == 1
    with pytest.raises(DataError, match=re.escape(f"part-0{ending}") + ".*(is empty|holds no rows).*: leave it out"):
        convert([folder / f"part-0{ending}"], str(tmp_path / "c"), num_workers=1)
    for name in ("1", "2"):
        write(folder / f"part-{name}{ending}", EMPTY[ending])
    with pytest.raises(DataError, match="hold no rows: name files with rows"):
        convert([folder], str(tmp_path / "c"), num_workers=1)


def test_tables_without_rows_are_passed_over(tmp_path: Path) -> None:
    for ending, made in ((".parquet", parquet), (".arrow", arrow)):
        folder = tmp_path / ending[1:]
        for number in range(8):
            write(folder / f"{number}{ending}", made(TABLE.slice(0, number == 7)))
        num_rows, (said,) = said_of([folder], tmp_path / f"of{ending}")
        assert num_rows == 1
        assert said.startswith(f"7 files hold no rows and are passed over: {folder}/0{ending}, ")
        assert said.endswith(f"{folder}/4{ending} and 2 others")


def test_objects_without_rows_are_passed_over(s3_folder: str, tmp_path: Path) -> None:
    store = open_storage(s3_folder)
    objects = {"a.jsonl": b"", "b.jsonl": lines(), "c.jsonl": b"\n", "d.jsonl.gz": gzip.compress(b"")}
    for name, data in objects.items():
        store.write(name, data)
    num_rows, said = said_of([s3_folder], tmp_path / "out")
    assert (num_rows, len(said)) == (1, 1)
    assert said[0].startswith("3 files hold no rows")


def test_parts_of_a_conversion_and_dry_runs_pass_them_over_too(tmp_path: Path) -> None:
    folder, target = tmp_path / "in", str(tmp_path / "out")
    for number in range(6):
        write(folder / f"{number}.jsonl", lines(3, question=f"q{number}") if number % 2 else b"")
    tried = dry_run([folder])
    assert (tried.num_samples, tried.expected and tried.expected.num_samples) == (9, 9)
    for number in (1, 0):
        convert_part([folder], target, Part(number, 2), num_workers=1)
    assert said_of([folder], tmp_path / "out")[0] == 9
    assert said_of([folder], tmp_path / "once")[0] == 9
    for path in Path(target).glob("*.mds"):
        assert path.read_bytes() == (tmp_path / "once" / path.name).read_bytes()


def test_a_limit_of_a_list_counts_over_files_without_rows(tmp_path: Path) -> None:
    for name, data in (("a", b""), ("b", lines(3)), ("c", b"\n"), ("d", lines(3, question="p"))):
        write(tmp_path / "in" / f"{name}.jsonl", data)
    (tmp_path / "list.yaml").write_text("datasets:\n  - {path: in, limit: 4}\n")
    assert said_of([tmp_path / "list.yaml"], tmp_path / "out")[0] == 4


@pytest.mark.parametrize("compressed", [False, True])
def test_rows_behind_thousands_of_blank_lines_are_read(tmp_path: Path, compressed: bool) -> None:
    data = b"\xef\xbb\xbf" + b"\n" * 9000 + lines() + b"\n" * 9000
    path = write(tmp_path / "a.jsonl", gzip.compress(data) if compressed else data)
    path = path.rename(tmp_path / "a.jsonl.gz") if compressed else path
    assert said_of([path], tmp_path / "out") == (1, [])
    rejected = gzip.compress(data + b"{\n") if compressed else data + b"{\n"
    with pytest.raises(DataError, match=r"a\.jsonl(\.gz)?:18002: not valid JSON"):
        convert([write(path, rejected)], str(tmp_path / "other"), num_workers=1)


def test_only_blank_lines_without_end_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b"\n" * 300_000 + lines())
    with pytest.raises(DataError, match=r"blank lines have no row of the first 64 units of .*a\.jsonl"):
        convert([path], str(tmp_path / "out"), num_workers=1)


def test_rows_that_are_streamed_come_from_the_files_that_have_some(tmp_path: Path, tokenizer: Path) -> None:
    write_rows(tmp_path / "rows/b.jsonl", range(20))
    for name in ("a", "c"):
        write(tmp_path / f"rows/{name}.jsonl", b"\n" if name == "a" else b"")
    config = text_config(tmp_path / "rows", tokenizer, tmp_path / "cache", dataset_type="vision_iterable")
    assert sorted(counts_of(Readers(config, 1, 1).rest(), tokenizer)) == list(range(20))


def test_prompts_pass_empty_files_and_blank_first_lines_over(tmp_path: Path) -> None:
    row = json.dumps({"text": "a", "label": "1"}).encode() + b"\n"
    write(tmp_path / "a.jsonl", b"")
    write(tmp_path / "b.jsonl", b"\xef\xbb\xbf\n" + row)
    write(tmp_path / "c.jsonl", b"\xef\xbb\xbf" + row + b"\n" + row)
    write(tmp_path / "d.parquet", b"")
    samples = Dataset(tmp_path, label_key="label")
    assert [sample.label for sample in samples] == ["1", "1", "1"]


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write(folder / "a.jsonl", lines())
    (folder / ".#a.jsonl").symlink_to("user@host.1234")  # an editor's lock
    assert said_of([folder], tmp_path / "out") == (1, [])
    (folder / "b.jsonl").symlink_to("gone.jsonl")
    problem = r"in/b\.jsonl is a link to gone\.jsonl, which leads to no file: put that back, or remove the link"
    for spec in (folder, folder / "*.jsonl", folder / "b.jsonl"):
        with pytest.raises(ObjectMissingError, match=problem):
            convert([spec], str(tmp_path / "other"), num_workers=1)
