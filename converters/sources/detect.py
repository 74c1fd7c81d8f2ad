"""Format of a file, by its name and its first bytes; an error if they disagree."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

import orjson

from ...errors import DataError, if_lfs_pointer
from ...registry import Registry
from .arrow import ArrowTable, ParquetTable
from .csv import DelimitedTable
from .files import HEAD_BYTES, DecompressedFile, File, LocalFile
from .json_array import JsonTable
from .jsonl import LinesTable, TextLinesTable
from .table import BOM, Delimited, Location, Table
from .units import NoRowsError
from .webdataset import TarTable

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bzip2", ".xz": "xz"}
EMPTY_TAR_BYTES = 10240  # zeros of an archive without files
CONTENT = {"object": "a JSON object", "text": "other text", "binary": "binary data of an unknown kind"}
CHOICES = {"object": "json or jsonl", "text": "csv, tsv, lines or text", "binary": "of what it is"}


def named_format(name: str) -> tuple[str | None, str | None]:
    """Return format and compression by a file's name; None if unknown."""
    path = PurePosixPath(name.lower())
    compression = COMPRESSIONS.get(path.suffix)
    extension = path.with_suffix("").suffix if compression else path.suffix
    return EXTENSIONS.get(extension) or _format_of_others(extension), compression


def _format_of_others(extension: str) -> str | None:
    if not extension:
        return None
    return next((name for name in FORMATS.others if extension in FORMATS[name].extensions), None)


def check_format(name: str | None, what: str | None = None) -> None:
    """Raise DataError for an unknown format. what: the problem, for the message."""
    others = ("text", "images", "hf_dataset", "yaml")
    if name is not None and name not in others and name not in FORMATS:
        raise DataError(f"{what or f'unknown format {name!r}'}: expected one of {', '.join((*FORMATS, *others))}")


def reads_ranges(format: str | None, delimited: Delimited) -> bool:
    """Return whether units of a plain file read byte ranges; for delimited text, only UTF-8 without quotes."""
    if format in QUOTES:
        return delimited.is_utf8 and not (QUOTES[format] if delimited.quote is None else delimited.quote)
    return format is not None and format in FORMATS and FORMATS[format].by_ranges


def format_of(file: File, *, name: str, insisted: str | None, encoding: str | None = None) -> str:
    """Return the format of a file: as requested, or by name and content. encoding: of delimited text.

    Raise NoRowsError for an empty file; DataError for a pipe or folder, a Git LFS pointer, a contradiction between name
    and content, and an unknown format; OSError.
    """
    if isinstance(file, LocalFile) and not file.path.is_file():  # a pipe can be read only once, and may never end
        raise DataError(f"{name} is not a regular file: write its content to a file, and name the file")
    if file.num_bytes == 0:
        raise NoRowsError(f"{name} is empty (0 bytes): leave it out, or write it again")
    head, compression = _read_head(file, name)
    if insisted:
        return insisted
    told, told_compression = named_format(name)
    if encoding and told in QUOTES:
        head = head.decode(encoding, errors="replace").encode(errors="replace")
    if told == "webdataset" and file.num_bytes <= EMPTY_TAR_BYTES and not any(head):
        raise NoRowsError(f"{name} holds no rows: leave it out, or write it again")
    found = _content(head, name)
    if told == "json" and found == "jsonl":  # many programs use .json for JSON lines
        told = "jsonl"
    if told and (compression != told_compression or not _fits(told, found, head)):
        raise _contradiction(name, told, told_compression, found, compression)
    chosen = told or {"object": "jsonl", "text": None, "binary": None}.get(found, found)
    if chosen is None:
        raise DataError(
            f"{name}: of unknown kind ({CONTENT.get(found, found)}): pass --format, one of {', '.join(FORMATS)}"
        )
    if compression and not (chosen in FORMATS and FORMATS[chosen].may_be_compressed):
        raise DataError(f"{name}: {chosen} is not read from {compression} data: decompress it first")
    return chosen


