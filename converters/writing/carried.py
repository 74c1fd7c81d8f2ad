"""What is known of the samples of stored datasets, carried over to a dataset of some of them instead of found again.

The rows that samples were made of choose it: of a stored dataset, they are the ids of its samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import LengthsError
from ...mds.lengths import LengthIndex, joint_index, patches_of_all
from ...mds.provenance import ROW_BITS, Provenance, packed_rows
from ..sources.mds import StoredSource
from ..sources.units import Source
from ..stored.catalog import open_lengths, read_catalog

_CHUNK = 1 << 20  # samples looked at together


def carried_fingerprints(sources: Sequence[Source]) -> list[str]:
    """Lengths indexes that all sources have; none where one of them is no stored dataset."""
    stored = [source for source in sources if isinstance(source, StoredSource)]
    if len(stored) != len(sources):
        return []
    found = [read_catalog(source.dataset.storage).fingerprints for source in stored]
    return [fingerprint for fingerprint in found[0] if all(fingerprint in each for each in found)]


def carried_lengths(
    sources: Sequence[Source], fingerprints: Sequence[str], rows: Sequence[NDArray[np.int64]], *, folder: Path
) -> list[LengthIndex]:
    """Lengths indexes of samples. rows: int64 arrays, what each was made of, see packed_rows. folder: for copies.

    How tokens divide into those of texts and of media, which an index counts of all its samples together, is known only
    where all of them are there. Raises LengthsError where an index is damaged, StorageError.
    """
    packed = np.concatenate(rows)
    found = []
    for fingerprint in fingerprints:
        indexes = [_opened(source, fingerprint, folder / f"carried-{n}") for n, source in enumerate(sources)]
        if any(index is None for index in indexes):  # it was listed, or known by its processor, and is not there
            continue
        found.append(_selected([index for index in indexes if index is not None], packed))
    return found


def _opened(source: Source, fingerprint: str, folder: Path) -> LengthIndex | None:
    assert isinstance(source, StoredSource)
    dataset = source.dataset
    try:
        return open_lengths(dataset.storage, fingerprint, folder=folder, num_samples=dataset.num_samples)
    except LengthsError as error:
        raise LengthsError(f"{source.name}: {error}") from error


def _selected(indexes: Sequence[LengthIndex], packed: NDArray[np.int64]) -> LengthIndex:
    patches_of_sources = patches_of_all(indexes)
    lengths = _values([index.lengths for index in indexes], packed)
    is_all = len(packed) == sum(len(index.lengths) for index in indexes)  # a sample of a dataset is there once
    patches = None if patches_of_sources is None else _values(patches_of_sources, packed)
    return joint_index(indexes, lengths=lengths, patches=patches, is_all=is_all)


def _values(arrays: Sequence[NDArray[np.integer[Any]]], packed: NDArray[np.int64]) -> NDArray[np.uint32]:
    """uint32[n], the values of samples. arrays: of each source, by the ids of its samples."""
    values = np.empty(len(packed), np.uint32)
    for at in range(0, len(packed), _CHUNK):
        sources, rows = np.divmod(packed[at : at + _CHUNK], 1 << ROW_BITS)
        for source in np.unique(sources).tolist():
            here = sources == source
            values[at : at + _CHUNK][here] = arrays[source][rows[here]]
    return values


@dataclass(frozen=True, slots=True)
class CarriedOrigins:
    """What samples were made of, by the names of the sources: of a stored dataset, what its samples were made of."""

    names: tuple[str, ...]
    rows: list[NDArray[np.int64]]

    @staticmethod
    def of(sources: Sequence[Source], rows: Sequence[NDArray[np.int64]], *, folder: Path) -> CarriedOrigins:
        """rows: see carried_lengths. A stored dataset that does not say what it was made of is a source itself."""
        known = {
            number: provenance
            for number, source in enumerate(sources)
            if isinstance(source, StoredSource)
            and (provenance := Provenance.of(source.dataset.storage, folder / f"origins-{number}")) is not None
        }
        if not known:
            return CarriedOrigins(tuple(source.name for source in sources), list(rows))
        lists = [known[n].sources if n in known else (source.name,) for n, source in enumerate(sources)]
        number_of = {name: n for n, name in enumerate(dict.fromkeys(name for each in lists for name in each))}
        numbers = [np.array([number_of[name] for name in each], np.int64) for each in lists]
        return CarriedOrigins(tuple(number_of), list(_composed(rows, known, numbers)))


def _composed(
    rows: Sequence[NDArray[np.int64]], known: dict[int, Provenance], numbers: Sequence[NDArray[np.int64]]
) -> Iterator[NDArray[np.int64]]:
    for packed in (part for array in rows for part in np.split(array, range(_CHUNK, len(array), _CHUNK))):
        sources, ids = np.divmod(packed, 1 << ROW_BITS)
        made = np.empty_like(packed)
        for source in np.unique(sources).tolist():
            here = sources == source
            if source in known:
                inner, inner_rows = np.divmod(known[source].rows[ids[here]].astype(np.int64), 1 << ROW_BITS)
                made[here] = (numbers[source][inner] << ROW_BITS) | inner_rows
            else:
                made[here] = packed_rows(int(numbers[source][0]), ids[here])
        yield made
