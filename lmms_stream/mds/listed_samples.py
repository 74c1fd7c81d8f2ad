"""The lines of a list of samples -> their names. What a name means is for those to say who know sources and files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError

DATASET = "dataset"  # the key of a line that a run writes that holds the identity of the dataset


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedSample:
    """A line of a list. name: of a source or a file; "" where the line has none. number: of a sample, or of a row.

    is_id: the line is JSON with source and sample_id, as a run writes it, and names no row of a file. where: the line
    stands, for errors. dataset: the identity of the dataset whose sample it is, where the line says it.
    """

    name: str
    number: int
    is_id: bool
    where: str
    dataset: str | None = None


def listed_samples(file: str | Path) -> Iterator[ListedSample]:
    """The names in a drop list, a line each: `SOURCE:ID`, `ID`, `FILE:ROW`, or JSON with source and sample_id.

    Empty lines and those that begin with # say nothing. ConfigError for a file that cannot be read, and for a line that
    names no sample.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the drop list {file} cannot be read ({error}): name a text file") from error
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            yield _listed(line, where=f"{file}, line {number}")


def _listed(line: str, *, where: str) -> ListedSample:
    if line.startswith("{"):
        try:
            entry = json.loads(line)
            source, sample_id, dataset = str(entry["source"]), int(entry["sample_id"]), entry.get(DATASET)
            return ListedSample(name=source, number=sample_id, is_id=True, where=where, dataset=dataset)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{where}: {line} is no JSON with source and sample_id ({error!r})") from error
    name, _, number = line.rpartition(":")
    if not number.isdecimal():
        raise ConfigError(f"{where}: {line!r} names no sample: write SOURCE:ID, or FILE:ROW")
    return ListedSample(name=name, number=int(number), is_id=False, where=where)


# The small files that say what a stored dataset is: index.json, and dataset.json where a conversion wrote it.