def _contradiction(
    name: str, told: str, told_compression: str | None, found: str, compression: str | None
) -> DataError:
    extension = "".join(PurePosixPath(name).suffixes[-2 if told_compression else -1 :])
    content, remedy = f"{CONTENT.get(found, found)}", f"pass --format {CHOICES.get(found, found)}"
    if compression != told_compression:
        content, remedy = f"{compression or 'not compressed'}", f"pass --format {told}"
    return DataError(
        f"{name}: its extension {extension} says {told}{f' in {told_compression}' if told_compression else ''}, "
        f"its content is {content}: rename it, or {remedy}"
    )


def _read_head(file: File, name: str) -> tuple[bytes, str | None]:
    """Return the decompressed first bytes after white space, and the compression."""
    with DecompressedFile(file, name=name) as stream:
        while chunk := stream.read(HEAD_BYTES):
            head = chunk.removeprefix(BOM).lstrip(b" \t\r\n")
            if head:
                while len(head) < HEAD_BYTES and (more := stream.read(HEAD_BYTES - len(head))):
                    head += more
                if problem := if_lfs_pointer(head):
                    raise DataError(f"{name} {problem}")
                return head, stream.compression
    raise NoRowsError(f"{name} holds no rows: leave it out, or write it again")


def _content(head: bytes, name: str) -> str:
    """Return a format, or "object" (one JSON object, valid in JSON and JSON lines), "text" or "binary"."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{name} is text in UTF-16: write it as UTF-8, or, for CSV or TSV, pass --encoding utf-16")
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow"
    if head[257:262] == b"ustar":
        return "webdataset"
    if re.match(rb'\{\s*["}]|\[\s*[]{["\d\-tfn]', head):
        return _kind_of_json(head)
    return "binary" if b"\x00" in head[:4096] else "text"


def _kind_of_json(head: bytes) -> str:
    line, end, rest = head.partition(b"\n")
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return "object" if not end and head.startswith(b"{") else "json"
    if rest.strip():
        return "jsonl"
    return "object" if head.startswith(b"{") else "json"


def _fits(told: str, found: str, head: bytes) -> bool:
    if told == "jsonl":  # a broken first line is an error of this row
        return found in ("jsonl", "object", "text") or (found == "json" and head.startswith(b"{"))
    if told in ("csv", "tsv"):
        return found == "text"
    return found == told or (told == "json" and found == "object") or told in FORMATS.others


# The formats of files: how each is read, named and brought here.

QUOTES = {"csv": '"', "tsv": ""}  # default quotes


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """Format of files. table: rows at a location. extensions: of file names; none if only the user can name the format.

    may_be_compressed: gzip, zstd, bzip2 and xz are read. by_ranges: units of a plain file read byte ranges; a stored
    file is then not fetched.
    """

    table: Callable[[Location], Table]
    extensions: tuple[str, ...] = ()
    may_be_compressed: bool = False
    by_ranges: bool = False


_OURS = {
    "json": Format(table=JsonTable, extensions=(".json",), may_be_compressed=True),
    "jsonl": Format(
        table=LinesTable, extensions=(".jsonl", ".ndjson", ".jsonlines"), may_be_compressed=True, by_ranges=True
    ),
    "csv": Format(
        table=partial(DelimitedTable, delimiter=",", quote=QUOTES["csv"]), extensions=(".csv",), may_be_compressed=True
    ),
    "tsv": Format(
        table=partial(DelimitedTable, delimiter="\t", quote=QUOTES["tsv"]), extensions=(".tsv",), may_be_compressed=True
    ),
    "parquet": Format(table=ParquetTable, extensions=(".parquet",), by_ranges=True),
    "arrow": Format(table=ArrowTable, extensions=(".arrow", ".feather")),
    "webdataset": Format(table=TarTable, extensions=(".tar",)),
    "lines": Format(table=TextLinesTable, may_be_compressed=True, by_ranges=True),  # .txt files are whole texts
}
FORMATS = Registry[Format]("formats", _OURS, accepts=lambda found: isinstance(found, Format), expected="a Format")
EXTENSIONS = {
    **{extension: name for name, format in _OURS.items() for extension in format.extensions},
    ".txt": "text",
    **dict.fromkeys(
        (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif"),
        "images",
    ),
}
