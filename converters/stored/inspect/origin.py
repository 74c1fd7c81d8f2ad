"""Samples and the rows of sources that they were made of, each found by the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ....errors import ConfigError, ShardError, StorageError
from ....mds.provenance import Provenance
from ....storage.storage import Storage
from .sample import SampleView


def with_source(sample: SampleView, provenance: Provenance | None) -> SampleView:
    """A sample with the row that it was made of, where that is known."""
    return sample if provenance is None else replace(sample, source=str(provenance.source_of(sample.number)))


def with_sources(
    samples: Sequence[SampleView], storage: Storage, folder: Path, notes: list[str]
) -> tuple[SampleView, ...]:
    """The same for samples of a dataset; a note where what it says of them is damaged. folder: for copies."""
    try:
        provenance = Provenance.of(storage, folder)
        return tuple(with_source(sample, provenance) for sample in samples)
    except (ShardError, StorageError) as error:
        notes.append(f"the rows that samples were made of are not shown: {error}")
        return tuple(samples)


def samples_of_row(storage: Storage, folder: Path, text: str) -> list[int]:
    """Numbers of the samples that were made of a row, in order; ConfigError where there is none.

    text: "FILE:ROW", the row counted from 1. folder: for copies.
    """
    source, _, row = text.rpartition(":")
    if not source or not row.isdecimal() or not int(row):
        raise ConfigError(f"--source {text}: expected FILE:ROW, the row counted from 1")
    provenance = Provenance.of(storage, folder)
    if provenance is None:
        raise ConfigError(
            f"{storage.url} does not say where its samples come from: convert it again with this release, or leave "
            "--source out"
        )
    found: list[int] = provenance.sample_of(source, int(row)).tolist()
    if not found:
        raise ConfigError(
            f"no sample of {storage.url} was made of row {row} of {provenance.named(source)}: it does not have that "
            "row, or the row was left out (_lmms/rejects.jsonl says why, where it did not fit); a sample of --concat "
            "is found by the row that it begins with alone"
        )
    return found
