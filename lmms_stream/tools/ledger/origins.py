"""Samples of a run <-> rows of sources, and ids of the same rows in another dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import ConfigError
from ...mds.core import PackedDataset
from ...mds.provenance import Provenance, SourceRow
from ...mds.streams import StoredDataset
from ...storage.local import LocalStorage
from ...storage.storage import open_storage

MAX_FETCHED_BYTES = 1 << 28  # of the array of a remote dataset, for the rows of many samples
FEW_SAMPLES = 64  # up to this number, rows of a remote dataset are read one by one


class Origins:
    """Source rows of the samples of stored datasets. stored: datasets by name of the source."""

    def __init__(self, stored: Mapping[str, StoredDataset | PackedDataset]):
        self.stored = stored
        self._provenance: dict[str, Provenance | None] = {}

    def of(self, source: str, sample_ids: Sequence[int]) -> list[SourceRow] | None:
        """Source row of each sample; None if the dataset has no source rows, or the download would be too large.

        For a remote dataset, rows of up to FEW_SAMPLES samples are read one by one; for more samples the full array is
        downloaded (8 bytes per sample, at most MAX_FETCHED_BYTES).
        """
        stored = self.stored[source]
        if isinstance(stored, PackedDataset):
            rows = [stored.origin_of(each) for each in sample_ids]
            return None if None in rows else rows  # type: ignore[return-value]
        provenance = self.provenance(source)
        if provenance is None:
            return None
        if len(sample_ids) > FEW_SAMPLES and not isinstance(provenance.cache.storage, LocalStorage):
            if 8 * provenance.num_samples > MAX_FETCHED_BYTES:
                return None
            _ = provenance.rows
        return [provenance.source_of(sample_id) for sample_id in sample_ids]

    @property
    def named(self) -> dict[str, NamedSamples]:
        """Datasets by name of the source, with the interface for drop lists."""
        return {source: NamedSamples(self, source) for source in self.stored}

    @property
    def are_known(self) -> bool:
        """Whether any dataset has source rows."""
        return any(isinstance(each, PackedDataset) or self.provenance(name) for name, each in self.stored.items())

    def sample_named(self, source: str, stream: str, number: int) -> int | None:
        """Return the id of a sample of a source's stream; None for another name."""
        stored = self.stored[source]
        return stored.sample_named(stream, number) if isinstance(stored, PackedDataset) else None

    def sample_ids(self, source: str, file: str, row: int) -> list[int]:
        """Return the ids of samples made from a row, see samples_of_row; ConfigError without a record of the file."""
        stored = self.stored[source]
        if isinstance(stored, PackedDataset):
            return stored.samples_of(file, row)
        provenance = self.provenance(source)
        if provenance is None:
            raise ConfigError(f"the dataset of {source} has no record of the sources of its samples")
        found: list[int] = provenance.sample_of(file, row).tolist()
        return found

    def samples_of_row(self, file: str, row: int) -> list[tuple[str, int]]:
        """Samples made from a row of a file, each with its source; reads the full array.

        file: the name given to `convert`, a path, or the end of a path. row: counted from 1. ConfigError if no dataset
        has source rows, was made from the file, or has a sample of the row.
        """
        if row < 1:
            raise ConfigError(f"{file}:{row}: rows are counted from 1")
        found: list[tuple[str, int]] = []
        reasons: list[str] = []
        for source in self.stored:
            try:
                ids = self.sample_ids(source, file, row)
                there = [(source, sample_id) for sample_id in ids if sample_id < self.stored[source].num_samples]
                found += there
                if ids and not there:
                    reasons.append(f"{source} has grown since, by a part that has it")
            except ConfigError as error:
                reasons.append(f"{source}: {error}")
        if not found:
            why = "; ".join(reasons) or f"row {row} was left out of the conversion, or is not there"
            raise ConfigError(f"{file}:{row} is not a sample of the run ({why}): name a row, or a sample as SOURCE:ID")
        return found

    def provenance(self, source: str) -> Provenance | None:
        """Provenance of a source's dataset; None for a dataset without source rows. ConfigError for several streams."""
        if source not in self._provenance:
            stored = self.stored[source]
            if isinstance(stored, PackedDataset):
                stored = stored.one
            self._provenance[source] = Provenance.of(stored.storage, stored.cache.folder)
        return self._provenance[source]

    def renamed(self, source: str, sample_ids: Sequence[int], *, url: str) -> list[list[int]]:
        """Return, for each sample, the ids of the samples made from the same row in the dataset at a URL.

        A row can have several samples, or no sample if left out. `convert --append` does not change existing ids.
        ConfigError if either dataset has no source rows.
        """
        ours, theirs = self.provenance(source), Provenance.of(open_storage(url))
        if ours is None or theirs is None:
            lacking = self.stored[source].url if ours is None else url
            raise ConfigError(
                f"{lacking} has no record of the sources of its samples, so ids of {source} do not map to ids at "
                f"{url}: convert it again with this release"
            )
        return theirs.samples_of([ours.source_of(each) for each in sample_ids])


@dataclass(frozen=True, slots=True)
class NamedSamples:
    """The samples of a source."""

    origins: Origins
    source: str

    @property
    def num_samples(self) -> int:
        return self.origins.stored[self.source].num_samples

    @property
    def identity(self) -> str:
        return self.origins.stored[self.source].identity

    def sample_named(self, stream: str, number: int) -> int | None:
        """See HasSamples."""
        return self.origins.sample_named(self.source, stream, number)

    def samples_of(self, file: str, row: int) -> list[int]:
        """Ids of the samples made from a row of a file; ConfigError if the dataset was not made from the file."""
        return [each for each in self.origins.sample_ids(self.source, file, row) if each < self.num_samples]
