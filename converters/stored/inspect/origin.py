"""Samples and the rows of sources that they were made of, each found by the other."""

from __future__ import annotations

from dataclasses import replace

from ....errors import ConfigError
from ....mds.provenance import Provenance
from .sample import SampleView


def with_source(sample: SampleView, provenance: Provenance | None) -> SampleView:
    """A sample with the row that it was made of, where that is known."""
    return sample if provenance is None else replace(sample, source=str(provenance.source_of(sample.number)))


def samples_of_row(provenance: Provenance | None, text: str, *, url: str) -> list[int]:
    """Numbers of the samples that were made of a row, in order; ConfigError where there is none.

    text: "FILE:ROW", the row counted from 1. provenance: of the dataset at the URL, None where it has none.
    """
    source, _, row = text.rpartition(":")
    if not source or not row.isdecimal() or not int(row):
        raise ConfigError(f"--source {text}: expected FILE:ROW, the row counted from 1")
    if provenance is None:
        raise ConfigError(
            f"{url} does not say where its samples come from: convert it again with this release, or leave --source out"
        )
    found: list[int] = provenance.sample_of(source, int(row)).tolist()
    if not found:
        raise ConfigError(
            f"no sample of {url} was made of row {row} of {provenance.named(source)}: it does not have that row, or "
            "the row was left out (_lmms/rejects.jsonl says why, where it did not fit)"
        )
    return found
