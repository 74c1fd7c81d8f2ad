"""What the user names -> sources, which cut themselves into units. specs -> [sources] -> units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...errors import DataError
from ...storage.disk_errors import disk_errors
from .formats import FILE_FORMATS
from .opener import Opener, UnitBytes
from .specs import Spec, parse_spec
from .table import USUAL, Delimited
from .units import UNIT_BYTES, Source


def open_sources(
    specs: Sequence[str | Spec | Source],
    *,
    format: str | None = None,
    delimited: Delimited = USUAL,
    scratch: Path,
    unit_bytes: int | UnitBytes = UNIT_BYTES,
    refused: Callable[[str, DataError], None] | None = None,
    ids: Path | None = None,
    target: str | None = None,
) -> list[Source]:
    """The sources that specs name, in their order; of folders and globs sorted by name. Sources among them stay.

    A spec is a file, a folder, a glob, each local or in an object store (s3://…); hf:NAME?split=… (see HubSpec); the
    folder or URL of an MDS dataset, whose samples are its rows; a YAML list of such, whose entries may have settings;
    or LLaMA-Factory's dataset_info.json#NAME,NAME. FOLDER?config=main&split=train is one of several configurations and
    splits of a folder (config=* all configurations), PATH@[START:STOP] a slice of the rows of one source, FILE.json#KEY
    a member of an object.
    format: how to read what specs name, whatever its name and content say. delimited: how CSV and TSV are written.
    scratch: a folder for what is fetched from object stores, each file from its turn to the close of its source.
    unit_bytes: of a unit, about, or what gives it for the bytes of a source; cuts depend on it. refused: is told the
    name of a file of a folder or glob that cannot be opened, and why, which is an error otherwise. ids: a file of the
    samples that are read of the one source, an MDS dataset; see read_ids. target: where a dataset of the sources is
    written, whose files are left out of a folder or glob that it is in.

    Raises DataError for what is empty, unknown or contradictory, StorageError for what is missing or cannot be read.
    Files in object stores are looked into when their turn comes, and their errors are raised by `units`. Of those whose
    name says that they are of a format that allows it, units read ranges; others are fetched first (see Source).
    """
    if format is not None and format not in FILE_FORMATS:
        raise DataError(f"unknown format {format!r}: expected one of {', '.join(FILE_FORMATS)}")
    units = unit_bytes if callable(unit_bytes) else lambda num_bytes: unit_bytes
    opener = Opener(scratch, units, delimited, refused, target)
    for each in specs:
        if not isinstance(each, str | Spec):
            opener.sources.append(each)
            continue
        with disk_errors(each.text if isinstance(each, Spec) else each):
            opener.open(each if isinstance(each, Spec) else parse_spec(each, format=format))
    if ids is not None:
        opener.select(ids)
    return list(opener.sources)
