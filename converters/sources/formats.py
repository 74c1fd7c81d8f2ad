"""The formats of files, a line each: how each is read, named and brought here.

A new format is a file that makes a Table, and a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .arrow import ArrowTable, ParquetTable
from .csv import DelimitedTable
from .json_array import JsonTable
from .jsonl import LinesTable
from .table import Location, Table
from .text_lines import TextLinesTable
from .webdataset import TarTable

QUOTES = {"csv": '"', "tsv": ""}  # what fields stand in, unless it is said


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """table: its rows at a location. extensions: what names of its files end in; none where only the user can tell.

    may_be_compressed: whether it is read from gzip, zstd, bzip2 and xz. by_ranges: whether units of a plain file read
    ranges of it, so that one in a store is not fetched whole.
    """

    table: Callable[[Location], Table]
    extensions: tuple[str, ...] = ()
    may_be_compressed: bool = False
    by_ranges: bool = False


FORMATS = {
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
FILE_FORMATS = (*FORMATS, "text", "images", "hf_dataset", "yaml")
EXTENSIONS = {
    **{extension: name for name, format in FORMATS.items() for extension in format.extensions},
    ".txt": "text",
    **dict.fromkeys(
        (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif"),
        "images",
    ),
}
