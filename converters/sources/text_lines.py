"""Lines of text -> units of rows {"text": a line}: corpora that hold a sentence or a document on each line."""

from __future__ import annotations

from functools import partial

from .jsonl import LinesTable
from .table import MAX_ROW_BYTES, not_utf8, wide_text
from .units import Row


def text_row(number: int, line: bytes) -> Row:
    """The row of a line without its line end; spaces within it stay. With an error that says why, if it is none."""
    if len(line) > MAX_ROW_BYTES:
        return Row(number, None, f"longer than {MAX_ROW_BYTES >> 20} MiB: break it into several lines")
    if problem := wide_text(line):
        return Row(number, None, problem)
    try:
        return Row(number, {"text": line.removesuffix(b"\n").removesuffix(b"\r").decode()})
    except UnicodeDecodeError as error:
        return Row(number, None, not_utf8(line, error))


TextLinesTable = partial(LinesTable, row_of=text_row)
