"""Samples of a run <-> the rows of sources that they were made of, and what they are called in another dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import ConfigError
from ...mds.provenance import Provenance, SourceRow
from ...mds.streams import StoredDataset
from ...storage.local import LocalStorage
from ...storage.storage import open_storage

MAX_FETCHED_BYTES = 1 << 28  # of the array of a remote dataset, for the rows of many samples
FEW_SAMPLES = 64  # of such a dataset, whose rows are read one by one


class Origins:
    """Where the samples of some stored datasets come from. stored: the datasets by the names of their sources."""

    def __init__(self, stored: Mapping[str, StoredDataset]):
        self._stored = stored
        self._provenance: dict[str, Provenance | None] = {}

    def of(self, source: str, sample_ids: Sequence[int]) -> list[SourceRow] | None:
        """The row of each sample; None where the dataset does not say, or too much would have to be fetched for it.

        Of a remote dataset the rows of a few samples are read one by one, those of more with the whole array, which
        has 8 bytes a sample, up to MAX_FETCHED_BYTES.
        """
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
        """The datasets by the names of their sources, as drop lists ask them for samples."""
        return {source: NamedSamples(self, source) for source in self._stored}

    def num_samples(self, source: str) -> int:
        return self._stored[source].num_samples

    def identity(self, source: str) -> str:
        return self._stored[source].identity

    def samples_of_row(self, file: str, row: int) -> list[tuple[str, int]]:
        """The samples that a row of a file was made into, each with its source; reads all of the array.

        file: as `convert` was given it, its path, or the end of its path. row: counted from 1. ConfigError where no
        dataset says where its samples come from, was made of that file, or has anything of that row.
        """
        if row < 1:
            raise ConfigError(f"{file}:{row}: rows are counted from 1")
        found: list[tuple[str, int]] = []
        reasons: list[str] = []
        for source in self._stored:
            provenance = self.provenance(source)
            if provenance is None:
                reasons.append(f"the dataset of {source} does not say where its samples come from")
                continue
            try:
                ids = provenance.sample_of(file, row).tolist()
                there = [(source, sample_id) for sample_id in ids if sample_id < self._stored[source].num_samples]
                found += there
                if ids and not there:
                    reasons.append(f"{source} has grown since, by a part that has it")
            except ConfigError as error:
                reasons.append(f"{source}: {error}")
        if not found:
            why = "; ".join(reasons) or f"row {row} was left out of the conversion, or is not there"
            raise ConfigError(f"{file}:{row} is no sample of the run ({why}): name a row, or a sample as SOURCE:ID")
        return found

    def provenance(self, source: str) -> Provenance | None:
        """None where the dataset does not say where its samples come from."""
        if source not in self._provenance:
            stored = self._stored[source]
            self._provenance[source] = Provenance.of(stored.storage, stored.cache.folder)
        return self._provenance[source]

    def renamed(self, source: str, sample_ids: Sequence[int], *, url: str) -> list[list[int]]:
        """What samples of a source are called in the dataset at a URL: for each the ids made of the same row there.

        Several where a row gives several samples, none where it was left out. A dataset that has grown by `convert
        --append` keeps the ids of its samples. ConfigError where one of the two does not say where its samples come
        from: then names do not map.
        """
        ours, theirs = self.provenance(source), Provenance.of(open_storage(url))
        if ours is None or theirs is None:
            lacking = self._stored[source].url if ours is None else url
            raise ConfigError(
                f"{lacking} does not say where its samples come from, so that the ids of {source} do not map to those "
                f"at {url}: convert it again with this release"
            )
        return theirs.samples_of([ours.source_of(each) for each in sample_ids])


@dataclass(frozen=True, slots=True)
class NamedSamples:
    """The samples of a source."""

    origins: Origins
    source: str

    @property
    def num_samples(self) -> int:
        return self.origins.num_samples(self.source)

    @property
    def identity(self) -> str:
        return self.origins.identity(self.source)

    def samples_of(self, file: str, row: int) -> list[int]:
        """Ids of the samples that a row of a file was made into; ConfigError where the dataset was not made of it."""
        provenance = self.origins.provenance(self.source)
        if provenance is None:
            raise ConfigError("it does not say what it was made of: convert it again")
        return [each for each in provenance.sample_of(file, row).tolist() if each < self.num_samples]
