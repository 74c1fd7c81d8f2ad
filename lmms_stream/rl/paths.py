"""What is typed -> files, folders and URLs, and slices of their rows. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checks import plain_path
from ..errors import ConfigError

_SLICE = re.compile(r"(.*)@\[\s*(-?\d*)\s*:\s*(-?\d*)\s*\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Part:
    """A file, folder or URL, and which of its rows."""

    path: str
    rows: slice


def parse_paths(path: str | Path | Sequence[str | Path]) -> tuple[list[Part], slice]:
    """The parts of a path, and which rows of all of them together. Negative bounds count from the end.

    >>> parse_paths("[a.jsonl, b.parquet@[:-5]]@[0:100]")
    ([Part(path='a.jsonl', rows=slice(None, None, None)), Part(path='b.parquet', rows=slice(None, -5, None))], \
slice(0, 100, None))
    """
    if not isinstance(path, str | Path | Sequence):
        raise ConfigError(f"prompt data must be a path, a URL or several in a list, got {path!r}")
    if not isinstance(path, str | Path):
        parts = [_part(str(each)) for each in path]
        whole = slice(None)
    else:
        text, whole = sliced_path(str(path).strip())
        if Path(text).exists() or not (text.startswith(("[", "(")) and text.endswith(("]", ")"))):
            return [Part(_named(text, path), whole)], slice(None)
        parts = [_part(each) for each in _listed(text)]
    if not parts:
        raise ConfigError(f"{path!r} names no files: name a .jsonl or .parquet file, a folder, or a list of them")
    return parts, whole


def _part(text: str) -> Part:
    path, rows = sliced_path(text)
    return Part(_named(path, text), rows)


def _named(path: str, text: str | Path) -> str:
    if not path:
        raise ConfigError(f"{text!r} names no file: name a .jsonl or .parquet file, a folder, or a list of them")
    return plain_path("prompt data", path)


def sliced_path(text: str) -> tuple[str, slice]:
    """A path, and which of its rows @[START:STOP] behind it names; all without one."""
    if Path(text).exists():
        return text, slice(None)
    if matched := _SLICE.fullmatch(text):
        start, stop = (int(bound) if bound else None for bound in matched.groups()[1:])
        return matched[1], slice(start, stop)
    if re.search(r"@\[[^\]]*\]$", text):
        raise ConfigError(f"{text}: {text[text.rindex('@[') :]} is no slice of rows: write @[START:STOP]")
    return text, slice(None)


def _listed(text: str) -> list[str]:
    """The entries of a list that is written as Python's, or without quotes."""
    try:
        return [str(each) for each in ast.literal_eval(text)]
    except (ValueError, SyntaxError):
        return [each.strip() for each in re.split(r",(?![^\[]*\])", text[1:-1]) if each.strip()]
