"""What stops a conversion: an error that names the value, the rule and the remedy, and nothing left in the way."""

from __future__ import annotations

import gzip
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pyarrow.parquet
import pytest
from lmms_stream.converters.convert import Progress, convert
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.writing.encoded_units import OnError
from lmms_stream.converters.writing.encoding import MAX_SAMPLE_BYTES, ShardFormat
from lmms_stream.errors import ConfigError, DataError, LmmsStreamError, StorageError
from lmms_stream.mds.packed import PackedStreamingDataset

from ..conftest import run_cli, run_command
from ..rounds import in_long_rounds, rounds
from .media_files import image_bytes, wav_bytes
from .sources.source_rows import json_lines, write

GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
SKIP_TOO = r" \(or pass --on-error skip to leave such rows out\)"


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def refused(
    source: Path, target: Path, message: str, *, error: type[LmmsStreamError] = DataError, **options: Any
) -> None:
    """The conversion ends with this error, and does not stand in the way of the next.

    It leaves nothing, unless the error is of a row that may be skipped, and units before it were done.
    """
    with pytest.raises(error, match=message) as raised:
        convert([source], str(target), **{"num_workers": 1, **options})
    good = write(target.with_name("good.jsonl"), json_lines([GOOD]))
    is_kept = "--on-error skip" in str(raised.value) and bool(files_below(target))
    assert files_below(target) == ([target / "_lmms" / "unfinished.json"] if is_kept else [])
    if is_kept:
        with pytest.raises(StorageError, match=r"with other .*sources"):
            convert([good], str(target), num_workers=1)
    convert([good], str(target), num_workers=1, overwrite=is_kept)
    assert len(PackedStreamingDataset(target)) == 1


# What cannot be read


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (os.mkfifo, DataError, "is not a regular file: write its content to a file, and name the file"),
        (lambda path: path.mkdir(), DataError, r"holds no data files \(0 others\): name a folder of data"),
        (lambda path: path.symlink_to("nowhere"), StorageError, "is a link to nowhere, which leads to no file: put"),
        (lambda path: path.symlink_to(path.name), StorageError, "is a link to rows.jsonl, which leads to no file"),
        (lambda path: path.symlink_to("/dev/zero"), DataError, "is not a regular file: write its content to a"),
    ],
    ids=["pipe", "folder", "dangling link", "circle of links", "device"],
)
def test_what_is_no_file_is_named(
    make: Callable[[Path], Any], error: type[LmmsStreamError], message: str, tmp_path: Path
) -> None:
    source = tmp_path / "rows.jsonl"
    make(source)
    refused(source, tmp_path / "out", rf"rows\.jsonl:? {message}", error=error)


