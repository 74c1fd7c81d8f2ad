"""What a conversion would do, from its first rows; and nothing is written."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.converters.dry_run import dry_run
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.inspect.summary import inspect_dataset

from ..conftest import run_cli
from .held import chat


def write_chats(path: Path, numbers: range, *, bad: int | None = None) -> Path:
    rows = [{"note": "of no kind"} if number == bad else chat(number) for number in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_what_is_expected_is_what_the_conversion_writes(tmp_path: Path, chat_processor: ChatProcessor) -> None:
    rows = write_chats(tmp_path / "a.jsonl", range(9000))
    found = dry_run([rows], processor=chat_processor, num_rows=1500, compression="zstd")
    done = convert([rows], str(tmp_path / "out"), processor=chat_processor, compression="zstd", num_workers=1)
    assert 1500 <= found.num_rows < 6000
    assert (found.schema, found.num_rejected, found.num_sources_read) == ("messages", 0, 1)
    assert found.found == (f"{rows}: messages; reads messages",)
    expected = found.expected
    assert expected is not None
    assert not expected.is_exact
    assert done.num_tokens is not None
    assert expected.num_samples == pytest.approx(done.num_rows, rel=0.02)
    assert expected.num_tokens == pytest.approx(done.num_tokens, rel=0.02)
    assert expected.num_bytes == pytest.approx(done.num_bytes, rel=0.25)  # these rows repeat, and compress by 20
    assert expected.num_shards == done.num_shards
    assert expected.seconds > 0
    shown = inspect_dataset(str(tmp_path / "out"), num_samples=3, processor=chat_processor).samples
    assert [(sample.messages, sample.tokens) for sample in found.samples] == [
        (sample.messages, sample.tokens) for sample in shown
    ]
    assert shown[0].tokens is not None


def test_few_rows_are_told_exactly_with_all_that_are_left_out(tmp_path: Path, chat_processor: ChatProcessor) -> None:
    first = write_chats(tmp_path / "a.jsonl", range(300), bad=7)
    second = write_chats(tmp_path / "b.jsonl", range(300, 400))
    options: dict[str, Any] = {"processor": chat_processor, "longest": 190}
    found = dry_run([first, f"{second}@[10:]"], **options)
    done = convert([first, f"{second}@[10:]"], str(tmp_path / "out"), on_error="skip", num_workers=1, **options)
    assert (found.num_rows, found.num_samples, found.num_filtered) == (390, done.num_rows, done.num_filtered)
    assert found.num_filtered > 100
    assert found.found[0].startswith(f"{first} (1 of 2 sources read): ")
    assert len(found.rejects) == done.num_rejected == 1
    assert found.rejects[0].startswith(f"{first}:8: ")
    assert found.expected is not None
    assert (found.expected.is_exact, found.expected.num_tokens) == (True, done.num_tokens)
    limited = dry_run([first], limit=5).expected
    assert limited is not None
    assert (limited.num_samples, limited.num_shards) == (5, 1)


def test_of_many_sources_some_are_read_evenly_spread(tmp_path: Path) -> None:
    sources = [write_chats(tmp_path / f"{n:02}.jsonl", range(10 * n, 10 * n + 10)) for n in range(12)]
    found = dry_run(sources, num_rows=300)
    assert (found.num_sources, found.num_sources_read, found.num_rows) == (12, 3, 30)
    assert found.expected is not None
    assert found.expected.num_rows == pytest.approx(120, rel=0.1)
    sources[8].write_text('{"text": "of another kind"}\n')
    with pytest.raises(DataError, match=r"08\.jsonl gives samples with .* convert them to separate targets"):
        dry_run(sources, num_rows=300)


def test_nothing_is_written_anywhere(
    tmp_path: Path, s3_folder: str, chat_processor: ChatProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cli("--version")  # the server that commands are forked from begins in the usual temporary folder
    for name in ("data", "tmp", "cwd"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(tmp_path / "cwd")
    rows = write_chats(tmp_path / "data" / "a.jsonl", range(50))
    array = tmp_path / "data" / "b.json"  # in a store it must be fetched whole
    array.write_text(json.dumps([chat(number) for number in range(50)]))
    open_storage(s3_folder).upload(array, "b.json")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert dry_run([rows, f"{s3_folder}/b.json"], processor=chat_processor).num_samples == 100
    result = run_cli("convert", str(rows), f"{s3_folder}/out", "--dry-run", "--work", str(tmp_path / "work"))
    assert result.returncode == 0, result.stderr
    changed = {path.name for path in tmp_path.rglob("*") if before.get(path) != path.stat().st_mtime_ns}
    assert changed <= {"tmp"}  # a temporary folder was there meanwhile
    assert [each.key for each in open_storage(s3_folder).list_objects("")] == ["b.json"]


def test_the_command_shows_samples_rejects_and_what_to_expect(tmp_path: Path) -> None:
    rows = write_chats(tmp_path / "a.jsonl", range(50), bad=3)
    result = run_cli("convert", str(rows), str(tmp_path / "out"), "--dry-run")
    assert result.returncode == 0, result.stderr
    for text in (
        "a.jsonl: messages; reads messages", "sample 2 of 49", "a.jsonl:4: ", "the conversion would end at the first",
        "left out: 1 row with values that do not fit", "all of it", "time",
    ):  # fmt: skip
        assert text in result.stdout, text
    assert not (tmp_path / "out").exists()


def test_what_convert_refuses_at_once_is_refused(tmp_path: Path, chat_processor: ChatProcessor) -> None:
    (tmp_path / "a.txt").write_text("a text")
    with pytest.raises(ConfigError, match=r"the rows are 'text', and ChatProcessor reads 'messages'"):
        dry_run([tmp_path / "a.txt"], processor=chat_processor)
    (tmp_path / "b.jsonl").write_text('{"note": 1}\n')
    with pytest.raises(DataError, match="columns note fit no kind of rows"):
        dry_run([tmp_path / "b.jsonl"])
