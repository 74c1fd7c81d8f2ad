"""A drop list -> the rows of the sources to leave out. names + sources + datasets -> rows.

`FILE:ROW` names a row of a source. `SOURCE:ID`, the notation of runs, names a sample of the dataset that a run read:
the sample's row is known from the dataset's provenance, or if the dataset itself is a source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..mds.index import DATASET_NAME
from ..mds.provenance import ListedSample, Provenance, SourceRow, listed_samples, named_source
from ..mds.shard_list import first_parts
from ..mds.stored_index import read_index
from ..storage.fetch_config import FetchConfig
from ..storage.storage import Storage, open_storage
from .identity import content_of, described
from .options import ConvertOptions
from .sources.mds import StoredSource
from .sources.units import Source
from .writing.dropped_rows import DroppedRows
from .writing.work import place_of, read_described

_FEW_SAMPLES = 64  # samples of a remote dataset whose rows are read individually


def check_drop_targets(options: ConvertOptions, targets: Sequence[Storage]) -> None:
    """Raise ConfigError if a target replaces a dataset whose sample ids are in the drop list."""
    for name, url in options.drop_sources.items():
        if place_of(open_storage(url).url) in [place_of(target.url) for target in targets]:
            raise ConfigError(
                f"--drop-source {name}={url} is the target, and replacing it changes its ids: choose another target"
            )


def dropped_rows(sources: Sequence[Source], options: ConvertOptions) -> DroppedRows | None:
    """Return the rows of the sources that the drop list names; None without a drop list.

    ConfigError for names without a match, if this is known before the sources are read; writing/dropped_rows.py checks
    rows behind the end of a source.
    """
    if options.drop is None:
        return None
    with TemporaryDirectory(prefix="lmms_stream-drop-") as scratch:
        found = _Found(sources, Path(scratch))
        ids: dict[str, list[ListedSample]] = {}
        for listed in listed_samples(options.drop):
            name = _drop_source(listed, options.drop_sources)
            if name is None:
                found.add_named(listed)
            else:
                ids.setdefault(name, []).append(listed)
        for name, each in ids.items():
            found.add_samples(options.drop_sources[name], each)
        found.look_up()
    return DroppedRows(
        file=options.drop,
        sources=[source.name for source in sources],
        rows={name: np.array(sorted(rows), np.int64) for name, rows in found.rows.items()},
        is_known=frozenset(found.stored),
    )


def _drop_source(listed: ListedSample, drop_sources: Mapping[str, str]) -> str | None:
    """Return the drop source of a line with a sample; None for a line with a row of a file."""
    name = listed.name
    if not name and not listed.is_id and len(drop_sources) == 1:
        return next(iter(drop_sources))
    if name in drop_sources:
        return name
    if listed.is_id or not name:
        raise ConfigError(
            f"{listed.where}: sample {listed.number} of {name or 'which source'!r}: name the dataset that the run "
            f"read, with --drop-source {name or 'NAME'}=URL"
        )
    return None


@dataclass
class _Found:
    """rows: of the sources by their names, from 0. scratch: a folder for what is fetched of datasets in stores."""

    sources: Sequence[Source]
    scratch: Path
    rows: dict[str, set[int]] = field(default_factory=dict)
    _others: list[tuple[SourceRow, str]] = field(default_factory=list)  # of no source; each with why, for an error

    @cached_property
    def stored(self) -> dict[str, StoredSource]:
        return {source.name: source for source in self.sources if isinstance(source, StoredSource)}

    @cached_property
    def _places(self) -> dict[str, dict[str, Any]]:
        """Descriptions of the sources by their places."""
        return {place_of(each["name"]): each for each in described(self.sources)}

    @cached_property
    def _provenance(self) -> dict[str, Provenance]:
        """Provenance of the stored datasets among the sources, if they have a provenance."""
        all_of_them = {name: self._provenance_of(source.dataset.storage) for name, source in self.stored.items()}
        return {name: each for name, each in all_of_them.items() if each is not None}

    def _provenance_of(self, storage: Storage) -> Provenance | None:
        return Provenance.of(storage, self.scratch / place_of(storage.url).replace("/", "-"))

    def add_named(self, listed: ListedSample) -> None:
        """Add a row of the drop list, counted from 1."""
        where, row = listed.where, SourceRow(listed.name, listed.number)
        if row.row < 1:
            raise ConfigError(f"{where}: {row}: rows are counted from 1")
        try:
            name = named_source(row.source, [source.name for source in self.sources], whole="this conversion")
        except ConfigError as error:
            self._others.append((row, f"{where}: {error}"))
        else:
            self._add(name, row.row - 1, where)

    def add_samples(self, url: str, listed: Sequence[ListedSample]) -> None:
        """Add samples by their ids in the dataset at a URL."""
        storage = open_storage(url)
        self._check_dataset(storage, listed)
        for name, source in self.stored.items():
            if place_of(source.dataset.storage.url) == place_of(storage.url):
                for each in listed:
                    self._add(name, each.number, each.where)
                return
        dataset, provenance = read_described(storage, DATASET_NAME) or {}, self._provenance_of(storage)
        if provenance is None or "num_documents" in dataset:
            why = "lays rows end to end in its samples" if provenance else "does not say what its samples were made of"
            raise ConfigError(
                f"{listed[0].where}: {storage.url} {why}, so ids do not map to rows: list rows as FILE:ROW"
            )
        if len(listed) > _FEW_SAMPLES:
            _ = provenance.rows  # read all rows at once
        then = {each["name"]: each for each in dataset.get("source", ())}
        for each in listed:
            if each.number >= provenance.num_samples:
                raise ConfigError(
                    f"{each.where}: {url} has no sample {each.number}: it has {provenance.num_samples}, counted from 0"
                )
            self._add_row(provenance.source_of(each.number), then, each.where, url=url)

    def _check_dataset(self, storage: Storage, listed: Sequence[ListedSample]) -> None:
        """Raise ConfigError for a line of a run that read another dataset, except earlier states of a grown dataset."""
        lines = {each.dataset: each.where for each in listed if each.dataset is not None}
        if not lines:
            return
        index = read_index(storage, self.scratch / "indexes", validate_hash=None, timeout_s=FetchConfig().timeout_s)
        lines.pop(index.shards.identity, None)
        for count in reversed(range(len(index.parts))) if lines else ():
            lines.pop(first_parts(index.shards, index.parts, count, url=storage.url).identity, None)
        for dataset, where in lines.items():
            raise ConfigError(
                f"{where}: the sample is of a dataset {dataset}, and {storage.url} is {index.shards.identity}, with "
                "other ids: name the place of the first dataset with --drop-source, or list rows as FILE:ROW"
            )

    def _add_row(self, row: SourceRow, then: Mapping[str, Mapping[str, Any]], where: str, *, url: str) -> None:
        """Add a row. then: the sources of the dataset at the URL by name, in their state at its conversion."""
        place = then.get(row.source, {}).get("at", place_of(row.source))
        now = self._places.get(place)
        if now is None:
            self._others.append((row, f"{where}: it was made of {row}, which is none of the sources"))
            return
        if row.source in then and content_of(then[row.source]) != content_of(now):
            raise ConfigError(
                f"{where}: it was made of {row}, and {now['name']} was changed since it was converted to {url}, so its "
                "rows may have changed: list rows as FILE:ROW"
            )
        self._add(now["name"], row.row - 1, where)

    def _add(self, name: str, row: int, where: str) -> None:
        if name in self.stored and row >= self.stored[name].dataset.num_samples:
            num_samples = self.stored[name].dataset.num_samples
            raise ConfigError(
                f"{where}: {name} has {num_samples} samples: there is no sample for row {row + 1}, from 1"
            )
        self.rows.setdefault(name, set()).add(row)

    def look_up(self) -> None:
        """Find rows of other files by the provenance of the stored datasets among the sources."""
        is_found = [False] * len(self._others)
        for name, provenance in self._provenance.items():
            asked = [SourceRow(_named(provenance, row.source), row.row) for row, _ in self._others]
            for number, ids in enumerate(provenance.samples_of(asked)):
                self.rows.setdefault(name, set()).update(ids)
                is_found[number] |= bool(ids)
        if not all(is_found):
            row, why = self._others[is_found.index(False)]
            raise ConfigError(
                f"{why}, and no dataset among them has a sample of {row}: correct the list, or name its source"
            )


def _named(provenance: Provenance, text: str) -> str:
    """Return the source of a dataset that a user's text names, or the text if the dataset has no match."""
    try:
        return provenance.named(text)
    except ConfigError:
        return text