@pytest.mark.parametrize(
    ("name", "message"), [("a.jsonl", "a.jsonl is not a regular file: "), ("a.txt", "a.txt is not a file: ")]
)
def test_a_pipe_in_a_folder_is_not_waited_for(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data" / name)
    refused(tmp_path / "data", tmp_path / "out", message)


AS_NOBODY = """
import os, sys, tempfile
from pathlib import Path
from lmms_stream.cli.main import main
with tempfile.TemporaryDirectory() as folder:  # all is imported that somebody else may not be allowed to read
    rows = Path(folder, "rows.jsonl")
    rows.write_text('{"text": "x"}')
    assert main(["convert", str(rows), folder + "/out", "--work", folder, "--workers", "1"]) == 0
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may write to, with rows in it; temporary files of processes lie there, too."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in (folder, folder / "tmp"):
            each.mkdir(exist_ok=True)
            each.chmod(0o777)
        write(folder / "rows.jsonl", json_lines([GOOD])).chmod(0o644)
        yield folder


@pytest.mark.parametrize("locked", rounds(["rows.jsonl", "target"], ["rows.jsonl", "target", "work"]))
def test_what_may_not_be_read_or_written_is_named_and_goes_on_once_it_may(
    locked: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(shared / "tmp"))
    for name in ("target", "work"):
        (shared / name).mkdir()
        (shared / name).chmod(0o777)
    rights = stat.S_IMODE((shared / locked).stat().st_mode)
    (shared / locked).chmod(0 if locked == "rows.jsonl" else 0o555)
    command = ["convert", f"{shared}/rows.jsonl", f"{shared}/target", "--work", f"{shared}/work", "--workers", "1"]
    result = run_command(sys.executable, "-c", AS_NOBODY, *command)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {shared / locked}"), result.stderr
    assert "Permission denied" in result.stderr
    assert result.stderr.endswith("check the path and its rights\n")
    (shared / locked).chmod(rights)
    result = run_command(sys.executable, "-c", AS_NOBODY, *command)
    assert result.returncode == 0, result.stderr
    assert len(PackedStreamingDataset(shared / "target")) == 1


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_source_that_goes_away_is_named_and_gone_on_with_when_it_is_back(num_workers: int, tmp_path: Path) -> None:
    rows = json_lines([GOOD] * 2000)
    source, away = write(tmp_path / "rows.jsonl", rows), tmp_path / "away"
    options: dict[str, Any] = {"unit_bytes": 10_000, "shard_bytes": 1 << 15, "num_workers": num_workers}

    def take_away(num_bytes: int) -> None:
        if source.exists():
            source.rename(away)

    with pytest.raises(StorageError, match=r"^.*/rows\.jsonl: No such file or directory: .*/rows\.jsonl: check"):
        convert([source], str(tmp_path / "out"), progress=Progress(advance=take_away), **options)
    assert not (tmp_path / "out" / "index.json").exists()
    away.rename(source)
    assert convert([source], str(tmp_path / "out"), **options).num_rows == 2000
    convert([source], str(tmp_path / "once"), **options)
    for path in files_below(tmp_path / "once"):
        assert path.read_bytes() == (tmp_path / "out" / path.relative_to(tmp_path / "once")).read_bytes()


@pytest.mark.parametrize("target", ["rows.jsonl", "rows.jsonl/below", "/proc/nowhere"])
def test_a_target_that_cannot_be_a_folder_is_named(target: str, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", json_lines([GOOD]))
    with pytest.raises(StorageError, match=rf"{target}/_lmms/unfinished\.json: .*: check the path and its rights"):
        convert([source], str(tmp_path / target))
    assert source.read_bytes() == json_lines([GOOD])


def test_an_empty_target_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="the target is empty: name a folder or a URL"):
        convert([write(tmp_path / "rows.jsonl", json_lines([GOOD]))], "")
    assert files_below(tmp_path) == [tmp_path / "rows.jsonl"]


# What is not what it should be


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("parquet", r"rows: not readable as Parquet \(.*\): copy it again, or write it again"),
        ("arrow", r"rows: not readable as Arrow \(.*\): copy it again, or write it again"),
        ("webdataset", r"rows: not readable as a tar \(.*\): copy it again"),
        ("json", r"rows: not valid JSON at byte 1, near '5 is no row.*: correct it there"),
        (
            "jsonl",
            r"rows: none of its first 2 rows can be read; the first: not valid JSON .* near '5 is no row'.*check",
        ),
        (
            "csv",
            "rows: columns 5 is no row fit no kind of rows: pass --columns 'text=5 is no row', or",
        ),
        ("images", "rows: a single image is not a source: name the folder of the class folders"),
        ("xml", "unknown format 'xml': expected one of json, jsonl"),
    ],
)
def test_a_format_that_does_not_fit_is_refused(format: str, message: str, tmp_path: Path) -> None:
    source = write(tmp_path / "rows", b"5 is no row\n6 is none\n")
    refused(source, tmp_path / "out", message, format=format)


def broken_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["word " * 50] * 500}), path, use_dictionary=False)
    data = path.read_bytes()
    path.write_bytes(data[:200] + bytes(200) + data[400:])


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("a.jsonl", json_lines([GOOD] * 500) + b'{"messages": [', r"a\.jsonl:501: not valid JSON \(.*: correct it"),
        ("a.jsonl", json_lines([GOOD] * 500) + b'\n{"a": "\xff"}', r"a\.jsonl:502: not valid UTF-8 \(byte 0xff"),
        ("a.jsonl", json_lines([GOOD, [1]]), r"a\.jsonl:2: expected a JSON object, found list"),
        ("a.json", b"[" + b",".join([orjson.dumps(GOOD)] * 500) + b', {"a": }]', r"a\.json:501: not valid JSON"),
        ("a.json", b"[" + b",".join([orjson.dumps(GOOD)] * 500), r"a\.json: not valid JSON at byte \d+, .* not closed"),
        ("a.csv", b"text,id\n" + b"word,1\n" * 500 + b"word\n", r"a\.csv:501: 1 fields, where the header names 2"),
        ("a.jsonl.gz", gzip.compress(json_lines([GOOD] * 500))[:-20], r"a\.jsonl\.gz: its gzip data is damaged"),
        ("a.parquet", broken_parquet, r"a\.parquet: not readable as Parquet \(.*\): copy it again"),
    ],
    ids=["line", "UTF-8", "no object", "element", "bracket", "fields", "gzip", "page"],
)  # fmt: skip
def test_what_is_broken_is_named_by_its_place(name: str, make: Any, message: str, tmp_path: Path) -> None:
    source = tmp_path / name
    make(source) if callable(make) else write(source, make)
    refused(source, tmp_path / "out", message, unit_bytes=5000)


TEXT = {"text": "some words"}


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([GOOD, TEXT], {}, r"a\.jsonl: rows of several kinds in one source: messages \(row 1\), text \(row 2\)"),
        ([GOOD] * 200 + [TEXT], {}, rf"a\.jsonl:201: expected a list of messages in column 'messages'.*{SKIP_TOO}"),
        ([GOOD], {"columns": {"messages": "chat"}}, r"no column chat \(messages\), found messages: correct --columns"),
        ([TEXT], {"keep": ("id",)}, "--keep id: no such column in the first rows, found text: correct it, or pass"),
        ([TEXT], {"kind": "alpaca"}, "no row fits --kind alpaca, which needs columns instruction and output"),
        ([{"note": "x"}], {}, "columns note fit no kind of rows: pass --columns text=note, or"),
        ([TEXT | {"id": 1}] * 200 + [TEXT | {"id": "x"}], {"keep": ("id",)}, r"a\.jsonl:201: column 'id' holds str"),
        ([], {}, r"a\.jsonl is empty \(0 bytes\): leave it out, or write it again"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_each_other_or_what_is_asked_are_named(
    rows: list[Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "a.jsonl", json_lines(rows))
    refused(source, tmp_path / "out", message, schema=SchemaOptions(**options), unit_bytes=5000)


def test_quotes_are_what_is_asked_for_and_others_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a.tsv", b'text\tid\n"a\tb"\t1\n')
    assert convert([source], str(tmp_path / "quoted"), quote="double", num_workers=1).num_rows == 1
    assert PackedStreamingDataset(tmp_path / "quoted")[0]["text"] == "a\tb"
    refused(source, tmp_path / "none", r"a\.tsv: .*3 fields, where the header names 2", quote="none")
    refused(
        source,
        tmp_path / "tab",
        r"quote '\\t' is not a quote: pass none, double, or a single",
        error=ConfigError,
        quote="\t",
    )
    other = write(tmp_path / "a.csv", b"text,id\na,1\n")
    refused(other, tmp_path / "comma", r"a\.csv: ',' separates fields and cannot be the quote, too", quote=",")
    for quote in ("", "single"):
        with pytest.raises(
            ConfigError, match=f"quote '{quote}' is not a quote: pass none, double, or a single character"
        ):
            convert([source], str(tmp_path / "out"), quote=quote)


@pytest.mark.parametrize(
    ("on_error", "num_workers"), [("fail", 2), ("skip", 1), *rounds([], [("fail", 1), ("skip", 2)])]
)
def test_rows_of_empty_text_are_left_out_and_counted(on_error: OnError, num_workers: int, tmp_path: Path) -> None:
    rows = [{"text": "" if number % 10 == 3 else f"text {number}"} for number in range(5000)]
    source, target = write(tmp_path / "a.jsonl", json_lines(rows)), str(tmp_path / "out")
    report = convert([source], target, on_error=on_error, num_workers=num_workers, unit_bytes=5000)
    assert (report.num_rows, report.num_empty, report.num_rejected) == (4500, 500, 0)
    assert json.loads((tmp_path / "out" / "_lmms" / "dataset.json").read_text())["num_empty"] == 500
    assert not (tmp_path / "out" / "_lmms" / "rejects.jsonl").exists()
    assert convert([source], target, on_error=on_error).num_empty == 500  # it is there already
    few = convert([source], str(tmp_path / "few"), on_error=on_error, num_workers=num_workers, limit=3, unit_bytes=5000)
    assert (few.num_rows, few.num_empty) == (3, 0)
    few = convert([source], str(tmp_path / "few"), num_workers=num_workers, limit=4, unit_bytes=5000, overwrite=True)
    assert (few.num_rows, few.num_empty) == (4, 1)


def test_a_source_of_empty_texts_alone_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", json_lines([{"text": ""}] * 7))
    refused(source, tmp_path / "out", r"no sample is left to write \(the text of 7 is empty\): check the sources")


def test_sources_of_different_columns_are_named(tmp_path: Path) -> None:
    sources = [write(tmp_path / f"{n}.jsonl", json_lines([row] * 500)) for n, row in enumerate((GOOD, TEXT))]
    with pytest.raises(
        DataError, match=r"1\.jsonl gives samples with text and .*0\.jsonl with messages, media: convert"
    ):
        convert(sources, str(tmp_path / "out"), unit_bytes=5000, shard_bytes=1 << 12, num_workers=2)
    assert files_below(tmp_path / "out") == []


# Rows of more than 2 GiB


def test_a_sample_of_two_gibibytes_is_refused() -> None:
    format = ShardFormat({"media": "bytes", "messages": "str"}, shard_bytes=1 << 26)
    largest = bytes(MAX_SAMPLE_BYTES)  # zeros, which take no memory until they are copied
    with pytest.raises(DataError, match=r"the sample has 2147483648 bytes, a shard holds at most 2147483647: split it"):
        format.encode({"media": largest, "messages": "x"})


@in_long_rounds
def test_a_line_of_more_than_two_gibibytes_is_named_and_left_out(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", json_lines([GOOD, GOOD]) + b'{"text": "')
    with source.open("ab") as file:
        file.truncate(file.tell() + (1 << 31))  # a hole: it takes no space
        file.seek(0, os.SEEK_END)
        file.write(b'"}\n' + json_lines([GOOD]))
    report = convert([source], str(tmp_path / "out"), num_workers=1, on_error="skip")
    assert (report.num_rows, report.num_rejected) == (3, 1)
    reject = json.loads((tmp_path / "out" / "_lmms" / "rejects.jsonl").read_text())
    assert reject["row"] == 3
    assert reject["reason"].startswith("longer than 256 MiB: break it into rows, or name media by path")


def test_media_of_more_than_two_gibibytes_are_named_unread(tmp_path: Path) -> None:
    with write(tmp_path / "large.wav", wav_bytes()).open("ab") as file:
        file.truncate((1 << 31) + 1)
    rows = [{"question": "What?", "answer": "That.", "audio": name} for name in ("small.wav", "large.wav")]
    write(tmp_path / "small.wav", wav_bytes())
    source = write(tmp_path / "rows.jsonl", json_lines(rows))
    message = rf"rows\.jsonl:2: media 'large\.wav' has more than {1 << 31} bytes, which a shard cannot hold: split it"
    with pytest.raises(DataError, match=message + SKIP_TOO):
        convert([source], str(tmp_path / "out"))
    assert convert([source], str(tmp_path / "out"), on_error="skip").num_rejected == 1


# Media


@pytest.fixture
def gallery(tmp_path: Path) -> Path:
    """Images below a folder, a secret beside it, and links to it."""
    folder = tmp_path / "gallery"
    for number in range(4):
        write(folder / f"{number}.png", image_bytes(color=number))
    write(tmp_path / "secret.png", image_bytes(color=99))
    (folder / "link.png").symlink_to("../secret.png")
    (folder / "links").symlink_to(tmp_path)
    write(folder / "text.png", b"not an image")
    write(folder / "half.png", image_bytes()[:12])
    write(folder / "empty.png", b"")
    write(folder / "sound.wav", wav_bytes())
    os.mkfifo(folder / "pipe.png")
    return folder


OUT = "leads out of the media root .*/gallery: only what lies below it is read: move it there, or pass another --media"


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("none.png", "'none.png' is missing below the media root .*/gallery: put it there, or pass --media-root"),
        ("text.png", "'text.png': its first bytes b'not an i' are of no known format: expected png"),
        ("half.png", "'half.png': Pillow cannot read its header .*: repair it, or convert it to JPEG or PNG"),
        ("empty.png", "'empty.png' is empty: repair or remove it"),
        ("sound.wav", "'sound.wav': it is audio/wav, where media of kind image are expected"),
        ("pipe.png", "'pipe.png' is not a file: correct the row"),
        ("https://host/0.png", "is on the web, and conversions do not download media: download it first"),
        ("data:image/png;base64,@", "is not valid base64 .*: encode it again"),
        ("../secret.png", OUT),
        ("../../../../../../etc/passwd", OUT),
        ("a/../../secret.png", OUT),
        ("/etc/passwd", OUT),
        ("file:///etc/passwd", OUT),
        ("file:///%2e%2e/etc/passwd", OUT),
        ("link.png", OUT),
        ("links/secret.png", OUT),
        ("s3://bucket/secret.png", OUT),
    ],
)
def test_bad_media_end_the_conversion_or_are_left_out_and_listed(
    reference: str, reason: str, gallery: Path, tmp_path: Path
) -> None:
    images = ["0.png", "1.png", reference, "2.png", "3.png"]
    rows = [{"question": "What?", "answer": "That.", "image": image} for image in images]
    source = write(gallery / "rows.jsonl", json_lines(rows))
    refused(source, tmp_path / "fails", rf"rows\.jsonl:3: (media|image) .*{reason}.*{SKIP_TOO}")
    report = convert([source], str(tmp_path / "out"), on_error="skip")
    assert (report.num_rows, report.num_rejected) == (4, 1)
    (reject,) = map(json.loads, (tmp_path / "out" / "_lmms" / "rejects.jsonl").read_bytes().splitlines())
    assert (reject["source"], reject["row"]) == (str(source), 3)
    stored = [sample["media"] for sample in PackedStreamingDataset(tmp_path / "out")[:]]
    assert stored == [image_bytes(color=number) for number in range(4)]
    for path in files_below(tmp_path / "out"):
        assert image_bytes(color=99) not in path.read_bytes()


def test_names_of_columns_do_not_steer_the_terminal(tmp_path: Path) -> None:
    odd = {"[/b]": 1, "\x1b[2J": 2, "[red]": 3}
    source = write(tmp_path / "rows.jsonl", json_lines([GOOD | odd]))
    result = run_cli("convert", str(source), str(tmp_path / "out"), "--workers", "1", "--keep", "[red]")
    assert result.returncode == 0, result.stderr
    assert "keeps [red] (int); leaves out [/b], \\x1b[2J" in result.stdout
    assert "\x1b[2J" not in result.stdout + result.stderr
    source = write(tmp_path / "other.jsonl", json_lines([odd]))
    result = run_cli("convert", str(source), str(tmp_path / "other"), "--workers", "1")
    assert result.returncode == 1
    assert "columns [/b], \\x1b[2J, [red] fit no kind of rows" in result.stderr
    assert "\x1b" not in result.stderr


def test_skipping_rows_is_advised_only_if_one_of_the_first_rows_fits(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    for others, wanted in (([False] * 3, r"\(none of the first rows fits\)$"), ([False, "b"], SKIP_TOO)):
        source.write_text("".join(json.dumps({"question": "q", "answer": each}) + "\n" for each in [True, *others]))
        with pytest.raises(DataError, match=rf"a\.jsonl:1: column 'answer' must hold text, found bool: .*{wanted}"):
            convert([source], str(tmp_path / "out"), num_workers=1, overwrite=True)
